"""The order of an epoch is drawn again as it was, and what was trained is left out unasked."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from resumable import StateMismatch
from resumable.loaders.workers.order import Generators, Order, Pulled

SAMPLES, BATCH = 26, 4


class Numbers(Dataset[int]):
    """Samples that are never to be loaded here."""

    def __init__(self, length: int = SAMPLES) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        raise AssertionError("a sample was loaded")


class Endless(IterableDataset[int]):
    """A stream."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("the stream was begun")


class Made:
    """The order of a loader with a sampler; one that yields batches has no batch size."""

    def __init__(
        self,
        sampler: Any = None,
        batch_size: int | None = BATCH,
        data: Any = None,
        single: bool = False,
        **how: Any,
    ) -> None:
        if batch_size is None and sampler is not None and not single:
            how, sampler = {**how, "batch_sampler": sampler}, None
        else:
            how["batch_size"] = batch_size
        self.loader = DataLoader(data or Numbers(), sampler=sampler, **how)
        self.generators = Generators(self.loader, {})
        self.order = Order(self.loader, self.generators)
        self.batches: Iterator[Any] = iter(())
        self.last: Pulled | None = None

    def begin(self) -> None:
        """Begin an epoch."""
        self.order.begin()
        self.batches = iter(self.order)
        # As torch draws a seed for its workers there.
        draw()

    def go_on(self, saved: Any) -> None:
        """Go on with an epoch, as a training does whose generators are those at the save."""
        self.generators.write(saved["live"])
        self.order.go_on(saved, self.generators.read())
        self.batches = iter(self.order)
        draw(), draw()

    def train(self, count: int, ahead: int = 0) -> list[Any]:
        """Return the indices of that many batches; that many more are asked for before they are trained."""
        trained: list[Any] = []
        while len(trained) < count:
            while len(self.order.on_its_way) <= ahead and next(self.batches, None) is not None:
                pass
            if (pulled := self.order.came_out()) is None:
                break
            self.last = pulled
            trained.append(plain(pulled.indices))
            draw()
        return trained

    def rest(self, ahead: int) -> Any:
        """Return the batches that are left, and what all generators are then."""
        batches, states = self.train(99, ahead), self.generators.read()["generators"]
        return batches, {path: plain(state) for path, state in states.items()}, draw()

    def saved(self, is_left: bool = False) -> Any:
        """Return what a checkpoint has of it."""
        order = self.order.collect(self.last, list(self.order.on_its_way))
        return {**order, "is_left": is_left, "live": self.generators.read()}


def draw() -> list[float]:
    """Draw as a training does between two batches."""
    return [random.random(), np.random.rand(), torch.rand(()).item()]


def plain(indices: Any) -> Any:
    return indices.tolist() if isinstance(indices, (np.ndarray, torch.Tensor)) else indices


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


class LiveBatches(Sampler[list[int]]):
    """Batches that are drawn one at a time, from all three libraries, and from what is left."""

    def __iter__(self) -> Iterator[list[int]]:
        left = [*range(SAMPLES)]
        while left:
            size = random.randint(1, 5)
            np.random.shuffle(left)
            yield [left.pop(int(torch.randint(len(left), ()))) for _ in range(min(size, len(left)))]


