"""Loaders that are not torch's own: those that keep their position, and those that keep none."""

from __future__ import annotations

import itertools
import queue
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler as StatefulRandomSampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from resumable import CannotStore, ResumableWarning, RunState, StateMismatch, progress

pytestmark = [
    # What torch says of torchdata, and Python of every worker that is forked while a save is on its way.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
]

EPOCHS, SAMPLES, BATCH = 3, 13, 3
"""Five batches an epoch, the last one short."""

Seen = list[Any]
Stop = tuple[int, int | str]


# One training, which is stopped and continues.


def draw() -> list[float]:
    """Draw from every global generator, as dropout and augmentation do."""
    return [random.random(), np.random.rand(), torch.rand(()).item()]


def seeded(seed: int) -> None:
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)


def uninterrupted(make: Callable[[], Any]) -> Seen:
    """Return what a training sees that loops over the loader itself."""
    seeded(0)
    loader, seen = make(), []
    for epoch in range(EPOCHS):
        for number, batch in enumerate(loader() if callable(loader) else loader, 1):
            seen.append(((epoch, number), batch.tolist(), draw()))
        seen.append(((epoch, "end"), [], draw()))
    return seen


def leg(
    run_dir: Path, make: Callable[[], Any], stop: Stop | None = None, seed: int = 0, **options: Any
) -> Seen:
    """Go on from the newest checkpoint up to a save, and return what the training sees."""
    seeded(seed)
    loader, seen = make(), []
    with RunState.load(run_dir, loader=loader, **options) as state:
        for key, batch in training(state):
            seen.append((key, batch, draw()))
            if key == stop:
                state.save()
                break
    return seen


def training(state: RunState) -> Iterator[tuple[Stop, list[float]]]:
    """Yield what a body sees: each batch, and the end of each epoch."""
    for epoch in state.epochs(EPOCHS):
        for batch in state.batches():
            yield (epoch, state.batch + 1), batch.tolist()
        yield (epoch, "end"), []


def chain(run_dir: Path, make: Callable[[], Any], stops: Iterable[Stop]) -> Seen:
    """Return what a training sees that is stopped again and again; each leg has another seed."""
    legs = enumerate([*stops, None])
    return [event for seed, stop in legs for event in leg(run_dir, make, stop, seed)]


STOPS: list[list[Stop]] = [
    [(0, 1), (0, 2), (0, 4), (1, 3)],
    [(0, 5), (1, 5)],
    [(0, "end"), (1, "end")],
    [(0, "end"), (1, 1), (1, "end"), (2, 4)],
]


# Loaders that keep their own position.


class Images(Dataset[torch.Tensor]):
    """Samples that are told by their index, augmented or not."""

    def __init__(self, is_noisy: bool) -> None:
        self.is_noisy = is_noisy

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, *(draw() if self.is_noisy else [])], dtype=torch.float64)


class Stream(IterableDataset[torch.Tensor]):
    """A stream that knows where it is, and how often it has been read."""

    at, passes = 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        mine = range(info.id, SAMPLES, info.num_workers) if info else range(SAMPLES)
        while self.at < len(mine):
            self.at += 1
            yield torch.tensor([mine[self.at - 1] + 100 * self.passes])
        self.at, self.passes = 0, self.passes + 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.passes = state["at"], state["passes"]


