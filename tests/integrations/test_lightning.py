"""Lightning's Trainer with the callback `Resumable`: stopped anywhere, it ends with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pl = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.callbacks import (  # noqa: E402
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
)
from lightning_training import STOPS, Case, Model, Stream, assert_same, loader  # noqa: E402
from torchmetrics import MeanSquaredError, MinMaxMetric, RunningMean  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*num_workers"),
    pytest.mark.filterwarnings("ignore:.*configure_optimizers` returned `None`"),
    pytest.mark.filterwarnings("ignore:.*training_step` returned `None`"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
]


class Adversarial(Model):
    """Two optimizers, stepped by hand, the second at every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(4, 4)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        loss = super().training_step(self.other(batch.float()), batch_idx)
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        if batch_idx % 2:
            second.step()
            second.zero_grad()
            self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.net.parameters(), lr=0.01)
        second = torch.optim.SGD(self.other.parameters(), lr=0.01, momentum=0.9)
        return [first, second], [torch.optim.lr_scheduler.StepLR(second, 2, 0.9)]


class Plateau(Model):
    """A schedule that looks at the validation, after each or after each epoch."""

    interval = "epoch"

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0)
        how = {"monitor": "val", "interval": self.interval, "frequency": 1 if self.interval == "epoch" else 2}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, **how}}


class PlateauOfSteps(Plateau):
    interval = "step"


class OneCycle(Model):
    """A schedule whose length is that of the training: the loader is made before the optimizer."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=int(steps))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Measuring(Model):
    """Metrics of torchmetrics, which accumulate over the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.error, self.val_error = MeanSquaredError(), MeanSquaredError()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.error(self.net(batch.float())[:, 0], batch[:, 0].float())
        self.log("error", self.error, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.val_error(self.net(batch.float())[:, 0], batch[:, 0].float())
        self.log("val_error", self.val_error)
        super().validation_step(batch, batch_idx)


class Wrapping(Model):
    """Metrics that wrap others, and keep values beside their declared state."""

    def __init__(self) -> None:
        super().__init__()
        self.range, self.running = MinMaxMetric(MeanSquaredError()), RunningMean(4)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.range.update(self.net(batch.float())[:, 0].detach(), batch[:, 0].float())
        found = self.range.compute()
        self.log("least", found["min"])
        self.log("most", found["max"])
        self.log("running", self.running(loss.detach()))
        return loss


class DrawingInHooks(Model):
    """Random numbers, some of them logged, in every hook that runs at a resume too."""

    def on_fit_start(self) -> None:
        torch.rand(3)

    def on_train_start(self) -> None:
        self.log("begun", torch.rand(()))

    def on_train_epoch_start(self) -> None:
        torch.rand(3)

    def on_train_batch_start(self, *_: Any) -> None:
        torch.rand(3)

    def on_train_epoch_end(self) -> None:
        torch.rand(3)

    def on_validation_epoch_end(self) -> None:
        torch.rand(3)
        self.log("drawn", torch.rand(()))


class WithoutOptimizer(Model):
    """Batch norm alone is trained."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> None:
        return None


class Keeping(Model):
    """A module with state of its own, which decides how it trains."""

    factor = 1.0

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.factor *= 0.9
        return self.factor * super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["factor"] = self.factor

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.factor = checkpoint["factor"]


class Data(pl.LightningDataModule):
    """A data module with state."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0

    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloader(self) -> Any:
        return loader(shuffle=False)

    def on_before_batch_transfer(self, batch: torch.Tensor, dataloader_idx: int) -> torch.Tensor:
        self.batches += self.trainer.training
        return batch * (1 + self.batches / 10)

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.batches = saved["batches"]


class Noise(pl.Callback):
    """A callback whose state decides how the training goes on."""

    def __init__(self) -> None:
        self.scale = 1.0

    def on_train_start(self, *_: Any) -> None:
        self.scale = 2.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.scale *= 1.1
        with torch.no_grad():
            pl_module.net[0].bias.add_(0.001 * self.scale)

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.scale = saved["scale"]


CASES = {
    "automatic optimization": Case(),
    "manual optimization of two optimizers": Case(Adversarial),
    "windows that do not divide the epoch": Case(accumulate_grad_batches=4),
    "windows of another size in each epoch": Case(
        callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 4, 2: 2})]
    ),
    "a training limited to some batches": Case(limit_train_batches=5),
    "a training limited to a share of its batches": Case(limit_train_batches=0.8),
    "a training limited to some steps": Case(max_steps=16, max_epochs=-1),
    "a validation at each second epoch": Case(
        check_val_every_n_epoch=2, val_check_interval=1.0, max_epochs=4
    ),
    "a validation each so many batches, across epochs": Case(
        check_val_every_n_epoch=None, val_check_interval=4
    ),
    "a validation in the middle and at the end": Case(val_check_interval=0.5),
    "a schedule that looks at each epoch's metric": Case(Plateau, val_check_interval=3, max_epochs=4),
    "a schedule that looks at the metric in mid-epoch": Case(PlateauOfSteps),
    "a schedule as long as the training": Case(OneCycle),
    "metrics of torchmetrics": Case(Measuring),
    "metrics of torchmetrics that wrap others": Case(Wrapping),
    "hooks that draw random numbers": Case(DrawingInHooks),
    "hooks that draw random numbers, and workers": Case(DrawingInHooks, lambda: loader(num_workers=2)),
    "hooks that draw random numbers, and a stream": Case(DrawingInHooks, lambda: loader_of(Stream())),
    "a module without optimizers": Case(WithoutOptimizer),
    "a module that saves by its own hooks": Case(Keeping),
    "a data module with state": Case(datamodule=Data),
    "a callback with state": Case(callbacks=lambda: [Noise()]),
    "an average of the weights": Case(callbacks=lambda: [EMAWeightAveraging(decay=0.8)]),
    "gradient clipping and bf16": Case(gradient_clip_val=0.1, precision="bf16-mixed"),
    "64 bits": Case(precision="64-true"),
    "no validation": Case(limit_val_batches=0, stops=STOPS[:-1]),
    "a stream without a length": Case(loader=lambda: loader_of(Stream())),
    "a stream without a length, limited": Case(loader=lambda: loader_of(Stream()), limit_train_batches=4),
    "workers": Case(loader=lambda: loader(num_workers=2)),
    "persistent workers": Case(loader=lambda: loader(num_workers=2, persistent_workers=True)),
    "a monitor of the learning rate": Case(callbacks=lambda: [LearningRateMonitor("step")]),
}


def loader_of(dataset: Any) -> Any:
    return torch.utils.data.DataLoader(dataset, 4)


@pytest.mark.quick(31)
@pytest.mark.parametrize("case", CASES.values(), ids=[*CASES])
def test_a_training_that_is_stopped_five_times_ends_with_the_same_bits(case: Case, run_dir: Path) -> None:
    plain = case.plain()

    assert_same(case.resumed(run_dir, minimize="loss"), plain)
