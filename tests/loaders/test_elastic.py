"""An epoch continues in its middle on more or fewer ranks: every sample of it is seen exactly once."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from resumable import ResumableWarning, Run, RunState, StateMismatch
from resumable.loaders.workers.resharding import Deal, base, obstacle

pytestmark = [
    # What torch says of this machine, and Python of every worker that is forked while a save is on its way.
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
    # The change itself, that is reported on every rank.
    pytest.mark.filterwarnings("ignore:.* has changed since checkpoint"),
]

SAMPLES = 103
EPOCHS = 2


# The arithmetic alone.


def batches(indices: Sequence[int], size: int, drop_last: bool) -> list[list[int]]:
    return list(BatchSampler(indices, size, drop_last))


class Leg(NamedTuple):
    ranks: int
    size: int
    stop: float
    """Which part of the batches that are left is trained before the next change."""


LEGS = st.lists(st.builds(Leg, st.integers(1, 8), st.integers(1, 9), st.floats(0, 1)), min_size=1, max_size=5)


@settings(max_examples=300, deadline=None)
@given(legs=LEGS, drops=st.booleans(), samples=st.integers(1, 400))
def test_every_sample_is_dealt_out_once_however_often_the_ranks_change(
    legs: list[Leg], drops: bool, samples: int
) -> None:
    order = random.Random(samples).sample(range(samples), samples)
    seen: list[int] = []
    start = 0
    for number, (ranks, size, stop) in enumerate(legs):
        ours = [batches(Deal(ranks, rank, drops).ours(order, start), size, False) for rank in range(ranks)]
        done = len(ours[0]) if number == len(legs) - 1 else round(stop * len(ours[0]))
        trained = [index for of_rank in ours for batch in of_rank[:done] for index in batch]
        seen += trained
        assert len({len(of_rank) for of_rank in ours}) == 1
        start = min(start + len(trained), samples)

    times = Counter(seen)
    at_most = max(0, max(ranks for ranks, _, _ in legs) - 1)
    assert (samples - len(times)) <= (at_most if drops else 0)
    assert (len(seen) - len(times)) <= (0 if drops else at_most)
    assert len(seen) - len(times) <= legs[-1].ranks - 1 or start == samples


# Real loaders: every rank is a RunState of its own.


class Images(Dataset[torch.Tensor]):
    """Samples that are told by their index, with what is drawn for them."""

    def __init__(self, length: int = SAMPLES, noise: Callable[[], list[float]] = list) -> None:
        self.length, self.noise = length, noise

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self.length:
            raise IndexError(index)
        return torch.tensor([index, *self.noise()], dtype=torch.float64)


def noise() -> list[float]:
    return [random.random(), np.random.rand(), torch.rand(()).item()]


Make = Callable[..., DataLoader[Any]]


def distributed(
    ranks: int, rank: int, dataset: Any = None, drops: bool = False, **how: Any
) -> DataLoader[Any]:
    """Return a loader as most scripts make it: a single rank has no DistributedSampler."""
    dataset = dataset or Images()
    if ranks == 1:
        return DataLoader(dataset, shuffle=True, **how)
    return DataLoader(
        dataset, sampler=DistributedSampler(dataset, ranks, rank, seed=7, drop_last=drops), **how
    )


def always(ranks: int, rank: int, dataset: Any = None, **how: Any) -> DataLoader[Any]:
    """Return one that always has a DistributedSampler."""
    dataset = dataset or Images()
    return DataLoader(dataset, sampler=DistributedSampler(dataset, ranks, rank, seed=7), **how)


def torchdatas(ranks: int, rank: int, **how: Any) -> DataLoader[Any]:
    return StatefulDataLoader(
        Images(), sampler=StatefulDistributedSampler(Images(), ranks, rank, seed=7), **how
    )


Batches = list[list[Any]]


class Script:
    """A training on several ranks, one after another; its legs continue from each other."""

    def __init__(self, path: Path, make: Make = distributed, **how: Any) -> None:
        self.path, self.make, self.how = path, make, how
        self.options: dict[str, Any] = {}
        self.legs = 0
        self.before: list[Path] = []
        """The checkpoints of all ranks of the leg before."""

    def leg(self, ranks: int, stop: tuple[int, int] | int | None = None, **how: Any) -> list[Batches]:
        """Train up to a batch of an epoch, or that many of them; return each rank's batches by epoch."""
        self.legs += 1
        seen = []
        before, self.before = self.before, []
        for rank in range(ranks):
            given = (before[rank] if rank < len(before) else before[0]) if before else "never"
            seen.append(self.of_rank(ranks, rank, given, stop, **{**self.how, **how}))
        return seen

    def of_rank(self, ranks: int, rank: int, given: Any, stop: Any, **how: Any) -> Batches:
        random.seed(self.legs), np.random.seed(self.legs), torch.manual_seed(10 * self.legs + rank)
        loader = self.make(ranks, rank, **how)
        run_dir = self.path / f"{self.legs}" / f"{rank}"
        seen: Batches = [[] for _ in range(EPOCHS)]
        with RunState.load(run_dir, loader=loader, resume=given, **self.options) as state:
            train(state, loader, seen, stop)
        if run_dir.exists() and Run(run_dir).checkpoints():
            self.before.append(newest(run_dir))
        return seen