class Shuffled:
    """Batches of an order that is drawn when an epoch begins; its state tells what is left of it."""

    def __init__(self, length: int = SAMPLES) -> None:
        self.length = length
        self.order: list[int] = []

    def __len__(self) -> int:
        return -(-self.length // BATCH)

    def take(self) -> torch.Tensor:
        batch, self.order = self.order[:BATCH], self.order[BATCH:]
        return torch.tensor(batch) + torch.rand(len(batch))

    def rest(self) -> Iterator[torch.Tensor]:
        while self.order:
            yield self.take()

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order = list(state["order"])


class BeginsAnew(Shuffled):
    """It begins again by itself when it has come to its end, as MosaicML's does."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self.order:
            self.order = torch.randperm(self.length).tolist()
        yield from self.rest()


class BeginsAtOnce(Shuffled):
    """It draws the order when it is asked for an iterator, not when that is asked for a batch."""

    epoch = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self.order:
            self.epoch += 1
            self.order = [self.epoch, *torch.randperm(self.length - 1).tolist()]
        return self.rest()

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.epoch = list(state["order"]), state["epoch"]


class StaysAtItsEnd(Shuffled):
    """Once it was put somewhere, it continues from there, at its end too; it draws at every beginning."""

    is_put = False

    def __iter__(self) -> Iterator[torch.Tensor]:
        torch.rand(())
        if not self.is_put:
            self.order = torch.randperm(self.length).tolist()
        self.is_put = False
        return self.rest()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.is_put = True


def torchdatas(dataset: Callable[[], Any], **how: Any) -> Callable[[], Any]:
    def make() -> Any:
        # The generator has another seed in every leg.
        own = {"generator": torch.Generator().manual_seed(random.getrandbits(31))} if "own" in how else {}
        return StatefulDataLoader(dataset(), BATCH, **{k: v for k, v in how.items() if k != "own"}, **own)

    return make


class Counted(Images):
    """Samples that are told by their number in their process too, which a state tells."""

    loaded = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.loaded += 1
        return torch.tensor([index, self.loaded, *draw()], dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return {"loaded": self.loaded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["loaded"]


class Walk(IterableDataset[torch.Tensor]):
    """A stream whose iterator knows where it is, and draws."""

    def __iter__(self) -> WalkIterator:
        info = get_worker_info()
        return WalkIterator(info.id if info else 0, info.num_workers if info else 1)


class WalkIterator(Iterator[torch.Tensor]):
    def __init__(self, at: int, stride: int) -> None:
        self.at, self.stride = at, stride

    def __next__(self) -> torch.Tensor:
        if self.at >= SAMPLES:
            raise StopIteration
        self.at += self.stride
        return torch.tensor([self.at, *draw()], dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Unknown(IterableDataset[torch.Tensor]):
    """A stream that does not know where it is."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(Walk())


def dealt(**how: Any) -> Callable[[], Any]:
    """Return what makes a loader whose sampler counts what it has yielded."""
    return lambda: StatefulDataLoader(
        Images(True), BATCH, sampler=StatefulDistributedSampler(Images(True), 1, 0), **how
    )


def drawn(**how: Any) -> Callable[[], Any]:
    """Return what makes a loader whose sampler draws now and then."""
    return lambda: StatefulDataLoader(
        Images(True), BATCH, sampler=StatefulRandomSampler(Images(True), True, 40), **how
    )


KEPT: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}

KINDS: dict[str, Callable[[], Any]] = {
    "torchdata": torchdatas(lambda: Images(True), shuffle=True),
    "torchdata, own generator": torchdatas(lambda: Images(True), shuffle=True, own=True),
    "torchdata, state, kept workers": torchdatas(lambda: Counted(True), shuffle=True, **KEPT),
    "torchdata, dealt, workers": dealt(num_workers=2),
    "torchdata, drawn, kept workers": drawn(**KEPT),
    "torchdata, walk, workers": torchdatas(Walk, num_workers=2),
    "torchdata, no state, workers": torchdatas(Unknown, num_workers=2),
    "torchdata, stream, kept workers": torchdatas(Stream, **KEPT),
    "begins anew": BeginsAnew,
    "begins at once": BeginsAtOnce,
    "stays at its end": StaysAtItsEnd,
}


@pytest.mark.parametrize(("name", "stops"), [*itertools.product(KINDS, [[], *STOPS])])
@pytest.mark.quick(30)
def test_a_loader_that_keeps_its_position_continues_from_it(
    run_dir: Path, name: str, stops: list[Stop]
) -> None:
    assert chain(run_dir, KINDS[name], stops) == uninterrupted(KINDS[name])


