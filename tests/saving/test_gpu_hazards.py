"""What differs on a GPU, on stand-ins for its generators, its index and its graphs."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import Preempt, Preempted, Run, RunState, StateMismatch
from resumable.files import codec, tensor_file
from resumable.loaders.generators import rng, worker_rng
from resumable.parts import devices
from resumable.parts.gradients import Gradients
from resumable.saving.fence import Fence
from resumable.saving.host_memory import HostMemory
from tests.support import accelerator
from tests.support.accelerator import Accelerator


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    with accelerator.installed(monkeypatch) as gpu, gpu.on_device(gpu.training_device):
        yield gpu


@pytest.fixture
def written(gpu: Accelerator, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list of the GPUs whose generators were written to."""
    written: list[int] = []
    write = torch.cuda.set_rng_state

    def noted(state: torch.Tensor, index: int) -> None:
        written.append(index)
        write(state, index)

    monkeypatch.setattr(torch.cuda, "set_rng_state", noted)
    return written


def test_a_save_writes_to_no_generator_of_a_gpu(written: list[int], run_dir: Path) -> None:
    model = nn.Linear(8, 8)
    with RunState.load(run_dir, model=model) as state:
        state.save().wait()
        state.save().wait()

    assert written == []


def test_only_generators_that_differ_are_restored(gpu: Accelerator, written: list[int]) -> None:
    saved = rng.collect()
    torch.empty(3, device="cuda").uniform_()
    rng.restore(saved)

    assert written == [1]
    assert torch.equal(gpu.generators[1].get_state(), saved["cuda"][1])


@pytest.mark.parametrize(
    ("then", "now", "count"), [("cuda:3", "cuda:0", 1), ("cuda:0", "cuda:1", 2), ("cuda:10", "cuda:2", 3)]
)
@pytest.mark.usefixtures("gpu")
def test_generators_follow_the_devices_of_the_training(then: str, now: str, count: int) -> None:
    def draw(device: str) -> torch.Tensor:
        return torch.empty(3, device=device).uniform_().cpu()

    accelerator.replace(0, 11)
    draw(then)
    saved = rng.collect()
    expected = draw(then)
    accelerator.replace(1, count)
    rng.restore(rng.moved(saved, devices.moved({then}, {now})))

    assert torch.equal(draw(now), expected)


def on(device: str) -> dict[str, Any]:
    return {"part": {"$tensor": ["name", {"device": device}]}}


def moved(trees: Any, used: set[str], is_alone: bool) -> Any:
    facts = {stem: codec.tensor_facts(tree) for stem, tree in trees.items()}
    return devices.moved_trees(trees, facts, used, is_alone=is_alone)


@pytest.mark.parametrize("is_alone", [True, False])
def test_all_tensors_follow_what_is_trained_to_another_gpu(is_alone: bool) -> None:
    trees = {"model": on("cuda:0"), "extra": on("cuda:0"), "rank": {}}
    found = moved(trees, {"cuda:1"}, is_alone)
    assert found["extra"] == found["model"] == {"cuda:0": "cuda:1"}


def test_each_ranks_own_state_follows_its_own_device() -> None:
    rank = {"position": {"devices": ["cuda:3"]}}
    trees = {"model": on("cuda:0"), "rank": rank}
    assert moved(trees, {"cuda:0"}, False) == {"model": {}, "rank": {"cuda:3": "cuda:0"}}


def test_a_worker_leaves_the_generator_of_a_gpu_alone() -> None:
    class OnGpu(torch.Generator):
        device = torch.device("cuda")

        def get_state(self) -> Any:
            raise AssertionError("a forked process can use no GPU")

    watch = worker_rng.Watch({"own": OnGpu(), "other": np.random.default_rng(1)})
    assert "own.other" in watch.states()
    assert "own.own" not in watch.states()


