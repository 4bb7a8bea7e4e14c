"""Small trainings, stopped and resumed in this process: each kind of loop and of loader in a second.

What breaks one of them breaks a promise, whatever the library is made of: many of the deliberate bugs of
`tests/promises/mutants` are caught here.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from resumable import ResumableWarning, Run, RunState

EPOCHS = 2
Seen = list[list[Any]]

pytestmark = [
    pytest.mark.proves("exact"),
    pytest.mark.filterwarnings("ignore:.* keeps no position, so .* batches of it are loaded again"),
]


class Stopped(Exception):
    """Raised right after a save, as if the process had been killed there."""


def draw() -> float:
    return float(torch.rand(())) + random.random() + float(np.random.rand())


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index + draw()])


class Counting(Noisy):
    """A dataset that counts in each worker, and has a state."""

    asked = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.asked += 1
        return torch.tensor([float(index + 10 * self.asked)])

    def state_dict(self) -> dict[str, int]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.asked = state["asked"]


class Remembers(Sampler[int]):
    """A sampler whose order depends on a state that it has."""

    epoch = 0

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter([(index + 3 * self.epoch) % 10 for index in range(10)])

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


class OwnPlace:
    """A loader that keeps its own position, and begins again when it is asked behind its end."""

    done = 0

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.done < 5:
            self.done += 1
            yield torch.tensor([self.done + draw()])
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done % 5}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


class NoPlace:
    """A loader that keeps no position, and draws as it loads."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return noise(5)


def noise(count: int = 5) -> Iterator[torch.Tensor]:
    """Yield batches each of which has what was drawn for those before it."""
    return (torch.tensor([total]) for total in itertools.accumulate(draw() for _ in range(count)))


def on(dataset: Any = None, **how: Any) -> DataLoader[Any]:
    return DataLoader(dataset or Noisy(), **{"batch_size": 2, **how})


class Training:
    """One start of a training: it notes what it sees, and stops after one of these events."""

    def __init__(self, run_dir: Path, loader: Any, stop: int | None) -> None:
        self.loader, self.stop = loader, stop
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        parts = {"model": self.model, "optimizer": self.optimizer, "loader": loader}
        self.state = RunState.load(run_dir, **parts, every=None, keep=None)
        self.seen: Seen = self.state.vars.setdefault("seen", [])

    def train(self, *batches: torch.Tensor) -> None:
        rows = torch.cat([batch.reshape(-1, 1) for batch in batches])
        self.model(rows * draw() / 100).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.note(*(batch.tolist() for batch in batches))

    def note(self, *what: Any) -> None:
        self.seen.append([*what, self.model.weight.item(), draw()])
        if len(self.seen) == self.stop:
            self.state.save().wait()
            raise Stopped


def trained(run_dir: Path, case: Case, *stops: int) -> Seen:
    """Return what a training has seen in all its lives."""
    for stop in (*stops, None):
        random.seed(1), np.random.seed(2), torch.manual_seed(3)
        training = Training(run_dir, case.make(), stop)
        with contextlib.suppress(Stopped), training.state as state:
            case.script(training, state)
    return training.seen


def epochs(training: Training, state: Any) -> None:
    for _ in state.epochs(EPOCHS):
        shift = draw()
        for batch in state.batches():
            training.train(batch + shift)
        training.note("end")


def breaks(training: Training, state: Any) -> None:
    for _ in state.epochs(EPOCHS):
        for batch in state.batches():
            training.train(batch)
            if state.batch == 2:
                break
        training.note("end")


def steps_in_epochs(training: Training, state: Any) -> None:
    for epoch in state.epochs(EPOCHS):
        shift = draw()
        for _ in state.steps(5 * (epoch + 1)):
            training.train(torch.tensor([shift + draw()]))
        training.note("end")


def validates(training: Training, state: Any) -> None:
    for _ in state.epochs(EPOCHS):
        for batch in state.batches("a"):
            training.train(batch)
        for batch in state.batches("b"):
            training.note("validation", batch.tolist())


def beside(training: Training, state: Any) -> None:
    def again() -> Iterator[torch.Tensor]:
        while True:
            yield from state.batches("b")

    others = again()
    for _ in state.epochs(EPOCHS):
        for batch in state.batches("a"):
            training.train(batch, next(others))
        training.note("end")


def one_ahead(batches: Iterator[Any]) -> Iterator[Any]:
    loaded = (batch + draw() for batch in batches)
    following = next(loaded, None)
    while (batch := following) is not None:
        following = next(loaded, None)
        yield batch