def newest(run_dir: Path) -> Path:
    return Run(run_dir).checkpoints()[-1].path


def train(state: RunState, loader: DataLoader[Any], seen: Batches, stop: Any) -> None:
    for epoch in state.epochs(EPOCHS):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        left = state.batches()
        length = state.batch
        if stop == (epoch, 0):
            return state.save()
        before = state.batch
        for batch in left:
            seen[epoch].append(batch.tolist())
            length = len(left)
            if stop in (state.batch + 1 - before, (epoch, state.batch + 1), (epoch, state.batch - length)):
                return state.save()
        assert state.batch == length
        if stop == (epoch, "end"):
            return state.save()
    return None


def indices(batches: Any) -> list[int]:
    return [int(sample[0]) for batch in batches for sample in batch]


def together(ranks: list[Batches], epoch: int = 0) -> list[int]:
    """Return the samples that all ranks had, in the order of the epoch."""
    rows = zip(*(indices(of_rank[epoch]) for of_rank in ranks), strict=True)
    return [index for row in rows for index in row]


def order_of(epoch: int, samples: int = SAMPLES) -> list[int]:
    whole = DistributedSampler(range(samples), 1, 0, seed=7)  # type: ignore[arg-type]
    whole.set_epoch(epoch)
    return list(whole)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.heavy
def test_an_epoch_continues_over_4_and_2_and_3_and_4_ranks(
    tmp_path: Path, workers: int, drop_last: bool
) -> None:
    script = Script(tmp_path, batch_size=4, num_workers=workers, drop_last=drop_last)
    legs = [script.leg(4, 2), script.leg(2, 3), script.leg(3, 1), script.leg(4)]
    seen = [index for leg in legs for index in together(leg)]
    order = order_of(0)

    # 32 + 24 + 12 samples, and 35 for four ranks: nine each, of which a whole batch more or not.
    assert [len(together(leg)) for leg in legs] == [32, 24, 12, 32 if drop_last else 36]
    assert seen == (order[:100] if drop_last else order + order[:1])
    assert together(legs[-1], 1) == (order_of(1)[:96] if drop_last else order_of(1) + order_of(1)[:1])


@pytest.mark.parametrize("drops", [False, True])
def test_a_rest_for_few_ranks_is_padded_or_dropped_as_the_sampler_says(tmp_path: Path, drops: bool) -> None:
    script = Script(tmp_path, drops=drops, batch_size=5)
    seen = [*together(script.leg(2, 4)), *together(script.leg(8))]

    assert seen == (order_of(0)[:96] if drops else order_of(0) + order_of(0)[:1])


def own_generator(ranks: int, rank: int, **how: Any) -> DataLoader[Any]:
    return distributed(ranks, rank, generator=torch.Generator().manual_seed(random.getrandbits(31)), **how)


def generator_of_the_sampler(ranks: int, rank: int, **how: Any) -> DataLoader[Any]:
    if ranks > 1:
        return distributed(ranks, rank, **how)
    own = torch.Generator().manual_seed(random.getrandbits(31))
    return DataLoader(Images(), sampler=RandomSampler(Images(), generator=own), **how)


