"""What differs on a GPU, on stand-ins for its generators, its index and its graphs."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import Preempted, Run, RunState
from resumable.files import large_files, threads
from resumable.loaders.generators import rng, worker_rng
from resumable.parts import devices
from resumable.saving.fence import Fence

Fake = Callable[[int], tuple[list[torch.Generator], list[int]]]


@pytest.fixture
def fake_gpus(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Returns the generators of so many GPUs, and a list of those that were written to."""

    def make(count: int) -> tuple[list[torch.Generator], list[int]]:
        generators = [torch.Generator() for _ in range(count)]
        for generator in generators:
            generator.manual_seed(7)
        written: list[int] = []

        def write(state: torch.Tensor, index: int) -> None:
            written.append(index)
            generators[index].set_state(state)

        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "default_generators", tuple(generators))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "fake")
        monkeypatch.setattr(torch.cuda, "set_rng_state", write)
        return generators, written

    return make


def test_a_save_writes_to_no_generator_of_a_gpu(fake_gpus: Fake, run_dir: Path) -> None:
    _, written = fake_gpus(2)
    model = nn.Linear(8, 8)
    with RunState.load(run_dir, model=model) as state:
        state.save().wait()
        state.save().wait()

    assert written == []


def test_only_generators_that_differ_are_restored(fake_gpus: Fake) -> None:
    generators, written = fake_gpus(2)
    saved = rng.collect()
    torch.rand(3, generator=generators[1])
    rng.restore(saved)

    assert written == [1]
    assert torch.equal(generators[1].get_state(), saved["cuda"][1])


@pytest.mark.parametrize(
    ("then", "now", "count"), [("cuda:3", "cuda:0", 1), ("cuda:0", "cuda:1", 2), ("cuda:10", "cuda:2", 3)]
)
def test_generators_follow_the_devices_of_the_training(
    fake_gpus: Fake, then: str, now: str, count: int
) -> None:
    generators, _ = fake_gpus(11)
    torch.rand(5, generator=generators[int(then[5:])])
    saved = rng.collect()
    expected = torch.rand(3, generator=generators[int(then[5:])])
    generators, _ = fake_gpus(count)
    rng.restore(rng.moved(saved, devices.moved({then}, {now})))

    assert torch.equal(torch.rand(3, generator=generators[int(now[5:])]), expected)


def test_devices_are_paired_in_the_order_of_their_numbers() -> None:
    assert devices.moved({"cuda:2", "cuda:10"}, {"cuda:0", "cuda:1"}) == {
        "cuda:2": "cuda:0",
        "cuda:10": "cuda:1",
    }


def on(device: str) -> dict[str, Any]:
    return {"part": {"$tensor": ["name", {"device": device}]}}


@pytest.mark.parametrize("is_alone", [True, False])
def test_all_tensors_follow_what_is_trained_to_another_gpu(is_alone: bool) -> None:
    trees = {"model": on("cuda:0"), "extra": on("cuda:0"), "rank": {}}
    moved = devices.moved_trees(trees, {"cuda:1"}, is_alone=is_alone)
    assert moved["extra"] == moved["model"] == {"cuda:0": "cuda:1"}


def test_nothing_moves_while_what_is_trained_stays() -> None:
    trees = {"model": on("cuda:0"), "extra": on("cuda:1"), "rank": {}}
    moved = devices.moved_trees(trees, {"cuda:0"}, is_alone=True)
    assert not any(moved.values())


def test_each_ranks_own_state_follows_its_own_device() -> None:
    rank = {"position": {"devices": ["cuda:3"]}}
    trees = {"model": on("cuda:0"), "rank": rank}
    moved = devices.moved_trees(trees, {"cuda:0"}, is_alone=False)
    assert moved == {"model": {}, "rank": {"cuda:3": "cuda:0"}}


def test_a_worker_leaves_the_generator_of_a_gpu_alone() -> None:
    class OnGpu(torch.Generator):
        device = torch.device("cuda")

        def get_state(self) -> Any:
            raise AssertionError("a forked process can use no GPU")

    watch = worker_rng.Watch({"own": OnGpu(), "other": np.random.default_rng(1)})
    assert "own.other" in watch.states()
    assert "own.own" not in watch.states()