@pytest.mark.parametrize("name", ["torchdata", "begins at once", "stays at its end"])
def test_a_save_before_the_first_batch_changes_nothing(run_dir: Path, name: str) -> None:
    seeded(0)
    with RunState.load(run_dir, loader=KINDS[name]()) as state:
        state.save()
        seen = [(key, batch, draw()) for key, batch in training(state)]

    assert seen == uninterrupted(KINDS[name])


@pytest.mark.filterwarnings("ignore:loader keeps no position")
@pytest.mark.parametrize(
    "name",
    [
        *("torchdata", "begins anew", "begins at once", "stays at its end"),
        *("list", "iterable", "function with a generator"),
    ],
)
@pytest.mark.quick(3)
def test_a_loader_can_go_back_again_and_again(run_dir: Path, name: str) -> None:
    make = {**KINDS, **PLAIN}[name]
    expected = uninterrupted(make)
    seeded(0)
    with RunState.load(run_dir, loader=make(), keep=None) as state:
        state.save()
        for key, _ in training(state):
            draw()
            if key in ((0, 2), (0, "end")):
                state.save()
        for number, place in (3, 6), (2, 2), (1, 0), (2, 2):
            state.restore(number)
            seen = [(key, batch, draw()) for key, batch in training(state)]

            assert seen == expected[place:]


class Sticks:
    """A stream that begins where it was put, in every epoch again: Hugging Face's datasets do so."""

    start: Any = None
    state: Any = None

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.state = {"at": self.start["at"] if self.start else 0}
        while self.state["at"] < SAMPLES:
            at = self.state["at"]
            self.state["at"] += BATCH
            yield torch.arange(at, min(at + BATCH, SAMPLES)) + torch.rand(())

    def state_dict(self) -> Any:
        return self.state and dict(self.state)

    def load_state_dict(self, state: Any) -> None:
        self.start = state


@pytest.mark.parametrize("stops", STOPS)
@pytest.mark.quick(2)
def test_a_loader_that_sticks_to_its_place_begins_the_next_epoch_anyway(
    run_dir: Path, stops: list[Stop]
) -> None:
    assert chain(run_dir, Sticks, stops) == uninterrupted(Sticks)


def left_early(run_dir: Path, make: Callable[[], Any], legs: int) -> list[list[float]]:
    """Train on three batches of each epoch, in as many processes, and return them."""
    seen = []
    for seed, last in enumerate([*range(1, legs), EPOCHS]):
        seeded(seed)
        with RunState.load(run_dir, loader=make()) as state:
            for _ in state.epochs(last):
                for batch in state.batches():
                    if state.batch == 3:
                        break
                    seen.append(batch.tolist())
            state.save()
    return seen


@pytest.mark.parametrize("make", [Sticks, BeginsAnew, KINDS["torchdata"], KINDS["torchdata, own generator"]])
@pytest.mark.quick(2)
def test_an_epoch_left_early_is_followed_by_the_same_one_after_a_resume(
    tmp_path: Path, make: Callable[[], Any]
) -> None:
    assert left_early(tmp_path / "three", make, 3) == left_early(tmp_path / "one", make, 1)


def test_a_generator_in_extra_that_a_loader_begins_with_is_put_back(run_dir: Path) -> None:
    def leg(seed: int, stop: int | None) -> Iterator[list[float]]:
        own = np.random.default_rng(seed)
        loader = OwnNoise(own)
        with RunState.load(run_dir, loader=loader, extra={"own": own}) as state:
            for batch in state.batches():
                yield [*batch.tolist(), own.random()]
                if state.batch + 1 == stop:
                    state.save()
                    return

    seen = [event for seed, stop in enumerate([1, 3, None]) for event in leg(seed, stop)]

    own = np.random.default_rng(0)
    assert seen == [[*batch.tolist(), own.random()] for batch in OwnNoise(own)]


