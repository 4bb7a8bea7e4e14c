"""An iterator over a loader's batches that the script keeps from epoch to epoch."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from stopping import differences
from torch import nn
from torch.utils.data import DataLoader, Dataset

from resumable import ResumableWarning, RunState, UsageError

Tick = Callable[..., None]


class Noisy(Dataset[torch.Tensor]):
    """Numbers with noise, so that an order that is right by chance is found."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(2) + index


def make(second: int = 5, **settings: Any) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.2), nn.Linear(2, 1))
    loaders = {
        "a": DataLoader(Noisy(6), 2, shuffle=True, **settings),
        "b": DataLoader(Noisy(2 * second), 2, shuffle=True, **settings),
    }
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": loaders,
    }


def train(found: dict[str, Any], x: torch.Tensor, y: torch.Tensor) -> None:
    found["optimizer"].zero_grad()
    found["model"](x - y).square().mean().backward()
    found["optimizer"].step()


class Again:
    """Gives the batches of a loader again and again."""

    def __init__(self, state: Any, name: str) -> None:
        self._state, self._name = state, name
        self._batches = iter(state.batches(name))

    def __next__(self) -> torch.Tensor:
        try:
            found: torch.Tensor = next(self._batches)
        except StopIteration:
            self._batches = iter(self._state.batches(self._name))
            found = next(self._batches)
        return found


def again_and_again(state: Any, name: str) -> Iterator[torch.Tensor]:
    while True:
        yield from state.batches(name)


def beside_a_loop(state: Any, found: dict[str, Any], tick: Tick) -> None:
    others = Again(state, "b")
    for epoch in state.epochs(4):
        first = torch.rand(1)
        for x in state.batches("a"):
            y = next(others)
            train(found, x * first, y)
            tick(x, y, epoch)
        tick(torch.rand(1))


def from_a_generator(state: Any, found: dict[str, Any], tick: Tick) -> None:
    others = again_and_again(state, "b")
    for epoch in state.epochs(4):
        for x, y in zip(state.batches("a"), others, strict=False):
            train(found, x, y)
            tick(x, y, epoch)
        tick(torch.rand(1))


def both_in_epochs(state: Any, found: dict[str, Any], tick: Tick) -> None:
    batches, others = Again(state, "a"), Again(state, "b")
    for epoch in state.epochs(4):
        first, seen = torch.rand(1), []
        for _ in range(4):
            x, y = next(batches), next(others)
            train(found, x * first, y)
            seen += [x, y]
        tick(*seen, epoch)


def both_in_steps_of_epochs(state: Any, found: dict[str, Any], tick: Tick) -> None:
    batches, others = Again(state, "a"), Again(state, "b")
    for epoch in state.epochs(3):
        first = torch.rand(1)
        for _ in state.steps(4 * (epoch + 1)):
            x, y = next(batches), next(others)
            train(found, x * first, y)
            tick(x, y, epoch)
        tick(torch.rand(1))


def both_in_steps(state: Any, found: dict[str, Any], tick: Tick) -> None:
    # Dropped, they would end the epoch.
    batches, others = found["kept"] = Again(state, "a"), Again(state, "b")
    for step in state.steps(13):
        x, y = next(batches), next(others)
        train(found, x, y)
        tick(x, y, step)


def both_in_a_loop_of_its_own(state: Any, found: dict[str, Any], tick: Tick) -> None:
    batches, others = found["kept"] = Again(state, "a"), Again(state, "b")
    for step in range(state.step, 13):
        x, y = next(batches), next(others)
        train(found, x, y)
        tick(x, y, step)


def nested(state: Any, found: dict[str, Any], tick: Tick) -> None:
    for epoch in range(state.epoch, 2):
        for x in state.batches("a"):
            for y in state.batches("b"):
                train(found, x, y)
            tick(x, epoch)


LOOPS = [
    beside_a_loop,
    from_a_generator,
    both_in_epochs,
    both_in_steps_of_epochs,
    both_in_steps,
    both_in_a_loop_of_its_own,
    nested,
]


@pytest.mark.quick(15)
@pytest.mark.parametrize("second", [2, 5])
@pytest.mark.parametrize("loop", LOOPS)
def test_passes_that_end_when_they_end_are_exact(run_dir: Path, loop: Any, second: int) -> None:
    assert differences(run_dir, lambda: make(second), loop, at=(1, 3, 4, 5, 8, 12)) == []


