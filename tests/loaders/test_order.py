"""The order of an epoch is drawn again as it was, by whatever sampler, and what was trained is left out."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stopping import differences
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from resumable import ResumableWarning, RunState, StateMismatch

SAMPLES, BATCH = 18, 4
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


LOADED: list[Any] = []


class Numbers(Dataset[Any]):
    """Samples that note when they are loaded."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: Any) -> torch.Tensor:
        LOADED.append(index)
        return torch.tensor([float(index[0] if isinstance(index, tuple) else index)])


class Chunks(Sampler[int]):
    """An order that is shuffled by the piece: it draws now and then, from Python's generator."""

    def __init__(self, size: int = 2 * BATCH) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        for start in range(0, SAMPLES, self.size):
            piece = [*range(start, min(SAMPLES, start + self.size))]
            random.shuffle(piece)
            yield from piece

    def __len__(self) -> int:
        return SAMPLES


class DrawsAtItsEnd(Chunks):
    """An order that draws once more when all of it was asked for."""

    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()
        random.random()


class AsYielded(Sampler[Any]):
    """Batches in a kind of container."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[Any]:
        order = np.random.permutation(SAMPLES)
        yield from (self.kind(order[at : at + BATCH]) for at in range(0, SAMPLES, BATCH))


class Pairs(Chunks):
    """Samples that are named by a pair."""

    def __iter__(self) -> Iterator[Any]:
        yield from ((index, f"view {random.random()}") for index in np.random.permutation(SAMPLES))


def over(sampler: Any, **how: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(), sampler=sampler, batch_size=BATCH, **how)


def in_batches(sampler: Any, **how: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(), batch_sampler=sampler, **how)


ORDERS: dict[str, Callable[..., DataLoader[Any]]] = {
    "chunks": lambda **how: over(Chunks(), **how),
    "long chunks": lambda **how: in_batches(BatchSampler(Chunks(3 * BATCH), BATCH, False), **how),
    "draws at its end": lambda **how: DataLoader(Numbers(), None, sampler=DrawsAtItsEnd(), **how),
    "arrays": lambda **how: in_batches(AsYielded(np.array), **how),
    "tensors": lambda **how: in_batches(AsYielded(torch.as_tensor), **how),
    "pairs": lambda **how: over(Pairs(), **how),
}


def objects(loader: Callable[[], Any]) -> dict[str, Any]:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return {"model": model, "optimizer": optimizer, "loader": loader()}


def epochs(state: RunState, objects: dict[str, Any], tick: Callable[..., None]) -> None:
    for _ in state.epochs(2):
        for x in state.batches():
            objects["optimizer"].zero_grad()
            objects["model"](x + random.random() + np.random.rand()).sum().backward()
            objects["optimizer"].step()
            tick(x)


@pytest.mark.quick(6)
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.heavy)])
@pytest.mark.parametrize("name", ORDERS)
def test_what_is_left_of_an_epoch_comes_as_if_it_was_never_stopped(
    run_dir: Path, name: str, workers: int
) -> None:
    make = partial(objects, partial(ORDERS[name], num_workers=workers))

    assert differences(run_dir, make, epochs, at=(1, 3, 6)) == []


def stopped(run_dir: Path, loader: DataLoader[Any], batches: int, **options: Any) -> list[Any]:
    """Return the batches of the newest checkpoint's epoch, up to a save."""
    seen = []
    with RunState.load(run_dir, loader=loader, **options) as state:
        for batch in state.batches():
            seen.append(batch.flatten().tolist())
            if len(seen) == batches:
                state.save()
                break
    return seen


def test_numbers_of_numpy_and_of_python_are_the_same_order(run_dir: Path) -> None:
    kinds = list, np.ndarray.tolist, tuple, torch.as_tensor, lambda given: list(map(torch.tensor, given))
    seen = [stopped(run_dir, in_batches(AsYielded(kind)), 1)[0] for kind in kinds]

    assert sorted(number for batch in seen for number in batch) == [*range(SAMPLES)]


def test_what_is_skipped_is_asked_of_the_sampler_alone(run_dir: Path) -> None:
    stopped(run_dir, over(Chunks()), 3)
    LOADED.clear()
    stopped(run_dir, over(Chunks()), 1)

    assert len(LOADED) == BATCH


def test_an_order_that_is_drawn_late_has_no_batches_of_another_size(run_dir: Path) -> None:
    stopped(run_dir, over(Chunks(BATCH)), 2)
    stopped(run_dir, over(Chunks(BATCH)), 1)

    loader = DataLoader(Numbers(), 5, sampler=Chunks(BATCH))
    with (
        pytest.warns(ResumableWarning, match="batch_size +4 +-> 5"),
        pytest.raises(StateMismatch, match="draws as it runs"),
    ):
        stopped(run_dir, loader, 1, allow=["loader.batch_size"])
