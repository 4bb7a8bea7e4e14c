"""Optimizers that are not given, and warnings of epochs that end too early and loops that save nothing."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from grouped import grouped
from torch import nn

from resumable import ResumableWarning, RunState
from resumable.saving.unseen_optimizers import Others

ENDED = r"says that the epoch is finished, and the training continues in it.*R04"


class Script:
    """What a script has made, and the state that it has loaded."""

    def __init__(self, run_dir: Path, **options: Any) -> None:
        self.model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.state = RunState.load(run_dir, model=self.model, optimizer=self.optimizer, **options)

    def step(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.model(torch.randn(3, 1)).sum().backward()
        (optimizer or self.optimizer).step()

    def train(self, epochs: int) -> None:
        with self.state as state:
            for _ in state.epochs(epochs):
                self.step()
                state.save()


# An epoch that is said to be finished, and is not.


def train_in_epochs(script: Script, saves_at: int) -> None:
    with script.state as state:
        for _ in state.epochs(2):
            for number in range(3):
                script.step()
                if number == saves_at:
                    state.save()


@pytest.mark.filterwarnings("ignore:model, optimizer, random changed after save")
def test_a_step_after_the_save_that_ends_the_epoch_is_reported(run_dir: Path) -> None:
    train_in_epochs(Script(run_dir), 2)
    with pytest.warns(ResumableWarning, match=ENDED):
        train_in_epochs(Script(run_dir / "early"), 1)


def test_batches_after_the_save_that_ends_the_epoch_are_reported(run_dir: Path) -> None:
    script = Script(run_dir)

    with script.state as state:
        for _ in state.epochs(1):
            for _ in state.batches(range(2)):
                script.step()
            state.save()
            rest = iter(state.batches([7, 8]))
            with pytest.warns(ResumableWarning, match=ENDED):
                next(rest)
            for _ in rest:
                script.step()


class Lookahead:
    """An optimizer around another, which it steps."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups = [{"lr": 0.1, "params": inner.param_groups[0]["params"]}]

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


def test_only_an_optimizer_that_was_not_given_and_trains_what_was_is_found() -> None:
    model, elsewhere = nn.Linear(1, 1), nn.Linear(1, 1)
    inner = torch.optim.Adam([model.weight])
    found: list[torch.optim.Optimizer] = []
    others = Others([model, Lookahead(inner)], model.parameters, lambda: found.append(optimizer))

    for optimizer in (inner, torch.optim.SGD(elsewhere.parameters()), torch.optim.SGD([model.bias])):
        others.stepped(optimizer)
        others.stepped(optimizer)

    assert found == [optimizer]


@pytest.mark.parametrize(("more", "is_warned"), [({"every": 2}, True), ({"max_time": 60}, True), ({}, False)])
def test_every_in_a_loop_that_cannot_save_by_itself_is_warned_of(
    run_dir: Path, more: dict[str, Any], is_warned: bool
) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with RunState.load(run_dir, model=model, optimizer=optimizer, **grouped(**more)) as state:
            for _ in range(state.step, 3):
                optimizer.zero_grad()
                model(torch.ones(1)).backward()
                optimizer.step()
            state.save()

    expected = "save only in loops over state.epochs(), state.steps() and state.batches()"
    assert [expected in str(one.message) for one in seen] == [True] * is_warned
