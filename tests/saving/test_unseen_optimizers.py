"""Warnings of schedulers that are not given: not of those that are inside of what is given."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR, LRScheduler, SequentialLR, StepLR

from resumable import ResumableWarning, RunState
from resumable.saving.unseen_optimizers import Unseen


class Warmup:
    """A schedule that keeps those of torch: one, a list, or a dict of them."""

    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def schedulers(self) -> list[LRScheduler]:
        if isinstance(self.kept, dict):
            return [*self.kept.values()]
        return self.kept if isinstance(self.kept, list) else [self.kept]

    def step(self) -> None:
        for scheduler in self.schedulers():
            scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return {"inner": [scheduler.state_dict() for scheduler in self.schedulers()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for scheduler, saved in zip(self.schedulers(), state["inner"], strict=True):
            scheduler.load_state_dict(saved)


class Net(nn.Linear):
    """A model that keeps schedulers, which its state has nothing of."""

    schedulers: list[LRScheduler]


def _sequential(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return SequentialLR(optimizer, [LinearLR(optimizer), StepLR(optimizer, 1)], [1])


def _train(run_dir: Path, make: Callable[[Any], Any], total: int, *, is_given: bool = True) -> list[float]:
    model = Net(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = Warmup(make(optimizer))
    model.schedulers = schedule.schedulers()
    scheduler = schedule if is_given else None
    with RunState.load(run_dir, model=model, optimizer=optimizer, scheduler=scheduler) as state:
        for _ in state.steps(total):
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            schedule.step()
            state.save()
    return [group["lr"] for group in optimizer.param_groups]


KEPT: dict[str, Callable[[Any], Any]] = {
    "one": lambda optimizer: StepLR(optimizer, 1),
    "list": lambda optimizer: [StepLR(optimizer, 1)],
    "dict": lambda optimizer: {"warmup": StepLR(optimizer, 1)},
    "sequential": _sequential,
}


@pytest.mark.parametrize("kept", KEPT)
def test_a_scheduler_inside_of_a_given_one_is_not_reported(run_dir: Path, kept: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResumableWarning)
        expected = _train(run_dir / "whole", KEPT[kept], 5)

        assert [_train(run_dir / "parts", KEPT[kept], total) for total in (2, 4, 5)][-1] == expected


def test_a_scheduler_that_only_a_model_keeps_is_reported(run_dir: Path) -> None:
    with pytest.warns(ResumableWarning, match=r"a scheduler \(StepLR\) has changed the learning rate"):
        _train(run_dir, KEPT["one"], 2, is_given=False)


def test_a_change_of_state_without_a_hook_is_found_once() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 1)).sum().backward()
    unseen, found = Unseen({"optimizer": optimizer}), []

    for _ in range(4):
        found.append(unseen.stepped())
        optimizer.step()

    assert found == [[], [], ["optimizer"], []]


def test_an_optimizer_without_state_starts_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: pytest.fail("a pool of threads is made"))
    unseen = Unseen({"optimizer": torch.optim.Adam([torch.ones(1)])})

    assert [unseen.stepped(), unseen.stepped()] == [[], []]