def global_generator(ranks: int, rank: int, **how: Any) -> DataLoader[Any]:
    if ranks > 1:
        return distributed(ranks, rank, **how)
    return DataLoader(Images(), sampler=RandomSampler(Images(), generator=torch.default_generator), **how)


def generator_if_alone(ranks: int, rank: int, **how: Any) -> DataLoader[Any]:
    return (own_generator if ranks == 1 else distributed)(ranks, rank, **how)


def in_order(ranks: int, rank: int, **how: Any) -> DataLoader[Any]:
    sampler = DistributedSampler(Images(), ranks, rank, shuffle=False) if ranks > 1 else None
    return DataLoader(Images(), sampler=sampler, **how)


KINDS: dict[str, Make] = {
    "shuffled": distributed,
    "own generator": own_generator,
    "generator if alone": generator_if_alone,
    "generator of the sampler": generator_of_the_sampler,
    "global generator": global_generator,
    "in order": in_order,
    "always distributed": always,
    "torchdata": torchdatas,
}


@pytest.mark.quick(16)
@pytest.mark.parametrize(
    ("kind", "workers"),
    [*((kind, 0) for kind in KINDS), ("shuffled", 2), ("own generator", 2), ("torchdata", 2)],
)
def test_one_rank_continues_as_two_and_as_one_again(tmp_path: Path, kind: str, workers: int) -> None:
    alone = Script(tmp_path / "alone", KINDS[kind], batch_size=4, num_workers=workers)
    expected = [indices(epoch) for epoch in alone.leg(1)[0]]
    script = Script(tmp_path / "script", KINDS[kind], batch_size=4, num_workers=workers)

    legs = [script.leg(1, 5), script.leg(2, 4), script.leg(2, 2), script.leg(1, 3), script.leg(1)]

    assert [index for leg in legs for index in together(leg)] == expected[0]
    # Two ranks had no generator that could have been kept
    assert kind == "generator if alone" or together(legs[-1], 1) == expected[1]


@pytest.mark.parametrize("stop", [3, (0, "end")])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick(6)
def test_two_ranks_continue_as_one(tmp_path: Path, kind: str, stop: Any) -> None:
    script = Script(tmp_path, KINDS[kind], batch_size=4)
    legs = [script.leg(2, stop), script.leg(1)]

    for epoch in range(EPOCHS):
        assert {i for leg in legs for i in together(leg, epoch)} == {*range(SAMPLES)}
        assert sum(len(together(leg, epoch)) for leg in legs) <= SAMPLES + 1


def test_one_rank_may_have_a_distributed_sampler_or_none(tmp_path: Path) -> None:
    expected = Script(tmp_path / "alone", batch_size=4).leg(1)
    script = Script(tmp_path / "script", batch_size=4)
    first = script.leg(1, 3)
    script.make = always
    second = script.leg(1, 2)
    script.make = distributed
    legs = [first, second, script.leg(1, 4), script.leg(1)]

    assert [batch for leg in legs for batch in leg[0][0]] == expected[0][0]


def test_workers_that_persist_are_let_go_after_a_break(tmp_path: Path) -> None:
    given: Any = "never"
    for ranks in (3, 2):
        loader = distributed(ranks, 0, batch_size=4, num_workers=1, persistent_workers=True)
        with RunState.load(tmp_path / f"{ranks}", loader=loader, resume=given) as state:
            for epoch in state.epochs(3):
                loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
                for batch in state.batches():
                    assert indices([batch.tolist()]) == order_of(epoch)[: 4 * ranks : ranks]
                    break
                if epoch == 1:
                    state.save()
                    break
        given = given if ranks == 2 else newest(tmp_path / f"{ranks}")