def loads_ahead(training: Training, state: Any) -> None:
    for _ in state.epochs(EPOCHS):
        for batch in state.batches(through=one_ahead):
            training.train(batch)
        training.note("end")


def makes_an_iterable(training: Training, state: Any) -> None:
    for _ in state.epochs(EPOCHS):
        for batch in state.batches(NoPlace()):
            training.train(batch)
        training.note("end")


class Case(NamedTuple):
    """A script, what makes its loaders, and the events after which it stops; 6 ends the first epoch."""

    script: Callable[[Training, Any], None]
    make: Callable[[], Any] = on
    stops: tuple[int, ...] = (2, 3, 8)


def two() -> dict[str, Any]:
    return {"a": on(shuffle=True), "b": on(sampler=range(6))}


CASES = {
    "mid-epoch": Case(epochs),
    "epochs-end": Case(epochs, stops=(5, 6, 7)),
    "shuffled": Case(epochs, partial(on, shuffle=True)),
    "shuffled-by-a-generator": Case(
        epochs, lambda: on(shuffle=True, generator=torch.Generator().manual_seed(1)), (2, 5, 6, 7)
    ),
    "sampler-with-a-state": Case(epochs, lambda: on(sampler=Remembers())),
    "workers": Case(epochs, partial(on, shuffle=True, num_workers=2), (2, 7)),
    "state-in-a-worker": Case(epochs, lambda: on(Counting(), num_workers=1), (2,)),
    "persistent-workers": Case(epochs, partial(on, num_workers=2, persistent_workers=True), (6, 8)),
    "left-by-a-break": Case(breaks, partial(on, num_workers=2, persistent_workers=True), (5,)),
    "steps-in-epochs": Case(steps_in_epochs, lambda: None, (2, 6, 8)),
    "validation": Case(validates, two, (3, 6, 10)),
    "beside": Case(beside, two, (2, 6, 8)),
    "through": Case(loads_ahead, on, (2, 3, 6)),
    "own-place": Case(epochs, OwnPlace, (2, 5, 8)),
    "no-place": Case(epochs, NoPlace),
    "function": Case(epochs, lambda: noise),
    "iterator": Case(breaks, lambda: noise(9), (2, 5)),
    "made-for-each-epoch": Case(makes_an_iterable, lambda: None),
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", CASES)
def test_a_stopped_training_is_one_that_was_not(run_dir: Path, name: str) -> None:
    case = CASES[name]

    stopped = trained(run_dir / "stopped", case, *case.stops)

    assert stopped == trained(run_dir / "straight", case)


def in_windows(training: Training, state: Any) -> None:
    for batch in state.batches():
        training.model(batch.reshape(-1, 1)).sum().backward()
        if state.batch == 2:
            signal.raise_signal(signal.SIGTERM)
        if state.batch % 2:
            training.optimizer.step()
            training.optimizer.zero_grad()


def test_a_signal_in_an_accumulation_window_waits_for_its_step(run_dir: Path) -> None:
    with pytest.raises(SystemExit, match="143"):
        trained(run_dir, Case(in_windows))

    assert [one.about.batch for one in Run(run_dir).checkpoints()] == [4]


def changes_after_its_save(training: Training, state: Any) -> None:
    for batch in state.batches():
        training.train(batch)
        state.save()
        nn.init.constant_(training.model.weight, 7)
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_saves_what_has_changed_after_save(run_dir: Path) -> None:
    with pytest.raises(SystemExit), pytest.warns(ResumableWarning, match=r"model changed after save\(\)"):
        trained(run_dir, Case(changes_after_its_save))

    training = Training(run_dir, on(), None)
    training.state.close()
    assert training.model.weight.item() == 7


LARGE = 4096, 4100
"""Of a tensor whose image is taken while the training continues."""


@pytest.mark.heavy
def test_what_is_written_right_after_a_save_is_not_in_it(run_dir: Path) -> None:
    model = nn.Linear(*LARGE, bias=False)
    with RunState.load(run_dir, model=model, keep=None) as state:
        for number in (1, 2, 3):
            nn.init.constant_(model.weight, number)
            state.save()
        for number in (1, 2, 3):
            state.restore(number, only="model")
            assert (model.weight == number).all()


def test_a_step_right_after_a_save_is_not_in_it(run_dir: Path) -> None:
    model = nn.Linear(*LARGE, bias=False)
    nn.init.zeros_(model.weight).grad = torch.ones(LARGE[::-1])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with RunState.load(run_dir, model=model, optimizer=optimizer, every=None) as state:
        optimizer.step()
        state.save()
        optimizer.step()
        state.restore(1, only="model")
        assert (model.weight == -1).all()
