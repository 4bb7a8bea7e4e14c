"""With sample_seeds=True, a sample's draws depend on the run's seed, the epoch and its place alone."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from resumable import ResumableWarning, RunState, StateMismatch

pytestmark = [
    # What torch says of this machine, and Python of every worker that is forked while a save is on its way.
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
]

EPOCHS, SAMPLES, BATCH = 2, 22, 4
"""Six batches an epoch, the last one short."""

Seen = list[Any]


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.randn(()).item()]


class Images(Dataset[torch.Tensor]):
    """Samples that are told by their index, augmented."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, *draw()], dtype=torch.float64)


class ByTheBatch(Images):
    """Samples that are loaded by the batch."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        shared = random.random()
        return [torch.tensor([index, shared, *draw()]) for index in indices]


class Slow(Images):
    """Samples of which the first worker's come late, if there is another."""

    def __getitem__(self, index: int) -> torch.Tensor:
        info = torch.utils.data.get_worker_info()
        if info and info.num_workers > 1 and info.id == 0:
            sum(range(200_000))
        return super().__getitem__(index)


class Stream(IterableDataset[torch.Tensor]):
    """A stream."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([index, *draw()]) for index in range(SAMPLES))


def leg(
    run_dir: Path,
    workers: int = 0,
    stop: int | None = None,
    seed: int = 0,
    *,
    dataset: Any = None,
    batch_size: int | None = BATCH,
    how: dict[str, Any] | None = None,
    **options: Any,
) -> Seen:
    """Go on from the newest checkpoint up to so many batches, and return the samples of each epoch."""
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    loader = DataLoader(dataset or Images(), batch_size, shuffle=True, num_workers=workers, **(how or {}))
    seen: Seen = []
    with RunState.load(run_dir, loader=loader, **{"sample_seeds": True, **options}) as state:
        for epoch in state.epochs(EPOCHS):
            for batch in state.batches():
                seen += [(epoch, sample.tolist()) for sample in batch.reshape(-1, batch.shape[-1])]
                if (epoch, state.batch + 1) == (0, stop):
                    state.save()
                    return seen
    return seen


def chain(run_dir: Path, workers: Iterable[int], stops: Iterable[int | None], **options: Any) -> Seen:
    """Return what a training sees whose every leg has another number of workers, and another seed."""
    legs = enumerate(zip(workers, [*stops, None], strict=True))
    return [sample for seed, (n, stop) in legs for sample in leg(run_dir, n, stop, seed, **options)]


@pytest.mark.quick(4)
@pytest.mark.parametrize(("workers", "persists"), [(1, True), (3, False)])
@pytest.mark.parametrize("dataset", [Images(), ByTheBatch()])
def test_a_sample_is_the_same_whoever_loads_it(
    tmp_path: Path, dataset: Any, workers: int, persists: bool
) -> None:
    in_process = leg(tmp_path / "in process", 0, dataset=dataset)

    in_workers = leg(tmp_path / "in workers", workers, dataset=dataset, how={"persistent_workers": persists})
    # Workers that persist draw no seed for a second epoch, whose order is another for that
    assert [sample[1:] for _, sample in in_workers] == [sample[1:] for _, sample in in_process]
    assert persists or in_workers == in_process


def test_without_batches_of_its_own_a_loader_seeds_its_samples_too(tmp_path: Path) -> None:
    in_process = leg(tmp_path / "in process", 0, batch_size=None)

    assert leg(tmp_path / "in workers", 2, batch_size=None) == in_process
    assert in_process == leg(tmp_path / "in batches", 0)


def test_every_sample_of_every_epoch_has_numbers_of_its_own(run_dir: Path) -> None:
    drawn = [tuple(sample[1:]) for _, sample in leg(run_dir, 2)]

    assert len(set(drawn)) == len(drawn) == EPOCHS * SAMPLES


def test_another_seed_of_the_run_is_another_seed_of_every_sample(tmp_path: Path) -> None:
    first, second = ([sample[1] for _, sample in leg(tmp_path / str(n), 2, seed=n)] for n in (1, 2))

    assert not {*first} & {*second}


@pytest.mark.heavy
def test_another_number_of_workers_in_mid_epoch_changes_nothing(
    run_dir: Path,
) -> None:
    expected = leg(run_dir.parent / "one", 0)

    assert chain(run_dir, [3, 0, 1, 2], [1, 3, 5]) == expected


@pytest.mark.heavy
def test_a_training_that_is_stopped_twice_continues_with_the_same_samples(run_dir: Path) -> None:
    for workers in 0, 2:
        expected = leg(run_dir.parent / f"one {workers}", workers)

        assert chain(run_dir.parent / f"many {workers}", [workers] * 4, [1, 2, 6]) == expected


def test_batches_of_another_size_are_made_of_the_same_samples(run_dir: Path) -> None:
    expected = leg(run_dir.parent / "one", 0)

    seen = leg(run_dir, 2, 2)
    with pytest.warns(ResumableWarning, match="loader.batch_size +4 +-> 3"):
        seen += leg(run_dir, 1, 4, batch_size=3, allow=["loader.batch_size"], seed=1)
    with pytest.warns(ResumableWarning, match="loader.batch_size +3 +-> 5"):
        seen += leg(run_dir, 0, batch_size=5, allow=["loader.batch_size"], seed=2)

    assert seen == expected


@pytest.mark.filterwarnings("ignore:in_order=False")
def test_without_in_order_the_samples_are_the_same_ones(tmp_path: Path) -> None:
    expected = leg(tmp_path / "in process")

    seen = chain(tmp_path / "any order", [2, 2, 2], [2, 4], dataset=Slow(), how={"in_order": False})

    assert sorted(seen) == sorted(expected)


def test_in_process_the_trainings_own_generators_stay_where_they_were(run_dir: Path) -> None:
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    own = torch.Generator()
    with RunState.load(
        run_dir, loader=DataLoader(Images(), BATCH, generator=own), sample_seeds=True
    ) as state:
        seen = [draw() for _ in state.batches()]

    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    assert seen == [draw() for _ in range(6)]


class Failing(Images):
    def __getitem__(self, index: int) -> torch.Tensor:
        found = super().__getitem__(index)
        if index == 5:
            raise OSError("no sample 5")
        return found


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_raises_leaves_the_trainings_generators_alone(run_dir: Path, workers: int) -> None:
    loader = DataLoader(Failing(), BATCH, num_workers=workers, generator=torch.Generator())
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    found = []
    with RunState.load(run_dir, loader=loader, sample_seeds=True) as state:
        left = iter(state.batches())
        while len(found) < 6:
            with contextlib.suppress(OSError):
                next(left)
            found.append(draw())

    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    assert found == [draw() for _ in found]


@pytest.mark.heavy
def test_the_order_is_the_one_without_seeds(tmp_path: Path) -> None:
    with_seeds = leg(tmp_path / "with", 2)

    without = leg(tmp_path / "without", 2, sample_seeds=False)

    assert [sample[0] for _, sample in with_seeds] == [sample[0] for _, sample in without]
    assert [sample[1] for _, sample in with_seeds] != [sample[1] for _, sample in without]


@pytest.mark.heavy
@pytest.mark.parametrize("before", [True, False])
def test_seeds_switched_in_mid_epoch_are_a_mismatch_unless_allowed(run_dir: Path, before: bool) -> None:
    order = [sample[0] for _, sample in leg(run_dir.parent / "one")]
    done = leg(run_dir, 2, 3, sample_seeds=before)

    with pytest.raises(
        StateMismatch, match=f"loader.sample_seeds: {before} in the checkpoint, {not before} in"
    ):
        leg(run_dir, 2, sample_seeds=not before)
    with pytest.warns(ResumableWarning, match=f"loader.sample_seeds +{before} +-> {not before}"):
        rest = leg(run_dir, 2, sample_seeds=not before, allow=["loader.sample_seeds"], seed=1)

    assert [sample[0] for _, sample in done + rest] == order


def test_a_stream_is_not_seeded_and_continues_as_without(tmp_path: Path) -> None:
    def numbers(path: Path, **options: Any) -> Seen:
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        with RunState.load(path, loader=DataLoader(Stream(), BATCH, num_workers=1), **options) as state:
            return [batch.tolist() for batch in state.batches()]

    assert numbers(tmp_path / "with", sample_seeds=True) == numbers(tmp_path / "without")
