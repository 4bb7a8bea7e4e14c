"""Prefetchers that draw random numbers one batch ahead of the training, in its own process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from resumable import RunState, UsageError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
    pytest.mark.filterwarnings("ignore:loader keeps no position"),
]

EPOCHS, BATCHES = 2, 4


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 2 * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(3) + index


class PrefetchLoader:
    """The prefetcher of timm: a batch ahead, on a stream beside the training's, with random erasing."""

    def __init__(self, loader: Any, erase: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.loader = loader
        self.erase = erase
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def __iter__(self) -> Iterator[torch.Tensor]:
        first, batch = True, torch.empty(0)
        beside = nullcontext
        stream = None
        if self.device.type == "cuda":
            stream = torch.cuda.Stream(device=self.device)
            beside = partial(torch.cuda.stream, stream=stream)
        for following in self.loader:
            with beside():
                following = self.erase(following.to(device=self.device, non_blocking=True))
            if not first:
                yield batch
            else:
                first = False
            if stream is not None:
                torch.cuda.current_stream(device=self.device).wait_stream(stream)
            batch = following
        yield batch

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def sampler(self) -> Any:
        return self.loader.sampler

    @property
    def dataset(self) -> Any:
        return self.loader.dataset


def erase(batch: torch.Tensor) -> torch.Tensor:
    if random.random() < 0.7:
        batch[:, torch.randint(3, ())] = torch.empty(len(batch), device=batch.device).normal_()
    return batch


def loader(workers: int, **more: Any) -> DataLoader[torch.Tensor]:
    return DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=workers, **more)


def given(workers: int) -> tuple[Any, Any]:
    return PrefetchLoader(loader(workers), erase), None


def through(workers: int) -> tuple[Any, Any]:
    return loader(workers), lambda batches: PrefetchLoader(batches, erase)


def through_persistent(workers: int) -> tuple[Any, Any]:
    kept = loader(workers, persistent_workers=bool(workers))
    return kept, lambda batches: PrefetchLoader(batches, erase)


def train(run_dir: Path, make: Any, workers: int, *stops: int) -> list[Any]:
    """Start the script again after each stop; return what each batch was and what it left."""
    seen: list[Any] = []
    for stop in (*stops, None):
        torch.manual_seed(0)
        random.seed(0)
        data, around = make(workers)
        model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with RunState.load(run_dir, model=model, optimizer=optimizer, loader=data) as state:
            for epoch in state.epochs(EPOCHS):
                for batch in state.batches(through=around):
                    optimizer.zero_grad()
                    model(batch.cpu()).square().mean().backward()
                    optimizer.step()
                    weights = [weight.tolist() for weight in model.parameters()]
                    seen.append((epoch, state.batch, batch.tolist(), weights, random.getstate()[1][-1]))
                    if epoch * BATCHES + state.batch == stop:
                        state.save().wait()
                        break
                else:
                    continue
                break
    return seen


@pytest.mark.parametrize("make", [given, through, through_persistent])
@pytest.mark.parametrize(
    ("workers", "stops"), [(0, (0, 1)), (0, (2, 5)), (0, (3, 4)), (0, (6, 7)), (1, (1, 6))]
)
@pytest.mark.quick(16)
def test_a_prefetcher_that_draws_is_exact_after_two_resumes(
    tmp_path: Path, make: Any, workers: int, stops: Any
) -> None:
    straight = train(tmp_path / "straight", make, workers)

    stopped = train(tmp_path / "stopped", make, workers, *stops)

    assert stopped == straight


@pytest.mark.heavy
def test_what_is_given_as_through_trains_what_the_plain_prefetcher_trains(tmp_path: Path) -> None:
    assert train(tmp_path / "given", given, 1) == train(tmp_path / "through", through, 1)


def test_a_prefetcher_around_persistent_workers_is_refused_by_name(run_dir: Path) -> None:
    prefetcher = PrefetchLoader(loader(1, persistent_workers=True), erase)

    with pytest.raises(UsageError, match=r"PrefetchLoader around(?s:.*)through=lambda batches: Prefetch"):
        RunState.load(run_dir, loader=prefetcher)