def test_where_loaders_draw_on_a_gpu_its_generators_are_read_for_them(
    fake_gpus: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpus(1)
    assert "cuda" not in rng.collect(devices=False)
    monkeypatch.setattr(torch, "get_default_device", lambda: torch.device("cuda"))
    assert "cuda" in rng.collect(devices=False)


def test_a_generator_of_a_gpu_is_made_where_one_was(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "Generator", lambda device: made.append(device))
    for size in (16, 5056):
        rng.made_for(np.zeros(size, dtype=np.uint8))

    assert made == ["cuda", "cpu"]


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
    """A training whose optimizer is captured in a graph: what it calls afterwards is no hook."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(8, 8)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.loader = DataLoader(TensorDataset(torch.randn(24, 8)), batch_size=1)
        self.parts = {"model": self.model, "optimizer": self.optimizer, "loader": self.loader}
        self._monkeypatch = monkeypatch

    def backward(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.model(torch.ones(2, 8)).square().mean().backward()

    def capture(self) -> None:
        with self._monkeypatch.context() as capturing:
            capturing.setattr(torch.cuda, "is_available", lambda: True)
            capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            self.backward()
            self.optimizer.step()

    def replay(self) -> None:
        self.backward()
        torch.optim.AdamW.step.__wrapped__(self.optimizer)


@pytest.mark.parametrize("is_first", [True, False])
def test_each_batch_with_a_captured_step_is_a_step(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    training = Captured(monkeypatch)
    if is_first:
        training.capture()
    state = RunState.load(run_dir, **training.parts, every=3, keep=None)
    if not is_first:
        training.capture()
    for _ in state.epochs(1):
        for _ in state.batches():
            training.replay()
    state.close()

    assert state.step == 24
    steps = sorted(found.about.step for found in Run(run_dir).checkpoints())
    assert steps == [*range(3, 25, 3)]
    newest = Run(run_dir).open(8)
    assert (newest.path / "optimizer.safetensors").stat().st_size < 1500, "gradients were saved as state"


def test_a_captured_step_resumes_where_it_was_saved(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Captured(monkeypatch)
    whole.capture()
    for _ in range(24):
        whole.replay()
    done = 0
    for stop in (5, 9, None):
        training = Captured(monkeypatch)
        training.capture()
        state = RunState.load(run_dir, **training.parts, every=3, keep=None, on_preempt="raise")
        try:
            for _ in state.epochs(1):
                for number, _ in state.enumerate():
                    training.replay()
                    done += 1
                    if number == stop:
                        os.kill(os.getpid(), signal.SIGTERM)
        except Preempted:
            assert state.step == done
        state.close()

    assert done == 24
    assert torch.equal(training.model.weight, whole.model.weight)


@pytest.mark.filterwarnings("ignore")
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


def test_a_thread_that_works_with_a_gpu_lets_others_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []

    class Driver:
        def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> None:  # noqa: N802
            modes.append(mode._obj.value)

    monkeypatch.setattr(threads, "_driver", Driver)
    threads.allow_captures()

    assert modes == [2]


def test_a_save_on_its_way_keeps_no_tensor_that_the_training_has_dropped(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    write = large_files.write

    def late(*args: Any, **given: Any) -> Any:
        assert may_write.wait(20)
        return write(*args, **given)

    monkeypatch.setattr(large_files, "write", late)
    made: list[weakref.ref[torch.Tensor]] = []

    class Average:
        def state_dict(self) -> dict[str, torch.Tensor]:
            tensor = torch.zeros(1000)
            made.append(weakref.ref(tensor))
            return {"w": tensor}

        def load_state_dict(self, state: Any) -> None: ...

    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters())
    state = RunState.load(run_dir, model=model, optimizer=optimizer, extra={"average": Average()})
    made.clear()
    handle = None
    for step in state.steps(2):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        if step == 0:
            handle = state.save()
        else:
            assert made[0]() is None
            may_write.set()
    assert handle
    handle.wait()
    state.close()