@pytest.mark.parametrize("persists", [False, True])
@pytest.mark.parametrize("stop", [(0, -1), (0, "end"), (1, 0), (1, 1), (1, -1)])
@pytest.mark.quick(10)
def test_the_number_may_change_wherever_the_run_stops(tmp_path: Path, stop: Any, persists: bool) -> None:
    script = Script(tmp_path, batch_size=4, num_workers=1, persistent_workers=persists)
    legs = [script.leg(4, stop), script.leg(3)]

    for epoch in range(EPOCHS):
        assert Counter({*[i for leg in legs for i in together(leg, epoch)]}) == Counter(range(SAMPLES))
        assert sum(len(together(leg, epoch)) for leg in legs) <= SAMPLES + 3


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.heavy
def test_after_a_change_a_run_stopped_repeatedly_matches_a_whole_one(
    tmp_path: Path, workers: int, ranks: int
) -> None:
    def changed(path: Path, stops: Sequence[Any]) -> list[Batches]:
        how = {"batch_size": 3, "num_workers": workers, "persistent_workers": bool(workers)}
        script = Script(path, lambda *who, **more: distributed(*who, Images(61, noise), **more), **how)
        script.leg(4, 2)
        seen: list[Batches] = [[[] for _ in range(EPOCHS)] for _ in range(ranks)]
        for stop in stops:
            for rank, of_rank in enumerate(script.leg(ranks, stop)):
                for epoch in range(EPOCHS):
                    seen[rank][epoch] += of_rank[epoch]
        return seen

    expected = changed(tmp_path / "one", [None])

    # The first of them saves before it has trained anything
    stops = [(0, 0), 1, 2, (0, -1), (0, "end"), (1, 2), (1, -1), None]
    assert changed(tmp_path / "many", stops) == expected


@pytest.mark.heavy
def test_a_loop_saved_before_its_first_batch_continues_with_its_numbers(
    tmp_path: Path,
) -> None:
    how = {"batch_size": 3, "num_workers": 2}
    script = Script(tmp_path, lambda *who, **more: distributed(*who, Images(61, noise), **more), **how)
    script.leg(4, 2)
    start = script.before
    expected = script.leg(2)
    loaders = [script.make(2, rank, **how) for rank in range(2)]
    for rank, loader in enumerate(loaders):
        with RunState.load(tmp_path / f"waiting {rank}", loader=loader, resume=start[rank]) as state:
            for _ in state.epochs(1):
                waiting = iter(state.batches())
                state.save()
                break
            del waiting
    script.before = [newest(tmp_path / f"waiting {rank}") for rank in range(2)]

    assert script.leg(2) == expected


class OwnNoise:
    """Generators of one's own, of every kind, and the global ones."""

    def __init__(self, seed: int) -> None:
        self.kinds = [np.random.default_rng(seed), random.Random(seed), np.random.RandomState(seed)]
        self.torchs = torch.Generator().manual_seed(seed)

    def __call__(self) -> list[float]:
        own = [kind.random() for kind in self.kinds]
        return [*own, torch.rand((), generator=self.torchs).item(), *noise()]


def loud(ranks: int, rank: int, **how: Any) -> DataLoader[Any]:
    return distributed(ranks, rank, Images(61, OwnNoise(100 * rank)), **how)


@pytest.mark.heavy
def test_workers_of_more_ranks_draw_no_number_twice_also_resumed(tmp_path: Path) -> None:
    script = Script(tmp_path, loud, batch_size=3, num_workers=1)
    first = [*script.leg(2, 3), *script.leg(4, 1), *script.leg(2, 1)]
    before, rest = script.before, []
    for _ in range(2):
        script.before = before
        rest.append(script.leg(4))
    samples = [sample for of_rank in first + rest[0] for batch in of_rank[0] for sample in batch]
    drawn = [number for sample in samples for number in sample[1:]]

    assert rest[0] == rest[1]
    assert len(samples) == 61 + 3
    assert len(set(drawn)) == len(drawn)


def test_what_was_drawn_for_batches_loaded_ahead_is_not_drawn_again(tmp_path: Path) -> None:
    drawn: list[float] = []

    def record() -> list[float]:
        drawn.append(random.random())
        return []

    given: Any = "never"
    for ranks in (1, 2):
        loader = distributed(ranks, 0, Images(61, record), batch_size=3)
        with RunState.load(tmp_path / f"{ranks}", loader=loader, resume=given) as state:
            for _ in state.batches(through=three_ahead):
                if state.batch == 2:
                    state.save()
                    break
        given = given if ranks == 2 else newest(tmp_path / f"{ranks}")

    assert len(drawn) > 24
    assert len(set(drawn)) == len(drawn)


def three_ahead(batches: Iterator[Any]) -> Iterator[Any]:
    """Load three batches before they are asked for."""
    kept: deque[Any] = deque(islice(batches, 3))
    while kept:
        kept.extend(islice(batches, 1))
        yield kept.popleft()


