"""The checkpoint that Lightning's hooks see in a save of `Resumable`, and what they add to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pl = pytest.importorskip("lightning.pytorch")

from lightning_training import STOPS, Case, Model, Noisy, assert_same, loader  # noqa: E402

from resumable.integrations.lightning import Resumable  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
]


class Configured(Model):
    """A module with hyperparameters."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()


class Data(pl.LightningDataModule):  # type: ignore[misc]
    """A data module with state and hyperparameters."""

    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(Noisy(4), 2)

    def state_dict(self) -> dict[str, Any]:
        return {"one": 1}


class Looking(pl.Callback):  # type: ignore[misc]
    """Keeps the last checkpoint that it was given."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint


@pytest.mark.heavy
def test_the_hooks_get_all_that_a_checkpoint_of_lightning_has(run_dir: Path, tmp_path: Path) -> None:
    looking = Looking()
    case = Case(Configured, callbacks=lambda: [looking], datamodule=Data, max_epochs=1)
    case.fit(Resumable(run_dir))
    seen = looking.seen

    case.trainer.save_checkpoint(tmp_path / "one.ckpt")
    theirs = torch.load(tmp_path / "one.ckpt", weights_only=False)

    assert seen.keys() == theirs.keys()
    for name in seen.keys() - {"loops"}:
        assert_same(seen[name], theirs[name], name)
    assert seen["loops"].keys() == theirs["loops"].keys()


class AddingInside(Model):
    """Adds to what Lightning has put into the checkpoint."""

    ema = 0.0

    def on_train_batch_end(self, *_: Any) -> None:
        self.ema = 0.5 * self.ema + self.net[0].bias.sum().item()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + self.ema * self.net[0].bias.sum()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["ema"] = torch.tensor(self.ema, dtype=torch.float64)
        checkpoint["optimizer_states"][0]["more"] = self.ema

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.ema = checkpoint["state_dict"]["ema"].item()
        assert checkpoint["optimizer_states"][0]["more"] == self.ema


@pytest.mark.heavy
def test_what_a_hook_adds_inside_the_checkpoint_comes_back(run_dir: Path) -> None:
    case = Case(AddingInside, stops=STOPS[:2])

    assert_same(case.resumed(run_dir)["weights"], case.plain()["weights"])
