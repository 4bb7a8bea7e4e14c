"""What changes right after a save: it is not in that checkpoint, and it is not lost."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from resumable import ResumableWarning, RunState
from resumable.files import large_files

LARGE = 4096, 4100
"""Of a tensor whose image is taken while the training continues."""

pytestmark = pytest.mark.proves("exact")


def change_after_save(run_dir: Path) -> None:
    model = nn.Linear(1, 1)
    with RunState.load(run_dir, model=model, loader=range(3), every=None) as state:
        for _ in state.batches():
            state.save()
            nn.init.constant_(model.weight, 7)
            signal.raise_signal(signal.SIGTERM)


def test_a_signal_saves_what_has_changed_after_save(run_dir: Path) -> None:
    with pytest.raises(SystemExit), pytest.warns(ResumableWarning, match=r"model changed after save\(\)"):
        change_after_save(run_dir)

    RunState.load(run_dir, model=(again := nn.Linear(1, 1)), loader=range(3)).close()
    assert again.weight.item() == 7


@pytest.mark.heavy
def test_what_is_written_right_after_a_save_is_not_in_it(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, write, late = nn.Linear(*LARGE, bias=False), large_files._write_at, iter([0.5])

    def write_late(*block: Any) -> None:
        time.sleep(next(late, 0))  # The next save begins before this one is on the disk
        write(*block)

    monkeypatch.setattr(large_files, "_write_at", write_late)
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
    with RunState.load(run_dir, model=model, optimizer=optimizer, every=None, keep=None) as state:
        for _ in range(4):
            optimizer.step()
            state.save()
            optimizer.step()
        for number in range(1, 5):
            state.restore(number, only="model")
            assert (model.weight == 1 - 2 * number).all()


def test_a_step_without_an_update_is_no_change_after_its_save(run_dir: Path) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with RunState.load(run_dir, model=model, optimizer=optimizer, every=2) as state:
        for step in state.steps(2):
            if step == 0:
                model(torch.ones(1)).backward()
                optimizer.step()
        state.save().wait()
    assert state.step == 2