# What else changes with the number, and what stays.


@pytest.mark.heavy
def test_with_the_same_global_batch_every_step_has_the_same_samples(tmp_path: Path) -> None:
    script = Script(tmp_path / "a")
    expected = script.leg(4, batch_size=4)
    script = Script(tmp_path / "b")
    legs = [script.leg(4, 2, batch_size=4), script.leg(2, 2, batch_size=8), script.leg(1, batch_size=16)]

    def steps(leg: list[Batches]) -> list[list[int]]:
        return [sorted(indices(step)) for step in zip(*(of_rank[0] for of_rank in leg), strict=True)]

    assert [step for leg in legs for step in steps(leg)][:6] == steps(expected)[:6]
    assert [len(step) for leg in legs for step in steps(leg)] == [16] * 6 + [7]


@pytest.mark.heavy
def test_a_batch_size_that_changes_alone_has_to_be_allowed(tmp_path: Path) -> None:
    script = Script(tmp_path)
    first, before = script.leg(2, 3, batch_size=4), script.before
    with pytest.raises(StateMismatch, match=r"loader\.batch_size: 4 in the checkpoint, 8 in the code"):
        script.leg(2, batch_size=8)
    script.before, script.options = before, {"allow": ["loader.batch_size"]}
    second, third = script.leg(2, 2, batch_size=8), script.leg(2, batch_size=8)

    assert [i for leg in (first, second, third) for i in together(leg)] == order_of(0) + order_of(0)[:1]


def test_samples_that_were_added_are_taken_where_that_is_allowed(
    tmp_path: Path,
) -> None:
    script = Script(tmp_path, lambda *who, n, **how: distributed(*who, Images(n), **how), batch_size=4)
    script.leg(2, 3, n=50)
    script.options = {"allow": ["loader.dataset_length"]}
    legs = [script.leg(2, 2, n=61), script.leg(2, n=61)]
    order = order_of(0, 61)

    assert [index for leg in legs for index in together(leg)] == [*order[24:], order[0]]


def augmented(ranks: int, rank: int, **how: Any) -> DataLoader[Any]:
    return distributed(ranks, rank, Images(SAMPLES, noise), **how)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.heavy
def test_with_sample_seeds_a_sample_is_the_same_on_whichever_rank(tmp_path: Path, workers: int) -> None:
    def samples(path: str, *stops: tuple[int, Any]) -> list[list[float]]:
        script = Script(tmp_path / path, augmented, batch_size=2, num_workers=workers)
        script.options = {"sample_seeds": True}
        legs = [script.leg(ranks, stop) for ranks, stop in stops]
        rows = [zip(*(chain(*of_rank[0]) for of_rank in leg), strict=True) for leg in legs]
        return [sample for leg in rows for row in leg for sample in row]

    expected = samples("alone", (1, 5), (1, None))
    found = samples("changing", (1, 5), (3, 4), (3, 3), (4, 1), (2, None))

    assert found[:SAMPLES] == expected
    assert len({tuple(sample[1:]) for sample in found}) == len(found) == SAMPLES + 1


class Own(DistributedSampler[int]):
    """A sampler that may do anything."""


@pytest.mark.parametrize("sampler", [DistributedSampler, Own])
def test_two_ranks_do_not_seed_their_samples_alike(tmp_path: Path, sampler: Any) -> None:
    def made(ranks: int, rank: int) -> DataLoader[Any]:
        images = Images(SAMPLES, noise)
        return DataLoader(images, 4, sampler=sampler(images, ranks, rank))

    script = Script(tmp_path, made)
    script.options = {"sample_seeds": True}
    script.leg(1, (0, "end"))
    both = script.leg(2)
    drawn = [sample[1] for of_rank in both for batch in of_rank[1] for sample in batch]

    assert len(set(drawn)) == len(drawn) == SAMPLES + 1


