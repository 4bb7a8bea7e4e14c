"""Saves, loads, batches and trainings on a GPU are right in whatever order its streams do their work."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState, SaveFailed
from resumable.files import tensor_file
from resumable.parts import reading
from resumable.parts.device_lanes import DeviceLane
from resumable.position import to_device
from resumable.saving.fence import Fence
from resumable.saving.gpu_copies import Copy, Transfer
from tests.support import accelerator
from tests.support.accelerator import Accelerator, Event, Stream
from tests.support.counted import Tally
from tests.support.gpu_training import Training, held

# Other tests are for what a training is warned of; only that a checkpoint was not made matters here.
pytestmark = pytest.mark.filterwarnings(
    "ignore::resumable.ResumableWarning", "error:(?s).*that checkpoint is not made:UserWarning"
)

Problem = str | None
Scenario = Callable[[int, Path], Problem]
"""Returns what is wrong in the order of that seed, if anything is."""


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    accelerator.make_small(monkeypatch)
    with accelerator.installed(monkeypatch):
        yield


def started(seed: int, count: int = 2) -> Accelerator:
    """Return new devices, as a new process finds them."""
    gpu = accelerator.replace(seed, count)
    gpu.set_device(gpu.training_device)
    return gpu


def save(seed: int, _: Path) -> Problem:
    """Images hold what there was at the save, while the training writes on."""
    gpu = started(seed, 3)
    training = Training(gpu, size=gpu.dice.choice([3, 30, 100]))
    if gpu.dice.random() < 0.3:
        training.buffer = gpu.put(training.buffer.cpu(), 1)
    streams = [gpu.training, Stream()]
    if gpu.dice.random() < 0.3:
        gpu.memory.leave(gpu.dice.choice([0, 64, 512]))
    for _ in range(4):
        stream = gpu.dice.choice(streams)
        stream.wait_stream(gpu.training)
        with gpu.on_stream(stream):
            training.step()
        weight = training.value
        training.write(training.buffer)
        buffer = training.value
        taken = training.take()
        training.write(training.buffer)
        training.step()
        if (found := held(taken)) != (weight, buffer):
            return f"an image holds {found}, not {(weight, buffer)}"
    return None


def write_around(seed: int, _: Path) -> Problem:
    """What is written to after a save, but not by a step, is never in a file unreported."""
    training = Training(started(seed))
    expected = training.value
    taken = training.take()
    training.write(training.weight)
    try:
        found = held(taken)[0]
    except SaveFailed:
        return None
    return None if found == expected else f"an image holds {found}, not {expected}"


def load(seed: int, folder: Path) -> Problem:
    """What is loaded is there for the training's next kernel, and no earlier kernel writes over it."""
    run = folder / "loaded"
    if not run.exists():
        started(seed)
        RunState.load(run, model=_network(1), extra={"own": {"a": torch.ones(30).cuda()}}).save().wait()
    gpu = started(seed)
    torch.manual_seed(1)
    expected = [p.tolist() for p in _network(1).parameters()]
    model, own = _network(2), {"a": torch.zeros(30).cuda()}
    state: RunState | None = None
    for number in range(2):
        for parameter in model.parameters():
            gpu.launch("kernel", functools.partial(parameter.data.fill_, number))
        if state:
            state.restore("newest")
        else:
            state = RunState.load(run, model=model, extra={"own": own})
        read = [parameter.detach().clone() for parameter in model.parameters()]
        if [one.tolist() for one in read] != expected or set(own["a"].tolist()) != {1.0}:
            return "other values than those that were saved"
    return None


def _network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 40), nn.BatchNorm1d(40), nn.Linear(40, 3)).cuda()


def prefetch(seed: int, _: Path) -> Problem:
    """The training reads the batches that the loader gave."""
    gpu = started(seed)
    is_pinned = gpu.dice.random() < 0.5

    def batches() -> Iterator[Tensor]:
        memory = torch.empty(12, pin_memory=is_pinned)
        for number in range(8):
            yield memory.fill_(number)

    total, every = torch.zeros(12, device="cuda"), []
    for batch in to_device.ToDevice("cuda", ahead=gpu.dice.random() < 0.7)(batches()):
        total.add_(batch)
        every.append(batch.mean())
        del batch
    found = [one.item() for one in every]
    if found != [*range(8)] or total.tolist() != [28.0] * 12:
        return f"the training has read {found}"
    return None