class OwnNoise(Sticks):
    """Its iterators draw as they are made."""

    def __init__(self, own: np.random.Generator) -> None:
        self.own = own

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.own.random()
        return (torch.tensor([at, self.own.random()]) for at in self.places())

    def places(self) -> Iterator[int]:
        self.state = {"at": self.start["at"] if self.start else 0}
        while self.state["at"] < SAMPLES:
            self.state["at"] += 1
            yield self.state["at"]


def test_the_counters_of_a_loader_that_keeps_its_position_continue(run_dir: Path) -> None:
    leg(run_dir, BeginsAnew, (0, 2))
    leg(run_dir, BeginsAnew, (1, 3))

    with RunState.load(run_dir, loader=BeginsAnew()) as state:
        assert (state.epoch, state.batch, state.samples, len(state.batches())) == (1, 3, 13 + 9, 5)


def test_a_state_that_cannot_be_stored_is_named_at_the_save(run_dir: Path) -> None:
    loader = BeginsAnew()
    loader.state_dict = lambda: {"order": draw}  # type: ignore[method-assign, assignment, dict-item]
    with RunState.load(run_dir, loader=loader) as state:
        for _ in state.batches():
            with pytest.raises(CannotStore, match="order"):
                state.save()
            break


# Iterables that keep none.


class Background(threading.Thread):
    """The generator that loads in a thread, as everyone copies it."""

    def __init__(self, batches: Iterable[Any]) -> None:
        super().__init__(daemon=True)
        self.queue: queue.Queue[Any] = queue.Queue(2)
        self.batches = batches
        self.start()

    def run(self) -> None:
        for batch in self.batches:
            self.queue.put(batch)
        self.queue.put(None)

    def __iter__(self) -> Background:
        return self

    def __next__(self) -> Any:
        batch = self.queue.get()
        if batch is None:
            raise StopIteration
        return batch


class DataLoaderX(DataLoader[torch.Tensor]):
    """The loader that everyone copies with it."""

    def __iter__(self) -> Any:
        return Background(super().__iter__())


