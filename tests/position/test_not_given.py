"""Warnings of parts that are not given, of epochs that end too early, and of loops that save nothing."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from grouped import grouped
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR

from resumable import ResumableWarning, RunState

ENDED = r"says that the epoch is finished, and the training continues in it"
NOT_GIVEN = r"\(Adam\) trains a model that was given to RunState, and was not given itself"
SCHEDULER = r"a scheduler \(StepLR\) has changed the learning rate, and was not given"


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


# What is not given.


@pytest.mark.parametrize("is_given", [True, False])
def test_an_optimizer_that_is_not_given_is_reported_at_its_first_step(run_dir: Path, is_given: bool) -> None:
    model = nn.Linear(1, 1)
    head, body = torch.optim.SGD([model.weight], lr=0.1), torch.optim.Adam([model.bias], lr=0.1)
    given = {"head": head, "body": body} if is_given else {"head": head}

    with RunState.load(run_dir, model=model, optimizer=given, variables=False) as state:
        for _ in state.steps(1):
            model(torch.ones(2, 1)).sum().backward()
            head.step()
            if is_given:
                body.step()
            else:
                with pytest.warns(ResumableWarning, match=NOT_GIVEN):
                    body.step()
            body.step()


class Lookahead:
    """An optimizer around another, which it steps."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups = [{"lr": 0.1, "params": inner.param_groups[0]["params"]}]

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


def test_what_trains_inside_of_a_given_one_or_elsewhere_is_not_reported(run_dir: Path) -> None:
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    inner, elsewhere = torch.optim.Adam(model.parameters()), torch.optim.Adam(other.parameters())
    without = torch.optim.SGD(model.parameters())
    scheduler = LambdaLR(inner, lambda step: 0.5**step)

    given = {"optimizer": Lookahead(inner), "scheduler": scheduler}
    with RunState.load(run_dir, model=model, every=None, variables=False, **given) as state:
        for _ in state.steps(2):
            (model(torch.ones(2, 1)) + other(torch.ones(2, 1))).sum().backward()
            for optimizer in (inner, elsewhere, without):
                optimizer.step()
            scheduler.step()


def test_a_scheduler_that_is_not_given_is_reported_at_the_next_save(run_dir: Path) -> None:
    script = Script(run_dir, variables=False)
    scheduler = StepLR(script.optimizer, 2)

    with script.state as state:
        for step in state.steps(3):
            script.step()
            scheduler.step()
            with pytest.warns(ResumableWarning, match=SCHEDULER) if step == 1 else nullcontext():
                state.save()


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