class Training:
    """A small training with everything on the CPU, whatever the default device is."""

    def __init__(self, run_dir: Path) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(4, 300, device="cpu"), nn.Dropout(0.2), nn.Linear(300, 1, device="cpu")
        )
        self.model.register_buffer("nothing", torch.empty(0, device="cpu"))
        self.optimizer = torch.optim.SGD(self.model.parameters(), momentum=0.9)
        self.own, self.there = torch.Generator(), {"t": torch.ones(3, device="cpu")}
        self.extra = {"own": self.own, "there": self.there}
        parts = {"model": self.model, "optimizer": self.optimizer, "extra": self.extra}
        self.state = RunState.load(run_dir, **parts, every=1, keep=None)

    def go_to(self, step: int) -> list[Any]:
        for _ in self.state.steps(step):
            self.model(torch.ones(4, 4, device="cpu")).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.there["t"] += torch.rand(3, generator=self.own, device="cpu")
        self.state.restore("newest")
        self.state.check()
        self.state.close()
        return [*(p.tolist() for p in self.model.parameters()), self.there["t"].tolist()]


@pytest.mark.heavy
def test_a_default_device_changes_nothing(run_dir: Path, tmp_path: Path) -> None:
    expected = Training(tmp_path / "whole").go_to(6)
    torch.set_default_device("meta")
    try:
        for step in (2, 4):
            Training(run_dir).go_to(step)
        found = Training(run_dir).go_to(6)
    finally:
        torch.set_default_device(None)

    assert found == expected


class Captured:
    """A training whose step is captured in a graph: what it calls afterwards is no hook."""

    def __init__(self, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(8, 8).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), capturable=True, **settings)
        self.loader = DataLoader(TensorDataset(torch.randn(24, 8)), batch_size=1)
        self.parts = {"model": self.model, "optimizer": self.optimizer, "loader": self.loader}
        self.graph = torch.cuda.CUDAGraph()
        self._x = torch.ones(2, 8).cuda()
        self._step()

    def _step(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.model(self._x).square().mean().backward()
        self.optimizer.step()

    def capture(self) -> None:
        with torch.cuda.graph(self.graph):
            self._step()


@pytest.mark.parametrize("is_first", [True, False])
def test_each_batch_with_a_captured_step_is_a_step(gpu: Accelerator, run_dir: Path, is_first: bool) -> None:
    training = Captured()
    if is_first:
        training.capture()
    state = RunState.load(run_dir, **training.parts, every=3, keep=None)
    if not is_first:
        training.capture()
    for _ in state.epochs(1):
        for _ in state.batches():
            training.graph.replay()
    state.close()

    assert state.step == 24
    steps = sorted(found.about.step for found in Run(run_dir).checkpoints())
    assert steps == [*range(3, 25, 3)]
    newest = Run(run_dir).open(8)
    assert (newest.path / "optimizer.safetensors").stat().st_size < 1500, "gradients were saved as state"


@pytest.mark.parametrize(
    ("rate", "is_scheduled", "is_first", "is_told"),
    [
        (0.01, True, False, True),
        (1, True, False, True),
        ("on the CPU", True, False, True),
        ("on the GPU", True, False, False),
        (0.01, False, False, False),
        (0.01, True, True, False),
    ],
)
def test_a_captured_learning_rate_that_a_scheduler_changes_is_warned_of(
    gpu: Accelerator, run_dir: Path, rate: Any, is_scheduled: bool, is_first: bool, is_told: bool
) -> None:
    tensors = {"on the CPU": torch.tensor(0.01), "on the GPU": gpu.put(torch.tensor(0.01))}
    training = Captured(lr=tensors.get(rate, rate))
    if is_scheduled:
        training.parts["scheduler"] = torch.optim.lr_scheduler.StepLR(training.optimizer, 1)
    if is_first:
        # Every start captures the one that the script gives.
        training.capture()
    with RunState.load(run_dir, **training.parts), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if not is_first:
            training.capture()
    texts = [str(one.message) for one in told if "learning rate" in str(one.message)]

    assert len(texts) == is_told
    assert all("captured with optimizer, whose learning rate is a number" in text for text in texts)
    assert all("[R17" in text for text in texts)


@pytest.mark.heavy
def test_a_captured_step_resumes_where_it_was_saved(gpu: Accelerator, run_dir: Path) -> None:
    whole = Captured()
    whole.capture()
    for _ in range(24):
        whole.graph.replay()
    expected = whole.model.weight.cpu()
    done = 0
    for seed, stop in enumerate((5, 9, None)):
        accelerator.replace(seed).set_device(1)
        training = Captured()
        training.capture()
        state = RunState.load(
            run_dir, **training.parts, every=3, keep=None, preempt=Preempt(on_preempt="raise")
        )
        try:
            for _ in state.epochs(1):
                for number, _ in state.enumerate():
                    training.graph.replay()
                    done += 1
                    if number == stop:
                        os.kill(os.getpid(), signal.SIGTERM)
        except Preempted:
            assert state.step == done
        state.close()

    assert done == 24
    assert torch.equal(training.model.weight.cpu(), expected)


def test_the_tensors_that_a_graph_writes_to_stay_where_they_are(gpu: Accelerator, run_dir: Path) -> None:
    model = nn.Conv2d(3, 4, 2).cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(torch.ones(2, 3, 4, 4, device="cuda")).sum().backward()
        optimizer.step()

    def places() -> list[int]:
        moments = [value for state in optimizer.state.values() for value in state.values()]
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return [t.data_ptr() for t in (*model.parameters(), *moments, *gradients)]

    step()
    graph, before = torch.cuda.CUDAGraph(), places()
    state = RunState.load(run_dir, model=model, optimizer=optimizer)
    with torch.cuda.graph(graph):
        step()
    for _ in state.steps(2):
        graph.replay()
        state.save().wait()
    saved = [p.tolist() for p in (*model.parameters(), *optimizer.state[model.weight].values())]
    graph.replay()
    state.restore("newest")
    assert [p.tolist() for p in (*model.parameters(), *optimizer.state[model.weight].values())] == saved
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)
    state.close()

    assert places() == before