class Plain:
    """The loops of `RunState` without the library."""

    step = epoch = 0

    def __init__(self, found: dict[str, Any]) -> None:
        self._loaders = found["loader"]
        found["optimizer"].register_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        self.step += 1

    def epochs(self, total: int) -> Iterator[int]:
        yield from range(total)

    def steps(self, total: int) -> Iterator[int]:
        while self.step < total:
            yield self.step

    def batches(self, name: str) -> Any:
        return self._loaders[name]


def seen_by(loop: Any, found: dict[str, Any], state: Any) -> list[list[Any]]:
    seen: list[list[Any]] = []
    loop(state, found, lambda *one: seen.append([torch.as_tensor(x).tolist() for x in one]))
    return [*seen, [one.tolist() for one in found["model"].parameters()]]


@pytest.mark.quick(8)
@pytest.mark.parametrize("second", [2, 5])
@pytest.mark.parametrize("loop", LOOPS)
def test_passes_are_those_of_plain_loaders(run_dir: Path, loop: Any, second: int) -> None:
    torch.manual_seed(1)
    found = make(second)
    plain = seen_by(loop, found, Plain(found))

    torch.manual_seed(1)
    found = make(second)
    with RunState.load(run_dir, **found, quiet=True) as state:
        assert seen_by(loop, found, state) == plain


@pytest.mark.heavy
def test_an_iterator_that_is_made_in_each_body_begins_its_pass_again(run_dir: Path) -> None:
    def loop(state: RunState, found: dict[str, Any], tick: Tick) -> None:
        for epoch in state.epochs(3):
            others = again_and_again(state, "b")
            for x in state.batches("a"):
                y = next(others)
                train(found, x, y)
                tick(x, y, epoch)
            tick(torch.rand(1))

    assert differences(run_dir, make, loop, at=(1, 3, 4, 5, 8)) == []


def test_an_iterator_of_an_earlier_body_is_refused(run_dir: Path) -> None:
    found, others = make(), None
    with RunState.load(run_dir, **found) as state:
        epochs = state.epochs(3)
        next(epochs)
        others = iter(state.batches("b"))
        train(found, next(others), torch.zeros(2))
        next(epochs)

        with pytest.raises(UsageError, match=r"in a later epoch.*\nFix: make it before"):
            next(others)


def test_a_new_iterator_replaces_the_one_that_goes_on(run_dir: Path) -> None:
    found = make()
    with RunState.load(run_dir, **found) as state:
        old = iter(state.batches("b"))
        for _ in state.epochs(1):
            train(found, next(old), torch.zeros(2))
            batches = [*state.batches("b")]

            assert sorted(int(x[0]) for batch in batches for x in batch) == [*range(10)]
            with pytest.raises(UsageError, match="after another one was made"):
                next(old)


def test_a_place_that_an_epochs_end_has_lost_is_reported(run_dir: Path) -> None:
    found = make()
    with RunState.load(run_dir, **found) as state:
        others = iter(state.batches("b"))
        for epoch in range(2):
            for x in state.batches("a"):
                train(found, x, next(others))
                if epoch:
                    with pytest.warns(ResumableWarning, match="goes on from epoch to epoch.*R09"):
                        state.save()
                    return
            state.save()


LEFT_OPEN = """
import sys, torch
from torch.utils.data import DataLoader
from resumable import RunState
model = torch.nn.Linear(1, 1)
loaders = {"a": DataLoader(torch.zeros(4, 1)), "b": DataLoader(torch.zeros(9, 1), num_workers=2)}
def again():
    while True:
        yield from state.batches("b")
with RunState.load(sys.argv[1], model=model, loader=loaders) as state:
    others = again()
    for _ in state.epochs(2):
        for _ in state.batches("a"):
            next(others)
"""


@pytest.mark.heavy
def test_an_iterator_with_workers_that_is_there_at_the_end_says_nothing(run_dir: Path) -> None:
    script = textwrap.dedent(LEFT_OPEN)
    done = subprocess.run([sys.executable, "-c", script, str(run_dir)], capture_output=True, text=True)

    assert done.returncode == 0
    assert "Traceback" not in done.stderr, done.stderr