class Augmented:
    """An iterable with a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(random.getrandbits(31))

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in self.rng.permutation(5):
            yield torch.tensor([number, self.rng.random(), *draw()], dtype=torch.float64)


def augmented() -> Iterator[torch.Tensor]:
    for number in torch.randperm(5):
        yield torch.tensor([number, *draw()], dtype=torch.float64)


def with_own_generator() -> Callable[[], Iterator[torch.Tensor]]:
    own = np.random.default_rng(random.getrandbits(31))

    def batches() -> Iterator[torch.Tensor]:
        for number in own.permutation(5):
            yield torch.tensor([number, own.random()])

    return batches


PLAIN: dict[str, Callable[[], Any]] = {
    "list": lambda: [*torch.arange(15.0).reshape(5, 3)],
    "iterable": Augmented,
    "function": lambda: augmented,
    "function with a generator": with_own_generator,
    "subclass": lambda: DataLoaderX(Images(True), BATCH, shuffle=True, num_workers=2),
}

keeps_none = pytest.mark.filterwarnings("ignore:loader keeps no position")


@pytest.mark.quick(14)
@keeps_none
@pytest.mark.filterwarnings("ignore:loader starts threads")
@pytest.mark.parametrize("stops", STOPS)
@pytest.mark.parametrize("name", PLAIN)
def test_an_iterable_without_a_position_continues(run_dir: Path, name: str, stops: list[Stop]) -> None:
    # A thread that loads draws from the training's generators when it likes; here the workers draw
    assert chain(run_dir, PLAIN[name], stops) == uninterrupted(PLAIN[name])


def endless() -> Iterator[torch.Tensor]:
    return (torch.tensor([number, *draw()]) for number in itertools.count())


def three_an_epoch(run_dir: Path, iterator: Iterator[Any], stop: Stop | None, seed: int) -> Seen:
    """Train on three batches of an endless iterator in each epoch."""
    seeded(seed)
    seen = []
    with RunState.load(run_dir, loader=iterator) as state:
        for epoch in state.epochs(EPOCHS):
            for batch in state.batches():
                seen.append([epoch, batch.tolist(), draw()])
                if (epoch, state.batch + 1) == stop:
                    state.save()
                    return seen
                if state.batch == 2:
                    break
            if (epoch, "end") == stop:
                state.save()
                return seen
    return seen


@keeps_none
@pytest.mark.parametrize("stops", [[(0, 1), (1, 2)], [(0, "end"), (1, "end")], [(0, 2), (1, "end"), (2, 1)]])
def test_an_endless_iterator_continues_over_all_epochs(tmp_path: Path, stops: list[Stop]) -> None:
    expected = three_an_epoch(tmp_path / "one", endless(), None, 0)

    seen = []
    for seed, stop in enumerate([*stops, None]):
        seen += three_an_epoch(tmp_path / "many", endless(), stop, seed)

    assert seen == expected
    assert [int(batch[0]) for _, batch, _ in seen] == [*range(9)]


def test_an_iterator_that_is_asked_to_go_back_is_a_mismatch(run_dir: Path) -> None:
    with RunState.load(run_dir, loader=endless(), keep=None) as state:
        state.save()
        for _ in state.batches():
            if state.batch == 2:
                state.save()
            if state.batch == 4:
                break
        for number, trained in (1, 0), (2, 3):
            state.restore(number)
            with pytest.raises(
                StateMismatch, match=f"cannot go back: it has given 5 batches, and {trained} were"
            ):
                next(iter(state.batches()))


def test_an_iterator_that_has_not_gone_on_since_the_save_may_go_back_to_it(run_dir: Path) -> None:
    seen = []
    with RunState.load(run_dir, loader=iter(range(6))) as state:
        for _ in range(3):
            for batch in state.batches():
                seen.append(batch)
                if len(seen) % 2:
                    state.save()
                    break
            state.restore("newest")

    assert seen == [0, 1, 2, 3, 4]


@keeps_none
def test_a_generator_in_extra_that_an_iterable_draws_from_is_put_back(run_dir: Path) -> None:
    def leg(seed: int, stop: int | None) -> Iterator[list[float]]:
        global GENERATOR
        GENERATOR = np.random.default_rng(seed)
        with RunState.load(run_dir, loader=of_the_module, extra={"own": GENERATOR}) as state:
            for batch in state.batches():
                yield [batch, GENERATOR.random()]
                if state.batch + 1 == stop:
                    state.save()
                    return

    seen = [event for seed, stop in enumerate([1, 3, None]) for event in leg(seed, stop)]

    own = np.random.default_rng(0)
    assert seen == [[own.random(), own.random()] for _ in range(5)]


GENERATOR = np.random.default_rng(0)


def of_the_module() -> Iterator[float]:
    for _ in range(5):
        yield GENERATOR.random()


def test_what_is_loaded_once_more_is_reported_with_its_cost_and_a_way_around(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_LONG", 0.0)
    leg(run_dir, PLAIN["iterable"], (0, 4))

    with pytest.warns(
        ResumableWarning, match="loader keeps no position, so 4 batches of it are loaded again"
    ):
        leg(run_dir, PLAIN["iterable"], (0, 5), progress=True)

    assert "skipping what loader gave before: 4/4 batches\n" in capsys.readouterr().err


@pytest.mark.parametrize("make", [lambda: range(3, 8), lambda: [*range(3, 8)], lambda: (3, 4, 5, 6, 7)])
def test_a_range_or_a_list_continues_without_a_warning(run_dir: Path, make: Callable[[], Any]) -> None:
    seen = []
    for stop in (2, 2, None):
        with RunState.load(run_dir) as state:
            before = state.batch
            for item in state.batches(make()):
                seen.append(item)
                if state.batch + 1 - before == stop:
                    state.save()
                    break

    assert seen == [*range(3, 8)]


@keeps_none
def test_an_iterable_that_ends_while_it_is_run_again_is_a_mismatch(run_dir: Path) -> None:
    leg(run_dir, PLAIN["list"], (1, 4))

    for _ in range(2):
        with pytest.raises(StateMismatch, match="has come to its end after 2 batches, and 4 were trained"):
            leg(run_dir, lambda: [*torch.arange(2.0)])
    assert [key for key, *_ in leg(run_dir, PLAIN["list"])][:2] == [(1, 5), (1, "end")]


# Iterables that were never given.


def unregistered(run_dir: Path, make: Callable[[], Any], stop: Stop | None = None, seed: int = 0) -> Seen:
    """The same training, where the iterable is first seen in the loop."""
    seeded(seed)
    seen: Seen = []
    with RunState.load(run_dir) as state:
        for epoch in state.epochs(EPOCHS):
            for batch in state.batches(make()):
                seen.append(((epoch, state.batch + 1), batch.tolist(), draw()))
                if seen[-1][0] == stop:
                    state.save()
                    return seen
            seen.append(((epoch, "end"), [], draw()))
            if seen[-1][0] == stop:
                state.save()
                return seen
    return seen


NEVER_GIVEN: dict[str, Callable[[], Any]] = {
    "function": lambda: augmented,
    "a new generator every epoch": augmented,
    "a new list every epoch": PLAIN["list"],
}


@pytest.mark.quick(6)
@pytest.mark.filterwarnings("ignore:.* keeps no position")
@pytest.mark.parametrize("stops", STOPS)
@pytest.mark.parametrize("name", NEVER_GIVEN)
def test_an_iterable_that_was_never_given_continues(run_dir: Path, name: str, stops: list[Stop]) -> None:
    legs = enumerate([*stops, None])
    seen = [event for seed, stop in legs for event in unregistered(run_dir, NEVER_GIVEN[name], stop, seed)]

    assert seen == uninterrupted(NEVER_GIVEN[name.replace("a new generator every epoch", "function")])


@pytest.mark.filterwarnings("ignore:.* keeps no position")
def test_two_iterables_of_one_kind_that_were_never_given_both_continue(run_dir: Path) -> None:
    def leg(stop: int | None) -> Iterator[tuple[int, int]]:
        with RunState.load(run_dir) as state:
            both = state.batches([*range(6)]), state.batches([*range(10, 16)])
            for number, pair in enumerate(zip(*both, strict=True), 1):
                yield pair
                if number == stop:
                    state.save()
                    return

    assert [*leg(2), *leg(1), *leg(None)] == [(number, number + 10) for number in range(6)]


# Another kind of loader than before.


@pytest.mark.parametrize(
    ("before", "after"),
    [*itertools.permutations(["torchdata", "begins anew", "list"], 2)],
)
def test_another_kind_of_loader_in_mid_epoch_is_a_mismatch_or_allowed(
    run_dir: Path, before: str, after: str
) -> None:
    every: Mapping[str, Callable[[], Any]] = {**KINDS, **PLAIN}
    leg(run_dir, every[before], (0, 2))

    with pytest.raises(StateMismatch, match="loader"):
        leg(run_dir, every[after])
    with pytest.warns(ResumableWarning, match="may change bits  loader.kind +"):
        seen = leg(run_dir, every[after], allow=["loader"])

    assert next(key for key, *_ in seen) == (0, 1)


@pytest.mark.parametrize(("before", "after"), [("torchdata", "list"), ("list", "begins anew")])
def test_another_kind_of_loader_at_the_epochs_end_begins_at_its_beginning(
    run_dir: Path, before: str, after: str
) -> None:
    every: Mapping[str, Callable[[], Any]] = {**KINDS, **PLAIN}
    leg(run_dir, every[before], (0, "end"))

    with pytest.warns(ResumableWarning, match="may change bits  loader.kind +"):
        seen = leg(run_dir, every[after], allow=["loader.sampler.generator"])

    assert [key for key, *_ in seen][:2] == [(1, 1), (1, 2)]
