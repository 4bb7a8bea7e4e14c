"""A training whose loader Accelerate or Fabric has prepared, with and without a RunState."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from resumable import Ranks, RunState

EPOCHS = 3
Stop = int | str


class Augmented(Dataset[torch.Tensor]):
    """Samples that are drawn at random as they are loaded, by all three libraries."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(3) + random.random() + float(np.random.rand()) + index / self.size


class Numbers(IterableDataset[torch.Tensor]):
    """A stream that draws nothing."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.full((3,), number / self.size) for number in range(self.size))


class Training:
    """What a script makes at each start; `options` are those of the loader and of what prepares it."""

    def __init__(self, maker: str, rank: int = 0, size: int = 1, **options: Any) -> None:
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(0)
        kind = Numbers if options.pop("is_stream", False) else Augmented
        data, names = kind(options.pop("samples", 19)), ("num_workers", "persistent_workers")
        loading = {name: options.pop(name) for name in names if name in options}
        loader = DataLoader(data, batch_size=2, shuffle=kind is Augmented, **loading)
        model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        made = (model, optimizer, loader, scheduler)
        # Processes draw differently: what all should have is synchronized by what prepares the loader.
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(1 + rank)
        prepare = self._by_fabric if maker == "fabric" else self._by_accelerate
        self.model, self.optimizer, self.loader, self.scheduler = prepare(made, rank, size, options)
        self.losses: list[float] = []

    def _by_fabric(self, made: Any, rank: int, size: int, options: Any) -> Any:
        from lightning_fabric import Fabric

        _place(rank, size)
        strategy = "ddp" if size > 1 else "auto"
        self.fabric = Fabric(accelerator="cpu", devices=size, strategy=strategy, **options)
        self.fabric.launch()
        self.accelerator = None
        model, optimizer, loader, scheduler = made
        return *self.fabric.setup(model, optimizer), self.fabric.setup_dataloaders(loader), scheduler

    def _by_accelerate(self, made: Any, rank: int, size: int, options: Any) -> Any:
        import accelerate

        _place(rank, size)
        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.state.GradientState._reset_state()
        loading = accelerate.utils.DataLoaderConfiguration(**options)
        self.accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=4, dataloader_config=loading
        )
        return self.accelerator.prepare(*made)

    def parts(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return {**parts, "loader": self.loader}

    def body(self, batch: torch.Tensor) -> None:
        """Train on a batch as the tutorials do."""
        if self.accelerator is None:
            loss = self.model(batch).square().mean()
            self.fabric.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            with self.accelerator.accumulate(self.model):
                loss = self.model(batch).square().mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def digest(self) -> str:
        """Return a digest of the weights, the optimizer, the schedule and the random generators."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [*self.model.state_dict().values(), *states, torch.get_rng_state()]
        found = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors))
        found.update(repr([self.scheduler.get_last_lr(), random.random(), np.random.rand()]).encode())
        return found.hexdigest()


def _place(rank: int, size: int) -> None:
    if size > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        elastic = {
            "TORCHELASTIC_RUN_ID": 1,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": 29500,
            "GROUP_RANK": 0,
        }
        os.environ.update({name: str(value) for name, value in {**place, **elastic}.items()})


def plain(maker: str, **options: Any) -> tuple[str, list[float]]:
    """Train without a RunState; return a digest of all there is in the end, and the losses."""
    training = Training(maker, **options)
    for _ in range(EPOCHS):
        for batch in training.loader:
            training.body(batch)
    return training.digest(), training.losses


class Stopped(Exception):
    """A training that has gone as far as it should."""


def ours(run_dir: Path, stop: Stop | None, maker: str, **options: Any) -> tuple[str, list[float]] | None:
    """Train with a RunState until after a batch, or the end of an epoch ("epoch 0"); None if stopped."""
    training = Training(maker, **options)
    with (
        contextlib.suppress(Stopped),
        RunState.load(run_dir, **training.parts(), ranks=Ranks(timeout=20)) as state,
    ):
        training.losses = state.vars.setdefault("losses", [])
        for epoch in state.epochs(EPOCHS):
            for batch in state.batches():
                training.body(batch)
                if len(training.losses) == stop:
                    state.save().wait()
                    raise Stopped
            if stop == f"epoch {epoch}":
                state.save().wait()
                raise Stopped
        return training.digest(), [*training.losses]
    return None


def stopped(run_dir: Path, stops: Sequence[Stop], maker: str, **options: Any) -> tuple[str, list[float]]:
    """Train with a RunState, stopped and resumed as often as there are stops."""
    assert all(ours(run_dir, stop, maker, **options) is None for stop in stops)
    found = ours(run_dir, None, maker, **options)
    assert found
    return found
