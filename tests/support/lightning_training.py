"""Small trainings of Lightning's Trainer, left alone or stopped and resumed, and all that they end with."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.loggers.logger import Logger
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from resumable.integrations.lightning import Resumable

Stop = tuple[str, int]
STOPS: Sequence[Stop] = (
    ("on_train_batch_end", 3),
    ("on_train_batch_end", 4),
    ("on_train_epoch_start", 1),
    ("on_train_batch_end", 3),
    ("on_validation_end", 1),
)
"""In mid-epoch, in an epoch's last batch, after an epoch, in mid-epoch again, after a validation."""
BATCHES = 6
"""How many batches the epochs of a whole `loader()` have."""


_Module: Any = object


class Noisy(Dataset[Any]):
    """Samples that are augmented at random."""

    def __init__(self, samples: int = 4 * BATCHES - 1) -> None:
        self.samples = torch.randn(samples, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.samples[index] + 0.1 * torch.randn(4) + 0.1 * random.random() + 0.1 * np.random.rand()


class Stream(IterableDataset[Any]):
    """Samples without a length, augmented by a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(2)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for sample in Noisy().samples:
            yield sample + 0.1 * torch.randn(4, generator=self.generator)


class Steps(_Module):
    """The hooks of a model with dropout that logs, and keeps what it has seen of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.seen: dict[tuple[int, int], tuple[int, float]] = {}

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch."""
        return self.net(batch.to(self.dtype)).square().mean()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Log the loss for the step and for the epoch."""
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.seen[self.current_epoch, batch_idx] = self.global_step, loss.item()
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        """Log the loss of the validation."""
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> Any:
        """Make an optimizer with a schedule for each step."""
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Model(Steps, pl.LightningModule):
    """Such a model, of the package `lightning`."""


class Lines(Logger):
    """A logger that keeps its lines."""

    name, version = "lines", 0

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, dict[str, Any]]] = []

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Keep a line."""
        self.lines.append((step or 0, dict(metrics)))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Keep nothing."""


class Stopped(Exception):
    """Raised where a test stops a training."""


class StopIn(pl.Callback):
    """Stops the training in the `count`-th call of a hook."""

    def __init__(self, hook: str, count: int) -> None:
        self._left = count
        setattr(self, hook, self._count)

    def _count(self, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            self._left -= 1
        if self._left == 0:
            raise Stopped


class Case:
    """What a script makes at each start; a test says what differs."""

    def __init__(
        self,
        model: Callable[[], Any] = Model,
        loader: Callable[[], Any] = lambda: loader(),
        callbacks: Callable[[], list[Any]] = list,
        datamodule: Callable[[], Any] | None = None,
        stops: Sequence[Stop] = STOPS,
        package: Any = pl,
        **trainer: Any,
    ) -> None:
        self._model, self._loader, self._callbacks, self._datamodule = model, loader, callbacks, datamodule
        self.stops, self._package = stops, package
        self._trainer: dict[str, Any] = {
            **{"max_epochs": 3, "val_check_interval": 2, "enable_checkpointing": False},
            **trainer,
        }

    def fit(self, *more: Any, **options: Any) -> dict[str, Any]:
        """Start the training; return what it ends with."""
        seed()
        model, lines = self._model(), Lines()
        trainer = self._package.Trainer(
            callbacks=[*self._callbacks(), *more],
            logger=lines,
            log_every_n_steps=1,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
            **self._trainer,
        )
        self.model, self.trainer, self.lines = model, trainer, lines
        if self._datamodule:
            trainer.fit(model, datamodule=self._datamodule(), **options)
        else:
            trainer.fit(model, self._loader(), DataLoader(Noisy(4), 2), **options)
        return self.result()

    def result(self) -> dict[str, Any]:
        """Return everything that a training ends with."""
        trainer, model = self.trainer, self.model
        return {
            "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
            "optimizers": [one.state_dict() for one in trainer.optimizers],
            "schedules": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "callbacks": [one.state_dict() for one in trainer.callbacks if not isinstance(one, Resumable)],
            "metrics": dict(trainer.callback_metrics),
            "logged": dict(trainer.logged_metrics),
            "counters": (trainer.global_step, trainer.current_epoch, trainer.fit_loop.total_batch_idx),
            "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()),
        }

    def plain(self) -> dict[str, Any]:
        """Train without the callback; return the results with what was logged and seen."""
        return {**self.fit(), "lines": told(self.lines.lines), "seen": told(self.model.seen.items())}

    def resumed(self, run_dir: Path, **options: Any) -> dict[str, Any]:
        """Train with the callback, stopped again and again; return the results with all that was logged."""
        lines, seen = set[str](), set[str]()
        for stop in (*self.stops, None):
            callback = Resumable(run_dir, **{"every": 1, "keep": 1, **options})
            try:
                result = self.fit(callback, *([StopIn(*stop)] if stop else []))
                assert stop is None, f"{stop} was never reached"
            except Stopped:
                pass
            lines |= told(self.lines.lines)
            seen |= told(self.model.seen.items())
        return {**result, "lines": lines, "seen": seen}


def told(lines: Iterable[Any]) -> set[str]:
    """Return lines as text; a line that is written a second time is the same to the last digit."""
    return {repr(one) for one in lines}


def seed() -> None:
    """Seed what the trainings draw from."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def loader(**options: Any) -> DataLoader[Any]:
    """Return a shuffled loader with random augmentation."""
    return DataLoader(Noisy(), 4, **{"shuffle": True, **options})


def assert_same(left: Any, right: Any, path: str = "") -> None:
    """Two results are equal to the last bit; the message names the first place where they are not."""
    assert type(left) is type(right), f"{path}: {left!r} and {right!r}"
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right), f"{path}: {left} and {right}"
    elif isinstance(left, Mapping):
        assert left.keys() == right.keys(), f"{path}: {left.keys() ^ right.keys()}"
        for key in left:
            assert_same(left[key], right[key], f"{path}/{key}")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), f"{path}: {len(left)} and {len(right)}"
        for place, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_same(one, other, f"{path}/{place}")
    else:
        assert left == right, f"{path}: {left!r} and {right!r}"