class Learning:
    """A training with all that a GPU does in its own time: in channels_last, with dropout and an average."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        torch.cuda.default_generators[1].manual_seed(5)
        share = 0.0 if kind == "captured" else 0.3
        inner = nn.Sequential(nn.Conv2d(3, 8, 2), nn.Flatten(), nn.Dropout(share), nn.Linear(32, 64))
        self.model = inner.cuda().to(memory_format=torch.channels_last)
        inner[0].requires_grad_(kind != "frozen")
        settings = {"lr": 0.1, "capturable": kind == "captured"}
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), **settings)
        if kind == "momentum":
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.average = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.loader = DataLoader(TensorDataset(torch.randn(24, 3, 3, 3)), batch_size=4, shuffle=True)
        self.stream = Stream() if kind == "stream" else None
        self.scaler = torch.amp.GradScaler(enabled=kind == "scaled", init_scale=2.0**10, growth_interval=3)
        self.parts = {"model": self.model, "optimizer": self.optimizer, "loader": self.loader}
        self.parts["scaler"] = self.scaler
        self.graph = self._captured() if kind == "captured" else None

    def _captured(self) -> Any:
        self.x, graph = torch.ones(4, 3, 3, 3, device="cuda"), torch.cuda.CUDAGraph()
        self._train(self.x)
        with torch.cuda.graph(graph):
            self._train(self.x)
        return graph

    def step(self, x: Tensor) -> None:
        if self.graph:
            self.x.copy_(x)
            self.graph.replay()
        else:
            self._train(x)
        for name, parameter in self.model.named_parameters():
            self.average[name].lerp_(parameter.detach(), 0.1)

    def _train(self, x: Tensor) -> None:
        self.scaler.scale(self.model(x).square().mean()).backward()
        training = torch.cuda.current_stream()
        if self.stream:
            self.stream.wait_stream(training)
        with torch.cuda.stream(self.stream):
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=False)
        if self.stream:
            training.wait_stream(self.stream)

    def values(self) -> list[Any]:
        tensors = [*self.model.parameters(), *self.average.values()]
        drawn = torch.empty(2, device="cuda").uniform_()
        # Their bytes: as numbers 0.0 and -0.0 are equal.
        return [bytes(tensor_file.as_bytes(tensor.cpu())) for tensor in (*tensors, drawn)]


@functools.cache
def _uninterrupted(kind: str) -> tuple[list[Any], int]:
    """Return how it ends, and how much memory it takes."""
    gpu = started(0)
    training = Learning(kind)
    for _ in range(2):
        for (x,) in training.loader:
            training.step(x.cuda())
    return training.values(), gpu.memory.reserved


def chain(seed: int, folder: Path) -> Problem:
    """A training that is stopped twice ends as an uninterrupted one."""
    kind = ["adamw", "frozen", "momentum", "scaled", "stream", "captured"][seed % 6]
    (expected, needed), run, done = _uninterrupted(kind), folder / f"chain{seed}", 0
    for number in range(3):
        gpu = started(3 * seed + number)
        training = Learning(kind)
        stop = done + gpu.dice.choice([1, 3, 5, 6]) if number < 2 else None
        gpu.memory.limit = needed + gpu.dice.choice([4 << 10, 8 << 10, 1 << 20])
        every, extra = gpu.dice.choice([1, 2, 3]), {"average": training.average}
        state = RunState.load(run, **training.parts, extra=extra, every=every, keep=2)
        _train(state, training, stop)
        done = state.step
        state.close()
    return None if training.values() == expected else f"{kind}: another end"


def _train(state: RunState, training: Learning, stop: int | None) -> None:
    for _ in state.epochs(2):
        for (x,) in state.batches(device="cuda"):
            training.step(x)
            if state.step == stop:
                return


def bad(scenario: Scenario, seeds: range, folder: Path) -> list[str]:
    """Return the seeds whose order is one in which something is wrong."""
    found = []
    for seed in seeds:
        try:
            problem = scenario(seed, folder)
            if 0 in accelerator.the_accelerator().contexts:
                problem = "something was done on a GPU that the training does not use"
        except (SaveFailed, AssertionError) as exc:
            problem = repr(exc)
        if problem:
            found.append(f"{scenario.__name__} {seed}: {problem}")
    return found


ORDERS: list[tuple[Scenario, int, int]] = [
    (save, 20, 160),
    (write_around, 20, 160),
    (load, 10, 40),
    (prefetch, 20, 160),
    (chain, 1, 4),
]
"""Scenarios, and how many orders of each: among the quick tests, and among the heavy ones."""


@pytest.mark.quick(6)
@pytest.mark.proves("exact")
@pytest.mark.parametrize(("scenario", "count"), [(one, quick) for one, quick, _ in ORDERS])
def test_some_orders(scenario: Scenario, count: int, tmp_path: Path) -> None:
    assert not bad(scenario, range(count), tmp_path)


@pytest.mark.proves("exact")
@pytest.mark.heavy
@pytest.mark.timeout(300)
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("scenario", "count"), [(one, count) for one, _, count in ORDERS])
def test_orders(scenario: Scenario, count: int, tmp_path: Path, tally: Tally, times: int) -> None:
    seeds = range(1000, 1000 + count * times)
    tally("orders of a GPU's work", len(seeds), bad(scenario, seeds, tmp_path))


def _skip(of: Any, name: str, result: Any = None) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(of, name, lambda *args: result)


def _copies_begin_at_once(patch: pytest.MonkeyPatch) -> None:
    make = Transfer.__init__

    def made(transfer: Transfer, *args: Any, **given: Any) -> None:
        make(transfer, *args, **given)
        transfer._begun = Event()

    patch.setattr(Transfer, "__init__", made)


def _lanes_are_filled_at_once(patch: pytest.MonkeyPatch) -> None:
    room = DeviceLane.room

    def filled(lane: DeviceLane, size: int) -> memoryview:
        lane._sent = [None, None]
        return room(lane, size)

    patch.setattr(DeviceLane, "room", filled)


def _loads_begin_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reading, "on_lanes", lambda devices, scan: scan(DeviceLane))


BREAKS: dict[str, tuple[Scenario, Callable[[pytest.MonkeyPatch], None]]] = {
    "a step does not wait for the copies": (save, _skip(Transfer, "hold_back")),
    "copies do not wait for the training": (save, _copies_begin_at_once),
    "copies do not wait for steps on another stream": (save, _skip(Fence, "catch_up")),
    "samples are not compared": (write_around, _skip(Copy, "has_another_content", False)),
    "a lane is filled before it is empty": (load, _lanes_are_filled_at_once),
    "a load does not wait for the training": (load, _loads_begin_at_once),
    "the training may use a batch for longer than it is kept": (prefetch, _skip(Tensor, "record_stream")),
    "a loader goes on before its memory is read": (prefetch, _skip(to_device._CopiesBeside, "wait")),
}
"""What breaks the order, and the scenario that has to find it."""


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_order_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, apply = BREAKS[name]
    apply(monkeypatch)

    assert any(bad(scenario, range(seed, seed + 1), tmp_path) for seed in range(60))