@pytest.mark.filterwarnings("ignore")
@pytest.mark.heavy
def test_a_compiled_step_calls_the_hooks_as_they_are() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], foreach=True)
    fence = Fence([optimizer])
    graphs: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    waited: list[torch.Tensor] = []
    fence.shut(lambda: waited.append(torch.cumsum(parameter.detach(), 0)))
    step = torch.compile(lambda: optimizer.step(), backend=backend)
    for _ in range(2):
        parameter.grad = torch.ones(3)
        step()

    assert len(waited) == 2
    assert not any("cumsum" in code for code in graphs)


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_the_threads_of_a_save_let_others_capture(gpu: Accelerator, run_dir: Path, mode: str) -> None:
    training = Captured()
    state = RunState.load(run_dir, **training.parts)
    saved = state.save()
    with torch.cuda.graph(training.graph, capture_error_mode=mode):
        training._step()
        HostMemory(1 << 16).register(gpu.training_device)
        saved.wait()
    state.close()


class EightBit(torch.optim.SGD):
    """An optimizer with methods that torch's do not have, as those of bitsandbytes."""

    __module__ = "bitsandbytes.optim.optimizer"

    def to_gpu(self) -> None: ...


class Switching(EightBit):
    """One that may write to the parameters outside of its step."""

    def eval(self) -> None: ...


@pytest.mark.parametrize(("kind", "is_guarded"), [(EightBit, True), (Switching, False)])
def test_optimizers_of_bitsandbytes_are_guarded(kind: Any, is_guarded: bool) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = kind([parameter], lr=0.1)
    fence = Fence([optimizer])
    parameter.grad = torch.ones(3)
    optimizer.step()

    assert (parameter.data_ptr() in fence.guarded()) is is_guarded