class AsYielded(Sampler[Any]):
    """Batches in a kind of container."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[Any]:
        order = np.random.permutation(SAMPLES)
        yield from (self.kind(order[at : at + BATCH]) for at in range(0, SAMPLES, BATCH))


class Pairs(Sampler[Any]):
    """Samples that are named by a pair."""

    def __iter__(self) -> Iterator[Any]:
        yield from ((index, f"view {random.random()}") for index in np.random.permutation(SAMPLES))


class Counting(Sampler[int]):
    """An order that depends on how often it was drawn; its state is the very dict that it counts in."""

    def __init__(self) -> None:
        self.state = {"passes": random.getrandbits(8)}

    def __iter__(self) -> Iterator[int]:
        self.state["passes"] += 1
        yield from ((index * 7 + self.state["passes"]) % SAMPLES for index in range(SAMPLES))

    def __len__(self) -> int:
        return SAMPLES

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = dict(state)


class Eager(Sampler[int]):
    """An order that is drawn as soon as it is asked for."""

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(SAMPLES).tolist())


class DrawsAtItsEnd(Chunks):
    """An order that draws once more when all of it was asked for."""

    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()
        random.random()


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(random.getrandbits(31))


ORDERS: dict[str, Any] = {
    "in order": lambda: Made(),
    "shuffled": lambda: Made(shuffle=True),
    "shuffled, generator": lambda: Made(shuffle=True, generator=generator()),
    "global generator": lambda: Made(
        RandomSampler(Numbers(), replacement=True, num_samples=70, generator=torch.default_generator)
    ),
    "more than all": lambda: Made(RandomSampler(Numbers(), num_samples=40, generator=generator())),
    "subset": lambda: Made(SubsetRandomSampler(range(3, 20))),
    "weighted": lambda: Made(WeightedRandomSampler(range(1, SAMPLES + 1), SAMPLES)),
    "chunks": lambda: Made(Chunks()),
    "long chunks": lambda: Made(Chunks(3 * BATCH)),
    "chunks of torch's batches": lambda: Made(BatchSampler(Chunks(3 * BATCH), BATCH, False), None),
    "live": lambda: Made(LiveBatches(), None),
    "one by one": lambda: Made(batch_size=None, shuffle=True),
    "drop_last": lambda: Made(shuffle=True, drop_last=True),
    "arrays": lambda: Made(AsYielded(np.array), None),
    "tensors": lambda: Made(AsYielded(torch.as_tensor), None),
    "tuples": lambda: Made(AsYielded(tuple), None),
    "numpy numbers": lambda: Made(AsYielded(list), None),
    "pairs": lambda: Made(Pairs()),
    "draws at its end": lambda: Made(DrawsAtItsEnd(), None, single=True),
    "eager": lambda: Made(Eager(), None, single=True),
    "counting": lambda: Made(Counting()),
}


def begin(seed: int) -> None:
    """Begin another process: its generators are anywhere."""
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)


@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("name", ORDERS)
def test_what_is_left_of_an_epoch_comes_as_if_it_was_never_stopped(name: str, ahead: int) -> None:
    begin(1)
    never_stopped = ORDERS[name]()
    never_stopped.begin()
    expected = never_stopped.rest(ahead)
    begin(1)
    made = ORDERS[name]()
    made.begin()
    trained = made.train(1, ahead)
    for leg in range(2, len(expected[0])):
        saved = made.saved()
        begin(leg)
        made = ORDERS[name]()
        made.go_on(saved)
        trained += made.train(1, ahead)
    left, *generators = made.rest(ahead)

    assert (trained + left, *generators) == expected


def stopped(made: Made, count: int = 2, ahead: int = 0) -> Any:
    """Return what is saved after that many batches of an epoch."""
    begin(1), made.begin(), made.train(count, ahead)
    return made.saved()


@pytest.mark.parametrize(
    ("then", "now", "problem"),
    [
        (Made(AsYielded(list), None), Made(AsYielded(sorted), None), "batch 2 is of other samples"),
        (Made(), Made(data=Numbers(7)), "has 2 batches now, and 4 were drawn"),
        (Made(Chunks()), Made(SubsetRandomSampler(range(SAMPLES))), "batch 2 is of other samples"),
    ],
)
def test_another_order_is_a_mismatch(then: Made, now: Made, problem: str) -> None:
    saved = stopped(then, ahead=2)

    for _ in range(2):
        now.go_on(saved)
        with pytest.raises(StateMismatch, match=problem):
            next(now.batches)


def test_numbers_of_numpy_and_of_python_are_the_same_order() -> None:
    expected = Made(AsYielded(list), None)
    saved, left = stopped(expected, ahead=2), expected.train(9, 2)

    for kind in (np.ndarray.tolist, tuple, np.array, torch.as_tensor, lambda a: list(map(torch.tensor, a))):
        made = Made(AsYielded(kind), None)
        made.go_on(saved)
        assert [list(map(int, batch)) for batch in made.train(9, 2)] == left


class Asked(Sampler[int]):
    """A long order, which counts how often it is asked, and does not know its length."""

    asked = 0

    def __iter__(self) -> Iterator[int]:
        for index in range(1_000_000):
            self.asked += 1
            yield index


def test_a_million_samples_are_skipped_by_asking_the_sampler_alone() -> None:
    saved = stopped(Made(Asked(), 100, Numbers(1_000_000)), count=2)
    saved |= {"pulled": 9000, "fingerprint": None}
    sampler = Asked()
    made = Made(sampler, 100, Numbers(1_000_000))
    made.go_on(saved)

    assert made.train(1) == [[*range(900_000, 900_100)]]
    assert sampler.asked == 900_100


def test_what_is_skipped_one_by_one_is_one_sample_each_however_long_its_name_is() -> None:
    def made() -> Made:
        return Made([f"sample {index}" for index in range(SAMPLES)], None, single=True)

    saved = stopped(made(), 5)
    again = made()
    again.go_on(saved)
    again.train(1)

    assert again.last == Pulled(5, 5, 1, "sample 5")


def other_size(saved: Any, batches: int, samples: int) -> Any:
    """Return what is saved, for batches of another size from there on."""
    new = {"from": [batches, samples], "pulled": batches, "on_its_way": [], "fingerprint": None}
    return {**saved, **new, "has_last": False}


def test_batches_of_another_size_twice_in_a_row_take_every_sample_once_and_in_order() -> None:
    begin(1)
    whole = Made(shuffle=True, batch_size=1)
    whole.begin()
    expected = [index for batch in whole.train(99) for index in batch]
    saved, trained = None, []
    for batches, size in enumerate((4, 6, 3)):
        begin(1 if saved is None else size)
        made = Made(shuffle=True, batch_size=size)
        made.begin() if saved is None else made.go_on(other_size(saved, batches, len(trained)))
        trained += made.train(1)[0]
        saved = made.saved()
    again = Made(shuffle=True, batch_size=3)
    again.go_on(saved)

    trained += [index for batch in again.train(99) for index in batch]

    assert trained == expected
    assert again.last is not None
    assert (again.last.number, again.last.first + again.last.samples) == (7, SAMPLES)


def test_what_stays_of_own_batches_when_something_else_changed_is_skipped_by_the_batch() -> None:
    made = Made(LiveBatches(), None)
    begin(1), made.begin()
    trained = made.train(2)
    saved = {**made.saved(), "drawn_late": {}}
    fixed = BatchSampler(range(SAMPLES), 5, False)
    again = Made(fixed, None)
    again.go_on(other_size(saved, 2, sum(map(len, trained))))

    assert again.train(1) == [[10, 11, 12, 13, 14]]


def test_single_samples_of_another_loader_are_skipped_by_the_sample() -> None:
    saved = stopped(Made(), 2)
    made = Made(batch_size=None)
    made.go_on(other_size(saved, 2, 2 * BATCH))

    assert made.train(2) == [8, 9]


def test_an_order_that_is_drawn_late_has_no_batches_of_another_size() -> None:
    saved = stopped(Made(Chunks(BATCH)), 3)
    made = Made(Chunks(BATCH), 5)
    made.go_on(other_size(saved, 3, 3 * BATCH))

    with pytest.raises(StateMismatch, match="draws as it runs"):
        next(made.batches)


def test_only_what_comes_late_is_logged_and_only_what_is_new_of_it() -> None:
    whole, pieces = Made(shuffle=True), Made(Chunks(3 * BATCH))
    stopped(whole, 7), stopped(pieces, 7)
    log = pieces.saved()["drawn_late"]

    assert whole.saved()["drawn_late"] == {}
    assert {number: states.keys() for number, states in log.items()} == {3: {"python"}, 6: {"python"}}
    assert ("words" in log[3]["python"], "words" in log[6]["python"]) == (True, False)


def test_batches_that_come_out_in_another_order_are_taken_by_their_numbers() -> None:
    made = Made()
    made.begin()
    list(zip(range(5), made.batches, strict=False))
    out = [made.order.came_out(number) for number in (2, 0)]
    saved = made.order.collect(out[-1], list(made.order.on_its_way))
    made.order.go_on({**saved, "is_left": False}, made.generators.read())
    left = list(made.order)

    assert [pulled and pulled.number for pulled in out] == [2, 0]
    assert saved["on_its_way"] == [1, 3, 4]
    assert left == [[*range(at, min(at + 4, SAMPLES))] for at in (4, 12, 16, 20, 24)]
    assert made.order.came_out(77) is None


def test_what_was_on_its_way_is_all_that_is_left_of_an_epoch_that_was_left() -> None:
    made = Made(shuffle=True)
    begin(1), made.begin(), made.train(2, 3)
    expected = [pulled.indices for pulled in made.order.on_its_way]
    saved = made.saved(is_left=True)

    for leg in range(2):
        begin(leg)
        again = Made(shuffle=True)
        again.go_on(saved)
        assert list(again.batches) == expected
        assert again.saved()["live"]["random"]["torch"].equal(saved["live"]["random"]["torch"])


def test_a_stream_has_no_order_but_a_number_of_batches_on_their_way() -> None:
    made = Made(data=Endless())
    made.begin()
    made.train(3, 2)
    saved = made.saved()
    again = Made(data=Endless())
    again.order.go_on(saved)
    again.batches = iter(again.order)
    trained = again.train(3, 2)

    assert (saved["drawn"], saved["fingerprint"], saved["on_its_way"]) == (None, None, [3, 4])
    assert trained == [[None] * BATCH] * 3
    assert again.saved()["on_its_way"] == [6, 7]


@pytest.mark.parametrize(
    ("made", "first", "second"),
    [
        (Made(), [(7, 0, 0), (7, 1, 1), (7, 2, 2), (7, 3, 3)], (7, 4, 4)),
        (Made(batch_size=None), (7, 0, 0), 7),
    ],
)
def test_a_sample_that_is_seeded_carries_its_place(made: Made, first: Any, second: Any) -> None:
    made.begin()
    made.order.seed_samples(7)

    assert next(made.batches) == first
    assert next(made.batches)[0] == second


def test_the_training_generators_are_kept_for_a_batch_that_is_seeded_and_for_no_other() -> None:
    loader = DataLoader(Numbers(6), batch_size=4)
    order = Order(loader, Generators(loader, {}), keeps_draws=True)
    order.seed_samples(0)
    kept = [order.kept is not None for _ in order]

    assert kept == [True, True]
    assert order.kept is None


def test_the_length_is_that_of_the_sampler() -> None:
    assert (len(Made().order), len(Made(batch_size=None).order)) == (7, SAMPLES)


def test_the_states_of_samplers_are_those_of_when_the_order_was_drawn() -> None:
    made = Made(Counting())
    before = made.order.states()
    made.begin(), made.train(2)

    assert made.saved()["samplers"] == before
    made.order.load_states([{"passes": 5}])
    assert made.order.states() == [{"passes": 5}]
