"""Runs that earlier versions have written continue, bit for bit. Never write these files again."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from places import DATA
from torch import nn
from torch.utils.data import DataLoader, Dataset

from resumable import RunState

OLD = DATA / "old_runs"
"""`before-rooms` was written at 884df13, by the training below, stopped after its 5th step."""

pytestmark = [
    # The machine, and its libraries, may be others than those that wrote the run.
    pytest.mark.filterwarnings("ignore:.* has changed since checkpoint"),
    pytest.mark.filterwarnings("ignore:this epoch was resumed in the middle"),
]


class Noisy(Dataset[torch.Tensor]):
    """Samples that draw from every global generator."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [torch.randint(4, ()).item(), random.randrange(4), int(np.random.randint(4))]
        return torch.tensor([float(index), *map(float, drawn)])


def train(run_dir: Path, stop: int | None = None) -> tuple[list[Any], torch.Tensor]:
    """Return the batches and the weights; small numbers and powers of two are exact on every machine."""
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loader = DataLoader(Noisy(), batch_size=2, shuffle=True)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    seen = []
    with RunState.load(run_dir, **parts, minimize="loss") as state:  # type: ignore[arg-type]
        for _ in state.epochs(3):
            for batch in state.batches():
                seen.append(batch.tolist())
                optimizer.zero_grad()
                loss = model(batch).sum()
                loss.backward()
                optimizer.step()
                if state.step == stop:
                    state.save(loss=loss.item())
                    return seen, model.weight
            scheduler.step()
            state.save(loss=loss.item())
    return seen, model.weight


@pytest.mark.proves("exact")
@pytest.mark.parametrize("name", sorted(one.name for one in OLD.iterdir()))
def test_a_run_of_an_earlier_version_continues_bit_for_bit(tmp_path: Path, name: str) -> None:
    shutil.copytree(OLD / name, tmp_path / "run")
    expected, weights = train(tmp_path / "straight")

    first, _ = train(tmp_path / "run", stop=7)
    rest, resumed = train(tmp_path / "run")

    assert first + rest == expected[5:]
    assert torch.equal(resumed, weights)
