"""The whole scripts of the recipes, and those that migrating leads to: each stopped twice, and left alone."""

from __future__ import annotations

import ast
import gc
import random
import re
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import compare
import numpy as np
import pytest
import torch
from places import DOCS
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from resumable import Run
from resumable.run import history

NAMES = ("loops", "amp", "models", "finetuning", "streaming")


def scripts() -> Iterator[tuple[str, str]]:
    for name in NAMES:
        text = (DOCS / "recipes" / f"{name}.md").read_text()
        for script in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            yield re.findall(r'"runs/(\w+)"', script)[0], script


def changes() -> Iterator[tuple[str, str]]:
    """Yield what stands under each heading of docs/migrating.md that shows a change."""
    for section in (DOCS / "migrating.md").read_text().split("\n## ")[1:]:
        for change in re.findall(r"^```diff\n(.*?)^```", section, re.DOTALL | re.MULTILINE):
            yield section.splitlines()[0], change


def without(sign: str, change: str) -> str:
    """Return one side of a change: without the lines that have the sign."""
    return "\n".join(line[1:] for line in change.splitlines() if not line.startswith(sign))


SCRIPTS = dict(scripts())
CHANGES = dict(changes())
STOPS = {"steps": (25, 30), "gan": (13, 13), "nanoGPT, and other loops over steps": (13, 9)}
"""After how many steps of an optimizer the first two starts are stopped, where it is not the usual number."""


class Module(nn.Sequential):
    """A module as Lightning's are, as far as it is called here."""

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    validation_step = training_step

    def configure_optimizers(self) -> tuple[list[Any], list[Any]]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


class Average(AveragedModel):
    """An average as timm's are called."""

    update = AveragedModel.update_parameters


def readers_parts() -> dict[str, Any]:
    """Return what the reader of docs/migrating.md is taken to have."""
    torch.manual_seed(0)
    x = torch.randn(96, 8)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    model = Module(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
    (optimizer,), (scheduler,) = model.configure_optimizers()

    def train(images: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return {
        "args": Namespace(run="runs/migrated", epochs=4),
        **{"out_dir": "runs/migrated", "max_iters": 24, "eval_interval": 6},
        **{"model": model, "module": model, "optimizer": optimizer, "scheduler": scheduler, "train": train},
        **{"scaler": torch.amp.GradScaler("cpu"), "ema": Average(model), "torch": torch},
        "loader": DataLoader(data, batch_size=16, shuffle=True),
        "val_loader": DataLoader(data, batch_size=48),
        "validate": lambda model: float(model(x).sum() > 0),
        "estimate_loss": lambda: model(x).square().mean().item(),
        "get_batch": lambda: next(iter(DataLoader(data, batch_size=16, shuffle=True))),
        "get_lr": lambda step: 0.01 / (1 + step),
    }


class Stopped(Exception):
    """What ends a training in the middle of a batch."""


@contextmanager
def stopped_after(steps: int) -> Iterator[None]:
    """Let an optimizer's step fail after so many."""
    left = steps

    def count(*_: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Stopped

    hook = register_optimizer_step_post_hook(count)
    try:
        with suppress(Stopped):
            yield
    finally:
        hook.remove()


def start(script: str, names: dict[str, Any]) -> None:
    random.seed(0)
    np.random.seed(0)
    exec(compile(script, "recipe", "exec"), names)


def content(run_dir: Path) -> dict[str, bytes]:
    newest = Run(run_dir).checkpoints()[-1]
    newest.verify()
    return {name: bytes(data) for name, data in newest.read().items()}


def places(run_dir: Path) -> list[int | None]:
    """Return the checkpoints that the starts resumed from."""
    return [attempt["from"] for attempt in history.attempts(history.read(run_dir))]


def ends_alike(name: str, script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a script which is stopped twice ends with the bits of one that was left alone."""
    make = readers_parts if name in CHANGES else dict
    monkeypatch.chdir(folder)
    traces = [folder / f"{run}.jsonl" for run in ("straight", "stopped")]
    for variable, place in (("RUN_DIR", folder / "straight"), ("TRACE", traces[0])):
        monkeypatch.setenv(f"RESUMABLE_{variable}", str(place))
    start(script, make())
    for variable, place in (("RUN_DIR", folder / "stopped"), ("TRACE", traces[1])):
        monkeypatch.setenv(f"RESUMABLE_{variable}", str(place))
    for steps in STOPS.get(name, (8, 7)):
        with stopped_after(steps):
            start(script, make())
        # The process of a script would have ended, and with it its lock
        gc.collect()
    start(script, make())
    fresh, first, second = places(folder / "stopped")

    assert fresh is None
    assert first != second
    assert content(folder / "stopped") == content(folder / "straight"), compare.first_of_traces(*traces)


@pytest.mark.quick(9)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_that_is_stopped_twice_ends_with_the_same_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends_alike(name, SCRIPTS[name], tmp_path, monkeypatch)


@pytest.mark.quick(5)
@pytest.mark.parametrize("name", CHANGES)
def test_a_migrated_script_stopped_twice_ends_with_the_same_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for peer in re.findall(r"(Fabric|Accelerator)\(", CHANGES[name]):
        pytest.importorskip({"Fabric": "lightning_fabric", "Accelerator": "accelerate"}[peer])

    ends_alike(name, without("-", CHANGES[name]), tmp_path, monkeypatch)


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_migration_begins_with_is_python(name: str) -> None:
    before = ast.unparse(ast.parse(without("+", CHANGES[name])))

    assert "resumable" not in before