def test_the_counters_and_the_length_continue_from_the_batches_done_before(tmp_path: Path) -> None:
    script = Script(tmp_path, batch_size=4)
    script.leg(4, 3)
    found = []
    for size, drop_last in ((4, False), (5, True)):
        loader = distributed(2, 1, batch_size=size, drop_last=drop_last)
        run_dir = tmp_path / f"{size}"
        allow = ["loader.drop_last"]
        with RunState.load(run_dir, loader=loader, resume=script.before[1], allow=allow) as state:
            for _ in state.epochs(1):
                loader.sampler.set_epoch(0)  # type: ignore[attr-defined]
                left = state.batches()
                counted = [len(left), *((state.batch, len(batch)) for batch in left)]
                found.append([*counted, len(state.batches())])

    # 48 of 103 are done, so each of two ranks has 28 left
    assert found[0] == [10, *((number, 4) for number in range(3, 10)), 10]
    assert found[1] == [8, *((number, 5) for number in range(3, 8)), 8]


@pytest.mark.quick(3)
@pytest.mark.filterwarnings("default:.* has changed since checkpoint")
@pytest.mark.parametrize(
    ("how", "options", "effect"),
    [
        ({"num_workers": 1}, {}, "dealt out again$"),
        ({}, {}, "dealt out again; what is drawn at random while loading is not what it would be"),
        ({}, {"sample_seeds": True}, "dealt out again$"),
    ],
)
def test_the_change_is_reported_with_what_it_does(
    tmp_path: Path, how: Any, options: Any, effect: str
) -> None:
    script = Script(tmp_path, **how)
    script.options = options
    script.leg(1, 3)

    text = r"loader.sampler +RandomSampler +-> DistributedSampler(.|\n)*loader.shards +1 +-> 2 .*"
    with pytest.warns(ResumableWarning, match=rf"(?m){text}{effect}"):
        script.leg(2)


# What is refused.


def on(sampler: Any, **how: Any) -> DataLoader[Any]:
    return DataLoader(Images(), sampler=sampler, batch_size=4, **how)


def in_batches(ranks: int, rank: int, **how: Any) -> DataLoader[Any]:
    dealt = DistributedSampler(Images(), ranks, rank)
    return DataLoader(Images(), batch_sampler=BatchSampler(dealt, 4, False))


def weights(ranks: int, rank: int) -> DataLoader[Any]:
    if ranks > 1:
        return distributed(ranks, rank, batch_size=4)
    return on(WeightedRandomSampler(torch.ones(SAMPLES), SAMPLES))


def by_size(ranks: int, rank: int) -> DataLoader[Any]:
    return distributed(ranks, rank, Images(SAMPLES + ranks), batch_size=4)


REFUSED: dict[str, tuple[Make, str]] = {
    "subclass": (lambda *who: on(Own(Images(), *who)), "in the checkpoint its sampler is a Own"),
    "own batches": (in_batches, "its batches come from a BatchSampler of the script's own"),
    "weights": (weights, "sampler is a WeightedRandomSampler"),
    "length": (by_size, "it had 10. samples, and has 10."),
    "shuffle": (
        lambda ranks, rank: on(DistributedSampler(Images(), ranks, rank, shuffle=ranks > 1)),
        "its order was (not )?shuffled, and is (not )?shuffled",
    ),
    "replacement": (
        lambda ranks, rank: on(
            DistributedSampler(Images(), ranks, rank)
            if ranks > 1
            else RandomSampler(Images(), replacement=True)
        ),
        "its sampler draws with replacement",
    ),
    "more than all": (
        lambda ranks, rank: on(
            DistributedSampler(Images(), ranks, rank)
            if ranks > 1
            else RandomSampler(Images(), num_samples=200)
        ),
        "its sampler draws 200 samples of 103",
    ),
    "any order": (
        lambda *who: distributed(*who, num_workers=1, in_order=False, batch_size=4),
        r"came in any order \(in_order=False\)",
    ),
}


CHANGES = [(name, *change) for name in REFUSED for change in ((1, 2), (2, 1))]
ALWAYS_SO = [(name, 3, 2) for name in ("subclass", "own batches", "length", "any order")]


@pytest.mark.quick(10)
@pytest.mark.filterwarnings("ignore:in_order=False")
@pytest.mark.parametrize(("name", "before", "after"), CHANGES + ALWAYS_SO)
def test_what_cannot_be_dealt_out_again_is_a_mismatch_that_says_why(
    tmp_path: Path, name: str, before: int, after: int
) -> None:
    make, why = REFUSED[name]
    script = Script(tmp_path, make)
    script.leg(before, 3)
    start = script.before

    with pytest.raises(StateMismatch, match=why) as caught:
        script.leg(after)
    assert f"loader: shards {before} in the checkpoint, {after} in the code, in mid-epoch" in str(
        caught.value
    )
    assert "allow=['loader'" in caught.value.fix
    script.before, script.options = start, {"allow": ["loader"]}
    with pytest.warns(ResumableWarning, match="loader.shards +"):
        anew = script.leg(after)
    assert len(together(anew)) >= SAMPLES


