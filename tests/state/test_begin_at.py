"""Trainings that an old script has begun: what continues them ends with the bits of the old script."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from resumable import CheckpointNotFound, Run, RunState, UsageError

EPOCHS = 3
BATCHES = 4
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


class Shuffled:
    """An iterable that keeps no position, and shuffles with a generator of its own."""

    def __init__(self) -> None:
        self.order = torch.Generator().manual_seed(5)

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        for some in torch.randperm(8, generator=self.order).split(2):
            yield [X[some]]

    def __len__(self) -> int:
        return BATCHES


class Stream(IterableDataset[list[torch.Tensor]]):
    """A stream without a state."""

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        return ([row] for row in X)


class Training:
    """What the old script and the new one have in common; `kind` says how the order is drawn."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(1)
        self.kind = kind
        # Where the order comes from the global generator, nothing else may draw from it.
        drops = nn.Identity() if kind in ("global", "seeded each epoch") else nn.Dropout(0.5)
        self.model = nn.Sequential(nn.Linear(4, 6), drops, nn.Linear(6, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.loader = self._loader()
        self.losses: list[float] = []

    def _loader(self) -> Any:
        data = TensorDataset(X)
        if self.kind in ("sampler", "workers"):
            sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=3)
            return DataLoader(data, 2, sampler=sampler, num_workers=2 if self.kind == "workers" else 0)
        if self.kind == "generator":
            return DataLoader(data, 2, shuffle=True, generator=torch.Generator().manual_seed(4))
        if self.kind == "iterable":
            return Shuffled()
        return DataLoader(Stream(), 2) if self.kind == "stream" else DataLoader(data, 2, shuffle=True)

    def generator(self) -> torch.Generator:
        """Return the generator that the order is drawn from."""
        own = getattr(self.loader, "order", None) or getattr(self.loader, "generator", None)
        return own or torch.default_generator

    def begin_epoch(self, epoch: int) -> None:
        """Run the first lines of an epoch's body."""
        if isinstance(getattr(self.loader, "sampler", None), DistributedSampler):
            self.loader.sampler.set_epoch(epoch)
        if self.kind == "seeded each epoch":
            torch.manual_seed(100 + epoch)

    def step(self, x: torch.Tensor) -> None:
        loss = self.model(x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def result(self) -> list[Any]:
        moments = [value for part in self.optimizer.state.values() for value in part.values()]
        tensors = [*self.model.state_dict().values(), *moments]
        return [self.losses, [tensor.tolist() for tensor in tensors], torch.get_rng_state().tolist()]


def old_script(kind: str, epoch: int = EPOCHS, batch: int = 0) -> tuple[Training, dict[str, Any]]:
    """Train without this library up to a batch; return the training and the checkpoint of the script."""
    training, order = Training(kind), None
    for at in range(EPOCHS):
        order = training.generator().get_state()
        training.begin_epoch(at)
        for number, (x,) in enumerate(training.loader):
            if (at, number) == (epoch, batch):
                break
            training.step(x)
            if (at, number + 1) == (epoch, batch) == (epoch, BATCHES):
                break
        if at == epoch:
            break
    parts = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
    return training, {**parts, "rng": torch.get_rng_state(), "order": order}


class Stop(Exception):
    pass


def new_script(
    training: Training, run: Path, old: dict[str, Any], at: tuple[int, int], stop: int | None = None
) -> Training:
    """Continue where the old script has stopped, and stop after so many steps, which are saved."""
    parts = {"model": training.model, "optimizer": training.optimizer, "loader": training.loader}
    with RunState.load(run, **parts, every=1) as state:
        if not state.resumed:
            training.model.load_state_dict(old["model"])
            training.optimizer.load_state_dict(old["optimizer"])
            torch.set_rng_state(old["rng"])
            if training.kind in ("generator", "global", "iterable"):
                training.generator().set_state(old["order"])
            state.begin_at(epoch=at[0], batch=at[1], step=at[0] * BATCHES + at[1])
        for epoch in state.epochs(EPOCHS):
            training.begin_epoch(epoch)
            for (x,) in state.batches():
                if len(training.losses) == stop:
                    raise Stop
                training.step(x)
    return training


PLACES = [(0, 1), (1, 3), (1, BATCHES), (2, 2)]
KINDS = ["sampler", "generator", "global", "seeded each epoch", "iterable", "stream", "workers"]


@pytest.mark.filterwarnings("ignore:.*keeps no position, so:UserWarning")
@pytest.mark.parametrize("stops", [(), (1, 2), (0, 4)], ids=str)
@pytest.mark.parametrize("at", PLACES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_what_an_old_script_began_ends_with_its_bits(
    kind: str, at: tuple[int, int], stops: tuple[int, ...], run_dir: Path
) -> None:
    whole, _ = old_script(kind)
    begun, old = old_script(kind, *at)
    losses = begun.losses

    for stop in (*stops, None):
        training = Training(kind)
        with suppress(Stop):
            new_script(training, run_dir, old, at, stop)
        losses += training.losses

    assert losses == whole.losses
    assert training.result()[1:] == whole.result()[1:]
