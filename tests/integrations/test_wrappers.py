"""What Accelerate and Lightning Fabric wrap is saved and put back as if it were bare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from resumable import ResumableWarning, Run, RunState, load_weights
from resumable.loaders import wrappers

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
def test_a_training_in_wrappers_is_exact_after_two_resumes(make: Any, run_dir: Path, tmp_path: Path) -> None:
    straight = train(tmp_path / "straight", make(), 6)

    for steps in (2, 4, 6):
        resumed = train(run_dir, make(), steps)

    assert resumed.keys() == straight.keys()
    assert all(resumed[name] == straight[name] for name in straight if not name.startswith("ranks/"))


@pytest.mark.parametrize("make", WRAPPERS)
def test_wrapped_and_bare_parts_continue_from_each_other(make: Any, run_dir: Path, tmp_path: Path) -> None:
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


def scaled_by_fabric() -> tuple[Parts, torch.amp.GradScaler]:
    fabrics = pytest.importorskip("lightning_fabric")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    precision = fabrics.plugins.MixedPrecision("16-mixed", device="cpu", scaler=scaler)
    fabric = fabrics.Fabric(accelerator="cpu", devices=1, plugins=precision)
    parts = bare()
    model, optimizer = fabric.setup(parts["model"], parts["optimizer"])
    return {"model": model, "optimizer": optimizer}, scaler


def scaled_by_accelerate() -> tuple[Parts, torch.amp.GradScaler]:
    pytest.importorskip("accelerate").Accelerator(cpu=True)
    from accelerate.optimizer import AcceleratedOptimizer

    scaler, parts = torch.amp.GradScaler("cpu", init_scale=8.0), bare()
    optimizer = AcceleratedOptimizer(parts["optimizer"], scaler=scaler)
    return {"model": parts["model"], "optimizer": optimizer}, scaler


@pytest.mark.parametrize("make", [scaled_by_fabric, scaled_by_accelerate])
def test_the_scaler_of_a_wrapped_optimizer_is_saved(make: Any, run_dir: Path) -> None:
    for scale in (8.0, 16.0, 32.0):
        parts, scaler = make()
        with RunState.load(run_dir, **parts) as state:
            assert scaler.get_scale() == scale
            # It makes its tensor as it first scales
            scaler.scale(torch.ones(()))
            scaler.update(2 * scale)
            state.save()


@pytest.mark.parametrize("make", [scaled_by_fabric, scaled_by_accelerate])
def test_a_checkpoint_without_the_scaler_is_continued_with_a_warning(make: Any, run_dir: Path) -> None:
    parts, _ = make()
    plain = {"model": parts["model"], "optimizer": wrappers.inside(parts["optimizer"])}
    with RunState.load(run_dir, **plain) as state:
        state.save()
    with pytest.warns(ResumableWarning, match="which the checkpoint lacks.*R13"):
        RunState.load(run_dir, **make()[0]).close()