def test_another_sampler_on_as_many_ranks_is_reported_with_what_differs(tmp_path: Path) -> None:
    script = Script(tmp_path, batch_size=4)
    script.leg(1, 3)
    script.make = in_order

    with pytest.raises(
        StateMismatch, match=r"loader\.sampler: .* its order was shuffled, and is not shuffled"
    ):
        script.leg(1)


@pytest.mark.parametrize(("seed", "epoch"), [(8, 0), (7, 1)])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.quick(4)
def test_another_seed_or_epoch_of_the_sampler_is_a_named_mismatch(
    tmp_path: Path, seed: int, epoch: int, workers: int
) -> None:
    script = Script(tmp_path, batch_size=4, num_workers=workers)
    script.leg(3, 2)
    script.leg(2, 2)
    for ranks in (2, 3):
        sampler = DistributedSampler(Images(), ranks, 0, seed=seed)
        loader = DataLoader(Images(), 4, sampler=sampler, num_workers=workers)
        given = script.before[0]
        with RunState.load(tmp_path / f"again {ranks}", loader=loader, resume=given) as state:
            sampler.set_epoch(epoch)
            text = f"drawn with seed 7 for epoch 0, and its sampler has seed {seed} and epoch {epoch}"
            with pytest.raises(StateMismatch, match=text):
                next(iter(state.batches()))


class Slow(Images):
    """Samples of which the first worker's come late."""

    def __getitem__(self, index: int) -> torch.Tensor:
        info = get_worker_info()
        if info and info.id == 0:
            sum(range(3_000_000))
        return super().__getitem__(index)


@pytest.mark.filterwarnings("ignore:in_order=False")
def test_batches_that_overtook_others_leave_no_rest_to_rebatch(tmp_path: Path) -> None:
    def loader(size: int) -> DataLoader[Any]:
        return DataLoader(Slow(), size, num_workers=2, in_order=False)

    with RunState.load(tmp_path / "a", loader=loader(4)) as state:
        for batch in state.batches():
            if batch[0, 0] == 12:
                state.save()
                break

    with pytest.raises(StateMismatch, match=r"in any order .*other batches cannot be made"):
        RunState.load(tmp_path / "a", loader=loader(5), allow=["loader.batch_size"])


def test_a_plain_loader_on_each_rank_continues_as_it_did(tmp_path: Path) -> None:
    def plain(ranks: int, rank: int, **how: Any) -> DataLoader[Any]:
        return DataLoader(Images(), 4, shuffle=True)

    expected = Script(tmp_path / "one", plain).leg(2)
    script = Script(tmp_path / "two", plain)
    legs = [script.leg(2, 3), script.leg(2)]

    assert [[*legs[0][rank][0], *legs[1][rank][0]] for rank in range(2)] == [of[0] for of in expected]


class Unsized:
    """Samples without a number."""

    def __getitem__(self, index: int) -> int:
        return index


def test_what_has_no_length_has_no_order_to_deal_out() -> None:
    loader = DataLoader(Unsized(), sampler=SequentialSampler(Unsized()))  # type: ignore[arg-type,type-var]

    assert base(loader) == "its samples have no number"
    assert obstacle({"samples": 3}, loader) == "in the code its samples have no number"


# What a loader tells.


def test_a_subset_is_dealt_out_by_its_own_indices(tmp_path: Path) -> None:
    make = partial(_with_dataset, lambda: Subset(Images(), range(20, 41)))
    script = Script(tmp_path, make, batch_size=2)
    seen = [index for leg in (script.leg(2, 3), script.leg(3)) for index in together(leg)]

    assert seen == [20 + index for index in order_of(0, 21)]


def _with_dataset(dataset: Callable[[], Any], ranks: int, rank: int, **how: Any) -> DataLoader[Any]:
    return distributed(ranks, rank, dataset(), **how)
