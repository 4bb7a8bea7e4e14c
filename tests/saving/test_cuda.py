"""What only a GPU can show: `pytest -m cuda` where there is one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from resumable import ResumableWarning, RunState
from resumable.files import tensor_file

pytestmark = pytest.mark.cuda
LARGE = 3000


class Own(torch.optim.AdamW):
    """An optimizer of the user's own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Switching(Own):
    """One that may write to the parameters outside of its step."""

    def eval(self) -> None: ...


class Training:
    """A large model on the GPU, whose steps keep it busy."""

    def __init__(self, kind: Any = torch.optim.AdamW, layers: int = 4, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(LARGE, LARGE) for _ in range(layers))).cuda()
        self.optimizer = kind(self.model.parameters(), **settings)
        self.x = torch.randn(64, LARGE, device="cuda")
        self.parts = {"model": self.model, "optimizer": self.optimizer}

    def backward(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.model(self.x).square().mean().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()

    def look(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def state_size(self) -> int:
        return 3 * sum(p.nbytes for p in self.model.parameters())


def saved(path: Path, stem: str = "model") -> dict[str, torch.Tensor]:
    return tensor_file.from_safetensors(memoryview(bytearray((path / f"{stem}.safetensors").read_bytes())))


def assert_holds(path: Path, expected: dict[str, torch.Tensor]) -> None:
    found = saved(path)
    assert [name for name in expected if not torch.equal(found[name], expected[name].cpu())] == []


def keep_busy() -> None:
    a = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        a = (a @ a).clamp(-1, 1)


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def warmed_up(training: Training) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        training.step()
    torch.cuda.current_stream().wait_stream(side)


def test_graphs_are_captured_while_a_save_is_copied(run_dir: Path) -> None:
    training = Training()
    state = RunState.load(run_dir, **training.parts, keep=1)
    x = torch.zeros(1000, device="cuda")
    captured(lambda: x.add_(1))
    for _ in range(5):
        training.step()
        expected = training.look()
        handle = state.save()
        for _ in range(50):
            captured(lambda: x.add_(1))
        training.step()
        handle.wait()
        assert_holds(handle.path, expected)
    state.close()


@pytest.mark.parametrize("is_first", [True, False])
def test_a_captured_step_is_counted_saved_and_exact(run_dir: Path, is_first: bool) -> None:
    training = Training(capturable=True, layers=1)
    loader = DataLoader(torch.zeros(24, 1), batch_size=1)
    warmed_up(training)
    if is_first:
        graph = captured(training.step)
    state = RunState.load(run_dir, **training.parts, loader=loader, every=3, keep=None)
    if not is_first:
        graph = captured(training.step)
    for _ in state.epochs(1):
        for _ in state.batches():
            graph.replay()
    assert state.step == 24
    expected = training.look()
    newest = state.save().path
    state.wait()
    assert_holds(newest, expected)
    state.close()

    assert sorted(found.about.step for found in state.run.checkpoints())[:8] == [*range(3, 25, 3)]


def test_a_save_leaves_the_dropout_of_cudnn_as_it_is(run_dir: Path) -> None:
    lstm = nn.LSTM(16, 16, 2, dropout=0.5).cuda()
    x = torch.randn(5, 2, 16, device="cuda")
    with pytest.warns(ResumableWarning, match="dropout.*R18"):
        state = RunState.load(run_dir, model=lstm)
    found = []
    for saves in (False, True):
        torch.cuda.manual_seed(9)
        lstm(x)
        if saves:
            state.save().wait()
        found.append(lstm(x)[0])
    state.close()

    assert torch.equal(*found)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Own, "channels_last"])
def test_a_save_takes_no_memory_of_the_training(run_dir: Path, kind: Any) -> None:
    training = Training(torch.optim.AdamW if isinstance(kind, str) else kind)
    if kind == "channels_last":
        training = Training(layers=1)
        convs = nn.Sequential(*(nn.Conv2d(512, 512, 3) for _ in range(8))).cuda()
        training.model = convs.to(memory_format=torch.channels_last)
        training.optimizer = torch.optim.AdamW(training.model.parameters())
        training.parts = {"model": training.model, "optimizer": training.optimizer}
        training.x = torch.randn(2, 512, 17, 17, device="cuda").to(memory_format=torch.channels_last)
    state = RunState.load(run_dir, **training.parts, keep=1)
    for _ in range(3):
        training.step()
        state.save().wait()
    torch.cuda.reset_peak_memory_stats()
    training.step()
    alone, reserved = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(10):
        training.step()
        handle = state.save()
        training.step()
        handle.wait()
    state.close()

    assert torch.cuda.max_memory_allocated() - alone < 0.02 * training.state_size()
    assert torch.cuda.memory_reserved() - reserved <= 8 << 20


def test_what_fits_only_between_two_steps_is_not_copied_on_the_gpu(run_dir: Path) -> None:
    training = Training(Switching, layers=8)
    needed = int(0.3 * torch.cuda.mem_get_info()[0])

    def step() -> None:
        activations = torch.empty(needed, dtype=torch.uint8, device="cuda")
        training.step()
        del activations

    step()
    torch.cuda.reset_peak_memory_stats()
    step()
    peak = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    torch.cuda.empty_cache()
    # At the peak half as much is left as a copy of the state takes.
    rest = torch.cuda.mem_get_info()[0] - peak - training.state_size() // 2
    filled = torch.empty(rest, dtype=torch.uint8, device="cuda")
    with RunState.load(run_dir, **training.parts, keep=1) as state:
        step()
        with pytest.warns(ResumableWarning, match="no room"):
            state.save()
        for _ in range(3):
            step()
            expected = {name: tensor.cpu() for name, tensor in training.model.state_dict().items()}
            handle = state.save()
            step()
            handle.wait()
            assert_holds(handle.path, expected)
    del filled
    torch.cuda.empty_cache()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Switching])
def test_an_optimizer_on_a_stream_of_its_own_is_waited_for(run_dir: Path, kind: Any) -> None:
    training = Training(kind)
    state = RunState.load(run_dir, **training.parts, keep=1)
    stream = torch.cuda.Stream()
    for _ in range(8):
        training.backward()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            keep_busy()
            training.optimizer.step()
            expected = training.look()
        handle = state.save()
        torch.cuda.current_stream().wait_stream(stream)
        training.step()
        handle.wait()
        assert_holds(handle.path, expected)
    state.close()


def test_two_hundred_saves_of_a_busy_gpu_hold_what_there_was(run_dir: Path) -> None:
    training = Training(layers=1)
    with RunState.load(run_dir, **training.parts, keep=1) as state:
        for _ in range(200):
            keep_busy()
            training.step()
            expected = training.look()
            handle = state.save()
            training.step()
            training.step()
            handle.wait()
            assert_holds(handle.path, expected)


def test_a_compiled_step_is_saved_as_it_was(run_dir: Path) -> None:
    training = Training(layers=2, foreach=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = torch.compile(training.optimizer.step)
        state = RunState.load(run_dir, **training.parts, keep=1)
        for number in range(6):
            training.backward()
            step()
            expected = training.look()
            handle = state.save()
            training.backward()
            step()
            handle.wait()
            assert_holds(handle.path, expected)
            assert state.step == 2 * number + 2
        state.close()
