"""With a seed for every sample, what is drawn for it depends on the run, the epoch and its place alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

from resumable import RunState
from resumable.loaders.workers.datasets import Seeded

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
]

EPOCHS, SAMPLES, BATCH = 2, 14, 4


def noise() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.randn(), np.random.rand(), torch.randn(()).item()]


class Noisy(Dataset[Any]):
    """Samples of nothing but noise, and their index."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        found = (index, *noise())
        if index == self.fails_at:
            raise OSError(f"no sample {index}")
        return found


class ManyAtOnce(Noisy):
    """Samples that are loaded by the batch."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        shared = noise()
        return [(index, *shared, *noise()) for index in indices]


def draw() -> list[float]:
    """Draw as a training does; an odd number of normal ones, so that each library keeps the other half."""
    return [random.gauss(0, 1), np.random.randn(), torch.rand(()).item()]


def begin(seed: int) -> None:
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)


def loader(dataset: Any = None, batch_size: int | None = BATCH, **how: Any) -> DataLoader[Any]:
    # One generator for the order, and one for the workers: those that persist draw once.
    dataset = dataset or Noisy()
    sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(3))
    how = {**how, "sampler": sampler, "generator": torch.Generator().manual_seed(4)}
    return DataLoader(dataset, batch_size, collate_fn=as_it_is, **how)


def as_it_is(samples: Any) -> Any:
    return samples


def trained(run_dir: Path, stops: Any = (), **how: Any) -> list[Any]:
    """Return the batches of a run that is stopped before these batches, and what the training drew."""
    seen: list[Any] = []
    for leg, stop in enumerate([*stops, None]):
        begin(9 if leg == 0 else 100 + leg)
        with RunState.load(run_dir, loader=loader(**how), sample_seeds=True) as state:
            for epoch in state.epochs(EPOCHS):
                for batch in state.batches():
                    seen.append((batch, draw()))
                    if (epoch, state.batch) == stop:
                        state.save()
                        break
                else:
                    seen.append(("end", draw()))
                    continue
                break
    return seen


def batches(seen: list[Any]) -> list[Any]:
    return [batch for batch, _ in seen if batch != "end"]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return trained(tmp_path_factory.mktemp("runs") / "exp")


@pytest.mark.parametrize("how", [{"num_workers": n} for n in (1, 2, 3)])
def test_a_sample_is_the_same_with_any_number_of_workers(
    run_dir: Path, expected: list[Any], how: dict[str, Any]
) -> None:
    assert batches(trained(run_dir, **how)) == batches(expected)


def test_a_sample_is_the_same_with_workers_that_persist(run_dir: Path, expected: list[Any]) -> None:
    seen = trained(run_dir, num_workers=2, persistent_workers=True)

    assert batches(seen) == batches(expected)


@pytest.mark.filterwarnings("ignore:in_order=False")
def test_a_sample_is_the_same_in_whatever_order_the_batches_come(run_dir: Path, expected: list[Any]) -> None:
    seen = trained(run_dir, num_workers=3, in_order=False)

    assert sorted(batches(seen)) == sorted(batches(expected))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.quick(2)
def test_a_run_that_is_stopped_repeatedly_matches_an_uninterrupted_one(
    run_dir: Path, tmp_path: Path, workers: int
) -> None:
    seen = trained(run_dir, [(0, 0), (0, 2), (0, 3), (1, 1), (1, 2)], num_workers=workers)

    assert seen == trained(tmp_path / "other", num_workers=workers)


def test_single_samples_are_seeded_by_the_same_places(run_dir: Path, expected: list[Any]) -> None:
    seen = trained(run_dir, batch_size=None, num_workers=2)

    assert batches(seen) == [sample for batch in batches(expected) for sample in batch]


def test_samples_that_are_loaded_by_the_batch_do_not_depend_on_who_loads_them(
    run_dir: Path, tmp_path: Path
) -> None:
    here, there = (
        trained(tmp_path / name, dataset=ManyAtOnce(), num_workers=n) for name, n in (("a", 0), ("b", 2))
    )

    assert batches(here) == batches(there)
    assert len({batch[0][1] for batch in batches(here)}) == len(batches(here))


def test_no_two_places_epochs_or_runs_draw_the_same(run_dir: Path, expected: list[Any]) -> None:
    begin(10)
    with RunState.load(run_dir, loader=loader(), sample_seeds=True) as state:
        others = [batch for _ in state.epochs(EPOCHS) for batch in state.batches()]
    drawn = [
        sample[kind] for batch in [*batches(expected), *others] for sample in batch for kind in range(1, 6)
    ]

    assert len(set(drawn)) == len(drawn) == 2 * EPOCHS * SAMPLES * 5


def test_in_this_process_the_training_draws_as_if_nothing_was_loaded(run_dir: Path) -> None:
    found = [numbers for _, numbers in trained(run_dir)]
    begin(9)

    assert found == [draw() for _ in found]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_raises_leaves_the_trainings_generators_as_they_were(
    run_dir: Path, workers: int
) -> None:
    failing = loader(Noisy(fails_at=5), num_workers=workers)
    begin(9)
    found = []
    with RunState.load(run_dir, loader=failing, sample_seeds=True) as state:
        left = iter(state.batches())
        while True:
            try:
                found += [draw() for _ in [next(left)]]
            except OSError:
                found.append(draw())
            except StopIteration:
                break
    begin(9)

    assert found == [draw() for _ in range(4)]


def test_a_place_has_its_own_seed_whatever_was_drawn_before() -> None:
    seeded = Seeded(Noisy(), 1)
    expected = seeded[(0, 3, 7)]
    other = [seeded[place] for place in ((0, 4, 7), (1, 3, 7))]
    draw()

    assert seeded[(0, 3, 7)] == expected
    assert Seeded(Noisy(), 2)[(0, 3, 7)] != expected
    assert len({expected, *other}) == 3


def test_a_batch_that_is_loaded_as_one_has_the_seed_of_its_first_sample() -> None:
    load = Seeded(ManyAtOnce(), 1).__getitems__
    assert load is not None
    first = load([(0, 4, 2), (0, 5, 3)])
    draw()

    assert load([(0, 4, 2), (0, 9, 3)]) == first
    assert [sample[0] for sample in first] == [2, 3]
    assert load([(0, 5, 2), (0, 4, 3)]) != first


def test_a_dataset_that_loads_one_by_one_continues_doing_so() -> None:
    assert Seeded(Noisy(), 1).__getitems__ is None