class Own:
    """A part of the user's, which refuses its state."""

    def state_dict(self) -> dict[str, Any]:
        return {"it": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ValueError("not this")


class Refused:
    """A training that has gone on since its save, and will be refused its state."""

    def __init__(self, run_dir: Path) -> None:
        self.model = nn.Linear(200, 200).cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), momentum=0.9)
        parts = {"model": self.model, "optimizer": self.optimizer, "extra": {"own": Own()}}
        self.state = RunState.load(run_dir, **parts)
        for _ in self.state.steps(1):
            self.model(torch.ones(2, 200, device="cuda")).sum().backward()
            self.optimizer.step()
            self.state.save().wait()
        self.optimizer.step()

    def values(self) -> list[Any]:
        momentum = self.optimizer.state[self.model.weight]["momentum_buffer"]
        return [tensor.tolist() for tensor in (*self.model.parameters(), momentum)]


@pytest.mark.parametrize("has_room", [True, False])
def test_a_refused_restore_puts_back_on_the_gpu(gpu: Accelerator, run_dir: Path, has_room: bool) -> None:
    training = Refused(run_dir)
    before, size = training.values(), training.model.weight.nbytes
    gpu.finish()
    if not has_room:
        gpu.memory.leave(3 * size)
    gpu.blocking_copies.clear()
    with pytest.raises(StateMismatch, match="own refused its state") as refused:
        training.state.restore("newest")
    training.state.close()

    assert "Every object is as it was" in refused.value.fix
    assert (size in gpu.blocking_copies) is not has_room
    assert training.values() == before


def test_where_nothing_could_be_put_back_the_error_says_so(gpu: Accelerator, run_dir: Path) -> None:
    training = Refused(run_dir)
    gpu.finish()
    gpu.memory.leave(1000)
    with pytest.raises(StateMismatch, match=r"optimizer refused its state.*hold a mixture"):
        training.state.restore("newest")
    training.state.close()


@pytest.mark.parametrize("has_room", [True, False])
def test_small_tensors_of_any_dtype_are_loaded_onto_a_gpu(
    gpu: Accelerator, run_dir: Path, monkeypatch: pytest.MonkeyPatch, has_room: bool
) -> None:
    def made(value: int) -> nn.Module:
        model = nn.Linear(4, 4).cuda()
        for kind in (torch.uint8, torch.uint16, torch.uint32, torch.float64):
            model.register_buffer(str(kind)[6:], gpu.put(torch.full((5,), value).to(kind)))
        return model

    def full(raw: Any, slots: Any, device: Any = None) -> Any:
        if device is not None:
            raise torch.OutOfMemoryError("no room")
        return from_row(raw, slots, device)

    with RunState.load(run_dir, model=made(7)) as state:
        state.save()
    from_row = tensor_file.from_row
    if not has_room:
        monkeypatch.setattr(tensor_file, "from_row", full)
    RunState.load(run_dir, model=(model := made(1))).close()

    assert all((buffer.cpu() == 7).all() for buffer in model.buffers())


def test_moments_of_another_layout_go_where_a_graph_has_them(gpu: Accelerator, run_dir: Path) -> None:
    def made(layout: torch.memory_format) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Conv2d(3, 4, 2).cuda().to(memory_format=layout)
        optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
        model(torch.ones(2, 3, 4, 4, device="cuda")).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = made(torch.contiguous_format)
    with RunState.load(run_dir, model=model, optimizer=optimizer) as state:
        optimizer.step()
        state.save()
    expected = optimizer.state[model.weight]["exp_avg"].tolist()
    model, optimizer = made(torch.channels_last)
    before = optimizer.state[model.weight]["exp_avg"]
    RunState.load(run_dir, model=model, optimizer=optimizer).close()

    assert optimizer.state[model.weight]["exp_avg"] is before
    assert before.tolist() == expected


def test_gradients_of_a_window_go_where_a_graph_adds_to_them() -> None:
    parameter = nn.Parameter(torch.ones(3))
    watched = Gradients(torch.optim.SGD([parameter]))
    parameter.grad = there = torch.zeros(3)
    watched.is_captured = True
    watched.put_in({parameter: torch.full((3,), 2.0)})

    assert parameter.grad is there
    assert there.tolist() == [2.0, 2.0, 2.0]
