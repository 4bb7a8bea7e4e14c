"""Optimizers whose steps call no hook."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from resumable.saving.unseen_optimizers import Unseen


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
