"""What Accelerate and Lightning Fabric wrap is saved and put back as if it were bare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import Run, RunState, UsageError, load_weights

Parts = dict[str, Any]


def bare() -> Parts:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def by_fabric() -> Parts:
    fabric = pytest.importorskip("lightning_fabric").Fabric(accelerator="cpu", devices=1)
    parts = bare()
    model, optimizer = fabric.setup(parts["model"], parts["optimizer"])
    return {"model": model, "optimizer": optimizer, "scheduler": parts["scheduler"]}


def by_accelerate() -> Parts:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    parts = bare()
    return dict(zip(parts, accelerator.prepare(*parts.values()), strict=True))


def step(parts: Parts) -> None:
    loss = parts["model"](torch.randn(8, 4)).square().mean()
    parts["optimizer"].zero_grad()
    loss.backward()
    parts["optimizer"].step()
    parts["scheduler"].step()


def train(run_dir: Path, parts: Parts, steps: int) -> dict[str, bytes]:
    with RunState.load(run_dir, **parts) as state:
        for _ in state.steps(steps):
            step(parts)
            state.save()
    return Run(run_dir).checkpoints()[-1].read()


WRAPPERS = (by_fabric, by_accelerate)


@pytest.mark.parametrize("make", WRAPPERS)
def test_a_training_in_wrappers_is_resumed_twice_as_if_it_had_not_been_stopped(
    make: Any, run_dir: Path, tmp_path: Path
) -> None:
    straight = train(tmp_path / "straight", make(), 6)

    for steps in (2, 4, 6):
        resumed = train(run_dir, make(), steps)

    assert resumed.keys() == straight.keys()
    assert all(resumed[name] == straight[name] for name in straight if not name.startswith("ranks/"))


@pytest.mark.parametrize("make", WRAPPERS)
def test_wrapped_and_bare_parts_have_the_same_names_and_continue_from_each_other(
    make: Any, run_dir: Path, tmp_path: Path
) -> None:
    straight = train(tmp_path / "straight", bare(), 6)

    for parts, steps in ((make(), 2), (bare(), 4), (make(), 6)):
        resumed = train(run_dir, parts, steps)

    assert resumed["model.safetensors"] == straight["model.safetensors"]
    assert resumed["optimizer.safetensors"] == straight["optimizer.safetensors"]


@pytest.mark.parametrize("make", WRAPPERS)
def test_weights_are_loaded_into_a_wrapped_model(make: Any, run_dir: Path) -> None:
    train(run_dir, bare(), 1)
    model = make()["model"]

    load_weights(model, run_dir)

    parts = bare()
    RunState.load(run_dir, **parts).close()
    there = parts["model"]
    assert all(map(torch.equal, model.state_dict().values(), there.state_dict().values()))


def loaders() -> list[tuple[str, Any]]:
    loader = DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=2)
    made: list[tuple[str, Any]] = []
    fabric = pytest.importorskip("lightning_fabric").Fabric(accelerator="cpu", devices=1)
    made.append(("fabric", fabric.setup_dataloaders(loader)))
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    made.append(("accelerator", accelerator.prepare(loader)))
    return made


def test_a_loader_that_counts_its_epochs_again_is_refused_with_the_way_out(run_dir: Path) -> None:
    for maker, loader in loaders():
        with pytest.raises(
            UsageError, match=rf"epochs from 0(?s:.*)state\.batches\(device={maker}\.device\)"
        ):
            RunState.load(run_dir, loader=loader)
