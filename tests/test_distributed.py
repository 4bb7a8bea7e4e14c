"""Trainings of several processes: stopped and resumed, they end as one that was never stopped."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from resumable import RunState

EPOCHS = 2


class Augmented(Dataset[Any]):
    """Samples that are drawn at random as they are loaded, by all three libraries."""

    def __init__(self, size: int = 40) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(4) + random.random() + float(np.random.rand())
        return torch.arange(4) * index / self.size + noise


class Training:
    """What each process makes: a model in DDP, an optimizer, a loader that augments in its workers."""

    def __init__(self, rank: int, *, workers: int = 0, drop_last: bool = False, **ddp: Any) -> None:
        torch.manual_seed(0)
        layers = [
            nn.Linear(4, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.3),
            nn.Tanh(),
            nn.Linear(8, 6),
            nn.Linear(6, 1),
        ]
        self.model = DistributedDataParallel(nn.Sequential(*layers), **ddp)
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(100 + rank)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.7)
        self.own = np.random.default_rng(rank)
        self.sampler: DistributedSampler[Any] = DistributedSampler(Augmented(), drop_last=drop_last, seed=3)
        self.loader = DataLoader(
            Augmented(), batch_size=2, sampler=self.sampler, num_workers=workers, drop_last=drop_last
        )
        self.seen: list[str] = []

    def parts(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "loader": self.loader,
            "extra": {"own": self.own},
        }

    def digest(self) -> str:
        parts = [t.detach().numpy().tobytes() for t in self.model.state_dict().values()]
        for state in self.optimizer.state.values():
            parts += [value.numpy().tobytes() for value in state.values()]
        parts += [str(self.scheduler.get_last_lr()).encode(), repr(self.own.bit_generator.state).encode()]
        draws = f"{random.random()} {np.random.rand()} {torch.rand(1).item()}".encode()
        return hashlib.sha256(b"".join([*parts, draws])).hexdigest()


def train(
    rank: int, run_dir: Path, stop_at: int | None, options: dict[str, Any], keywords: dict[str, Any]
) -> Any:
    """Train until so many batches were done in this process, or to the end; return what the rank has seen."""
    window = options.pop("window", 1)
    training = Training(rank, **options)
    done = 0
    with RunState.load(run_dir, **training.parts(), minimize="loss", timeout=20, **keywords) as state:
        for epoch in state.epochs(EPOCHS):
            training.sampler.set_epoch(epoch)
            for batch in state.batches():
                training.seen.append(hashlib.sha256(batch.numpy().tobytes()).hexdigest()[:8])
                done += 1
                is_step = (state.batch + 1) % window == 0
                with training.model.no_sync() if not is_step else torch.enable_grad():
                    loss = (training.model(batch) * training.own.random()).square().mean()
                    loss.backward()
                if is_step:
                    training.optimizer.step()
                    training.optimizer.zero_grad()
                    training.scheduler.step()
                if done == stop_at:
                    state.save(loss=loss.detach() + rank).wait()
                    return training.seen
            state.save(loss=float(epoch))
    return training.seen, training.digest(), state.samples, state.best


def ended(
    size: int, folder: Path, stop_at: int | None, options: dict[str, Any], keywords: dict[str, Any] = {}
) -> list[Any]:
    found = processes.run(
        size, train, folder / "run", stop_at, dict(options), keywords, folder=folder, limit=60
    )
    for one in found:
        if one.error:
            raise AssertionError(f"a rank failed: {one.printed}") from one.error
        assert one.value is not None, f"a rank has ended with {one.exitcode}"
    return [one.value for one in found]


@pytest.mark.parametrize(
    ("size", "stops", "options"),
    [
        (2, (3, 2), {"workers": 2}),
        (2, (9, 9), {}),
        (4, (2, 3), {}),
        (2, (3, 3), {"window": 2}),
        (2, (2, 9), {"drop_last": True}),
        (4, (4, 1), {"static_graph": True}),
    ],
)
def test_a_training_stopped_twice_ends_as_one_that_was_not(
    tmp_path: Path, size: int, stops: tuple[int, ...], options: dict[str, Any]
) -> None:
    whole = ended(size, tmp_path / "whole", None, options)

    parts = [ended(size, tmp_path / "parts", stop, options) for stop in stops]
    last = ended(size, tmp_path / "parts", None, options)

    for rank in range(size):
        seen = [batch for part in parts for batch in part[rank]] + last[rank][0]
        assert seen == whole[rank][0], f"rank {rank} has had other batches"
        assert last[rank][1:] == whole[rank][1:], f"rank {rank} has ended elsewhere"
    assert len({one[1] for one in whole}) == size, "the ranks draw the same"
