"""A worker that begins again stands where it stood: its generators, its dataset, and its stream."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, _DatasetKind, get_worker_info

from resumable import CannotStore, ResumableWarning, RunState, progress
from resumable.loaders.generators import rng, worker_rng
from resumable.loaders.workers.datasets import Seeded, Stream, StreamEnded, put_back
from resumable.loaders.workers.states import Standing, Standings, Start, freeze, thaw
from resumable.loaders.workers.worker import Worker

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
]

SAMPLES, BATCH = 22, 4
HOLD_OPEN = os.pipe()
"""What stands for the training's life while a worker runs in this process: it is never closed."""


def noise() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.randn(), torch.randn(()).item()]


def new_seed() -> int:
    return random.getrandbits(31)


class Noisy(Dataset[Any]):
    """Samples with noise from everywhere, one generator of which is made when it is needed first."""

    fails_at = -1

    def __init__(self) -> None:
        self.own = np.random.default_rng(new_seed())
        self.late: random.Random | None = None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        self.late = self.late or random.Random(new_seed())
        found = [index, *noise(), self.own.normal(), self.late.random()]
        if index == self.fails_at:
            raise OSError("no such sample")
        return found


class ManyAtOnce(Noisy):
    """Samples that are loaded by the batch."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        shared = self.own.random()
        return [[shared, *self[index]] for index in indices]


class Counting(Noisy):
    """Samples that depend on how many were given."""

    given = 0

    def __getitem__(self, index: int) -> Any:
        self.given += 1
        return [self.given, *super().__getitem__(index)]

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


def begun(number: int) -> None:
    """Seed as many users do in their worker_init_fn."""
    random.seed(number), np.random.seed(number), torch.manual_seed(number)
    get_worker_info().dataset.own = np.random.default_rng(new_seed())  # type: ignore[union-attr]


def collated(samples: Any) -> Any:
    return [samples, random.random()]


@pytest.fixture
def in_worker(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Return what makes this process look like worker 1 of 2 over a dataset."""
    parent = SimpleNamespace(sentinel=HOLD_OPEN[0])
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: parent)

    def enter(dataset: Any) -> None:
        info = torch.utils.data._utils.worker.WorkerInfo(id=1, num_workers=2, seed=7, dataset=dataset)
        monkeypatch.setattr(torch.utils.data._utils.worker, "_worker_info", info)

    return enter


class Mapped:
    """A worker over a map-style dataset, run in this process."""

    def __init__(self, enter: Any, dataset: Any, at: Standing | None = None, **how: Any) -> None:
        batch_size = how.pop("batch_size", BATCH)
        random.seed(how.pop("seed", None))
        loader = DataLoader(dataset, batch_size, collate_fn=collated, worker_init_fn=how.pop("init", None))
        self.dataset, self.is_single = dataset, batch_size is None
        starts = {} if at is None else {1: Start(at)}
        self.worker = Worker(loader, None, {}, starts, is_seeded=how.pop("is_seeded", False))
        self.at = at or Standing()
        enter(dataset)
        self.worker.begin(1)

    def load(self, indices: Any) -> Any:
        if self.is_single:
            samples = self.dataset[indices]
        elif hasattr(self.dataset, "__getitems__"):
            samples = self.dataset.__getitems__(indices)
        else:
            samples = [self.dataset[index] for index in indices]
        batch, stamped = self.worker(samples)
        self.at = self.at.after([pickle.loads(pickle.dumps(stamped))])
        return batch


PLAN: list[Any] = [[0, 1, 2, 3], [8, 9, 10, 11], [16, 17], [4, 5, 6], [7], [12, 13]]


@pytest.mark.parametrize("init", [None, begun])
@pytest.mark.parametrize("kind", [Noisy, ManyAtOnce, Counting])
def test_a_worker_that_begins_again_repeatedly_makes_the_same_batches(
    in_worker: Any, kind: Any, init: Any
) -> None:
    random.seed(5)
    loading = Mapped(in_worker, kind(), init=init, seed=5)
    legs = []
    for indices in PLAN:
        saved = Standing.restored(loading.at.collect())
        legs.append((saved, loading.load(indices)))

    for at, expected in legs[1:]:
        for seed in range(2):
            random.seed(seed + 50), np.random.seed(seed), torch.manual_seed(seed)
            dataset = kind()
            again = Mapped(in_worker, dataset, at, init=init, seed=seed)
            assert again.load(PLAN[at.batches]) == expected


def test_the_users_worker_init_fn_is_called_before_anything_is_loaded(in_worker: Any) -> None:
    found = []
    for _ in range(2):
        loading = Mapped(in_worker, Noisy(), init=begun)
        found.append(noise())

    assert found[0] == found[1]
    assert loading.at == Standing()


def test_single_samples_are_stamped_too(in_worker: Any) -> None:
    loading = Mapped(in_worker, Noisy(), batch_size=None)
    loading.load(0)
    at, expected = loading.at, loading.load(1)
    _, stamped = loading.worker(loading.dataset[2])

    assert Mapped(in_worker, Noisy(), at, batch_size=None).load(1) == expected
    assert (stamped[:3], at.batches) == ((1, 1, False), 1)


def test_a_batch_for_which_nothing_was_drawn_is_stamped_with_nothing(in_worker: Any) -> None:
    worker = Mapped(in_worker, Noisy()).worker
    worker._collate = list
    for _ in range(3):
        assert worker([1, 2, 3]) == ([1, 2, 3], (1, 3, False, {}, None, {}, []))


def test_a_worker_whose_samples_are_seeded_tells_only_of_own_generators(in_worker: Any) -> None:
    loading = Mapped(in_worker, Noisy(), is_seeded=True)
    loading.load([0, 1])

    assert loading.at.generators.keys() == {"own.dataset.own", "own.dataset.late"}


def test_the_users_functions_find_their_dataset_and_not_the_one_around_it(in_worker: Any) -> None:
    dataset = Noisy()
    loader: DataLoader[Any] = DataLoader(dataset, collate_fn=list)
    worker = Worker(loader, None, {}, {}, is_seeded=True)
    in_worker(Seeded(dataset, 1))
    worker.begin(1)
    info = get_worker_info()

    assert info is not None
    assert info.dataset is dataset


def test_in_the_trainings_process_only_the_size_is_reported() -> None:
    loader: DataLoader[Any] = DataLoader(Counting(), 2, collate_fn=collated)
    worker = Worker(loader, None, {}, {}, is_seeded=False)

    assert worker([1, 2])[1] == (-1, 2, False, {}, None, {}, [])


def test_a_batch_without_a_length_is_one() -> None:
    loader: DataLoader[Any] = DataLoader(Noisy(), 2, collate_fn=lambda samples: samples)
    worker = Worker(loader, None, {}, {}, is_seeded=False)

    assert worker(given := object()) == (given, (-1, 1, False, {}, None, {}, []))


@pytest.mark.parametrize(
    ("kind", "batch_size", "failed"),
    [(Noisy, BATCH, [4, 5, 6]), (ManyAtOnce, BATCH, [4, 5, 6]), (Noisy, None, 5)],
)
def test_what_failed_is_tried_again_for_what_it_drew(
    in_worker: Any, kind: Any, batch_size: int | None, failed: Any
) -> None:
    first, last = ([0, 1], [8, 9]) if batch_size else (0, 8)
    loading = Mapped(in_worker, kind(), batch_size=batch_size)
    loading.dataset.fails_at = 5
    loading.load(first)
    with pytest.raises(OSError, match="no such sample"):
        loading.load(failed)
    at = Standing.restored({**loading.at.collect(), "failed": [failed]})
    expected = loading.load(last)

    for _ in range(2):
        dataset = kind()
        dataset.fails_at = 5
        assert Mapped(in_worker, dataset, at, batch_size=batch_size).load(last) == expected
    assert loading.at.failed == ()


def test_a_generator_that_is_made_late_is_found_at_the_latest_when_twice_as_many_batches_are_made(
    in_worker: Any,
) -> None:
    loading = Mapped(in_worker, Noisy())
    worker, dataset = loading.worker, loading.dataset
    told = []
    for number in range(1, 9):
        if number == 5:
            dataset.later = random.Random(1)
        told += [number] if "own.dataset.later" in worker([1])[1][3] else []

    assert told == [8]


def test_generators_that_cannot_be_put_back_are_named() -> None:
    states = {"own.dataset.gone": {"state": rng.read(random.Random(1))}}

    with pytest.warns(ResumableWarning, match=r"the generators dataset\.gone were there"):
        put_back(states, {"dataset": 5})


# States.


@pytest.mark.parametrize(
    "state", [{"a": [1, 2.5, None, "x"], 3: b"4"}, {"t": torch.arange(3), "n": np.ones(2)}]
)
def test_a_frozen_state_does_not_follow_what_it_was_made_of(state: Any) -> None:
    frozen, text = freeze(state), repr(state)
    first = next(iter(state.values()))
    first[0] = 9

    assert repr(thaw(frozen)) == text
    assert freeze(thaw(frozen)) == frozen


def test_a_state_that_cannot_be_stored_is_an_error_only_when_it_is_wanted() -> None:
    frozen = freeze({"fn": print})

    assert isinstance(frozen, CannotStore)
    with pytest.raises(CannotStore, match="fn"):
        Standing(data={"dataset": frozen}).collect()


def test_a_standing_is_saved_and_restored_as_it_is() -> None:
    at = Standing(
        {"own.a": {"state": 1}}, {"own.b": {"state": 2}}, {"dataset": freeze({"x": 1})}, True, True, 3, [[4]]
    )

    assert Standing.restored(at.collect()) == at
    assert Standing.restored(Standing().collect()) == Standing(failed=[])


def test_a_stamp_changes_of_a_standing_only_what_it_tells() -> None:
    at = Standing({"a": {"x": 1, "y": 2}}, {"a": {"x": 0}}, {"dataset": 1}, False, True, 3, [[4]])

    quiet = at.after([(0, 4, False, {}, None, {}, [])])
    told = at.after([(0, 4, True, {"a": {"x": 5}}, {"a": {"x": 6}}, {"iterator": 7}, [])])

    assert quiet == Standing(at.generators, at.began, at.data, False, False, 4, ())
    assert told == Standing(
        {"a": {"x": 5, "y": 2}}, {"a": {"x": 6}}, {"dataset": 1, "iterator": 7}, True, False, 4
    )


# Streams.


def stamp(number: int, data: dict[str, Any]) -> Any:
    return number % 2, 4, False, {"python": {"place": number}}, None, data, []


@pytest.mark.parametrize("data", [{}, {"dataset": b"large"}])
def test_standings_at_a_mark_are_those_of_the_stamps_before_it(data: dict[str, Any]) -> None:
    standings, marks = Standings({0: Standing({"numpy": {"place": 9}}, batches=5)}), []
    expected = [standings.at()]
    for number in range(150):
        standings = standings.add(stamp(number, data))
        marks.append((standings, len(standings.stamps)))
        before, by = expected[-1], number % 2
        expected.append({**before, by: before.get(by, Standing()).after([stamp(number, data)])})

    assert [at.at(count) for at, count in marks] == expected[1:]
    assert max(count for _, count in marks) == (0 if data else 63)


def test_a_merge_of_stamps_that_was_interrupted_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    standings, after = Standings({}), Standing.after
    for number in range(63):
        standings = standings.add(stamp(number, {}))
    monkeypatch.setattr(Standing, "after", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        standings.add(stamp(63, {}))
    monkeypatch.setattr(Standing, "after", after)

    standings = standings.add(stamp(64, {}))

    assert standings.stamps == []
    assert [one.batches for one in standings.at().values()] == [33, 32]


class Plain(IterableDataset[Any]):
    """A stream that nobody can position."""

    def __init__(self, length: int = SAMPLES) -> None:
        self.length, self.begun = length, 0

    def __iter__(self) -> Iterator[Any]:
        self.begun += 1
        yield from ([index, *noise()] for index in range(self.length))


class Shuffled(Plain):
    """A stream whose order is drawn as it begins."""

    def __iter__(self) -> Iterator[Any]:
        yield from ([index, *noise()] for index in random.sample(range(self.length), self.length))


class Stateful(Plain):
    """A stream whose dataset knows where it is, and how often it came to its end."""

    at, passes = 0, 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.length:
            self.at += 1
            yield [self.at, self.passes, *noise()]
        self.at, self.passes = 0, self.passes + 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.passes = state["at"], state["passes"]


class BeginsThere(Plain):
    """A stream that begins in every epoch where it was put once, as Hugging Face's do."""

    start, at = 0, 0

    def __iter__(self) -> Iterator[Any]:
        for at in range(self.start + 1, self.length + 1):
            self.at = at
            yield [at, *noise()]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["at"]


class Cursor:
    """An iterator that knows where it is."""

    def __init__(self, length: int) -> None:
        self.length, self.at = length, 0

    def __iter__(self) -> Cursor:
        return self

    def __next__(self) -> Any:
        if self.at == self.length:
            raise StopIteration
        self.at += 1
        return [self.at, *noise()]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Cursors(Plain):
    """A stream whose iterators know where they are."""

    def __iter__(self) -> Any:
        return Cursor(self.length)


class Counted(Cursor):
    """An iterator that counts for its dataset how often one came to its end."""

    def __init__(self, dataset: Both) -> None:
        super().__init__(dataset.length)
        self.dataset = dataset

    def __next__(self) -> Any:
        if self.at == self.length:
            self.dataset.passes += 1
        return [self.dataset.passes, *super().__next__()]


class Both(Plain):
    """A stream of such iterators, which has a state as well."""

    passes = 0

    def __iter__(self) -> Any:
        return Counted(self)

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.passes = state["passes"]


class ItsOwn(Stateful):
    """A stream that is its own iterator."""

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        if self.at == self.length:
            self.at, self.passes = 0, self.passes + 1
            raise StopIteration
        self.at += 1
        return [self.at, self.passes, *noise()]


class Streaming:
    """A worker over a stream, run in this process as torch's own runs it."""

    def __init__(
        self, enter: Any, dataset: Any, start: Start | None = None, batch_size: int | None = BATCH, **how: Any
    ) -> None:
        loader = DataLoader(dataset, batch_size, collate_fn=collated, **how)
        self.stream, self.loader = Stream(loader), loader
        self.worker = Worker(loader, self.stream, {}, {1: start} if start else {}, is_seeded=False)
        self.at = start.standing if start else Standing()
        enter(self.stream)
        self.worker.begin(1)
        self.fetcher = self.fetched()

    def begin(self) -> None:
        """Begin another epoch."""
        self.at, self.fetcher = replace(self.at, batches=0), self.fetched()

    def fetched(self) -> Any:
        loader = self.loader
        return _DatasetKind.create_fetcher(
            _DatasetKind.Iterable, self.stream, loader.batch_size is not None, self.worker, loader.drop_last
        )

    def load(self, count: int = 99) -> list[Any]:
        """Return so many batches, or what is left."""
        found: list[Any] = []
        with contextlib.suppress(StopIteration):
            while len(found) < count:
                batch, stamped = self.fetcher.fetch([None] * (self.loader.batch_size or 1))
                self.at = self.at.after([pickle.loads(pickle.dumps(stamped))])
                found.append(batch)
        return found

    def saved(self, **changes: Any) -> Standing:
        return Standing.restored({**self.at.collect(), **changes})


KINDS = [Plain, Shuffled, Stateful, BeginsThere, Cursors, Both, ItsOwn]
HOW: list[dict[str, Any]] = [{}, {"drop_last": True}, {"batch_size": None}]


def scatter(seed: int) -> None:
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_continues_in_the_middle_again_and_again(
    in_worker: Any, kind: Any, how: dict[str, Any]
) -> None:
    whole = Streaming(in_worker, kind(), **how)
    standings, expected = [], []
    while batch := whole.load(1):
        expected += batch
        standings.append(whole.saved())
    rest = []
    for number, at in enumerate(standings):
        scatter(number)
        again = Streaming(in_worker, kind(), Start(at), **how)
        rest.append(again.load(1))
        if rest[-1]:
            assert again.saved() == standings[number + 1]
            assert again.load() == expected[number + 2 :]

    assert rest == [[batch] for batch in expected[1:]] + [[]]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_whose_epoch_has_ended_begins_the_next_one(
    in_worker: Any, kind: Any, how: dict[str, Any]
) -> None:
    whole = Streaming(in_worker, kind(), **how)
    whole.load()
    for epoch in range(3):
        at = whole.saved(is_through=True)
        whole.begin()
        expected = whole.load(2)
        generators, rest = worker_rng.read({}), whole.load()
        scatter(epoch)
        again = Streaming(in_worker, kind(), Start(at, is_next_epoch=True), **how)

        assert again.load(2) == expected
        assert worker_rng.read({}) == generators
        assert again.load() == rest


@pytest.mark.parametrize("kind", [Stateful, ItsOwn])
def test_a_stream_that_stopped_at_its_very_last_sample_begins_the_next_epoch_again(
    in_worker: Any, kind: Any
) -> None:
    whole = Streaming(in_worker, kind(2 * BATCH))
    whole.load(2)
    at = whole.saved(batches=0)
    assert whole.load() == []
    whole.begin()
    expected = whole.load()
    again = Streaming(in_worker, kind(2 * BATCH), Start(at, is_next_epoch=True))

    assert again.load() == expected


def test_the_iterator_of_a_stream_that_may_begin_again_is_asked_as_itself(in_worker: Any) -> None:
    whole = Streaming(in_worker, Cursors())
    whole.load()
    start = Start(whole.saved(is_through=True, batches=0), is_next_epoch=True)
    again = Streaming(in_worker, Cursors(), start)
    again.load(1)

    assert iter(again.stream.iterator) is again.stream.iterator
    assert again.stream.state() == {"iterator": {"at": BATCH}}
    assert len(again.load()) == 5
    assert next(again.stream.iterator, "end") == "end"


@pytest.mark.parametrize("how", HOW[:2])
def test_a_stream_that_is_shorter_than_it_was_is_refused(in_worker: Any, how: dict[str, Any]) -> None:
    whole = Streaming(in_worker, Plain(), **how)
    whole.load(4)

    with pytest.raises(
        StreamEnded, match="3 batches now, 4 before" if not how else "2 batches now, 4 before"
    ):
        Streaming(in_worker, Plain(11), Start(whole.saved()), **how)


@pytest.mark.parametrize("shows", [True, False])
def test_a_stream_that_is_run_again_shows_its_progress_if_it_is_to(
    in_worker: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, shows: bool
) -> None:
    monkeypatch.setattr(progress, "_LONG", 0.0)
    whole = Streaming(in_worker, Plain())
    whole.load(3)
    Streaming(in_worker, Plain(), Start(whole.saved(), shows_progress=shows))
    text = capsys.readouterr().err

    assert bool(text) is shows
    assert ("running Plain again up to where it was" in text and "3/3" in text) is shows


def test_a_stream_with_a_state_is_never_run_again(in_worker: Any) -> None:
    whole = Streaming(in_worker, Cursors())
    whole.load(3)
    again = Streaming(in_worker, Cursors(), Start(whole.saved()))

    assert again.stream.iterator.at == 3 * BATCH


def test_only_what_has_changed_of_the_data_is_reported(in_worker: Any) -> None:
    whole = Streaming(in_worker, Both())
    told = [whole.worker(list(itertools.islice(whole.stream.iterator, BATCH)))[1][5].keys() for _ in range(3)]

    assert told == [{"dataset", "iterator"}, {"iterator"}, {"iterator"}]


def test_in_the_trainings_process_a_stream_is_just_iterated_over() -> None:
    stream = Stream(DataLoader(Plain()))
    random.seed(1)
    found = next(iter(stream))
    random.seed(1)

    assert stream.began
    assert rng.is_same(stream.began["python"], worker_rng.read({})["python"])
    assert found[1] == random.random()


class NewEveryEpoch(IterableDataset[Any]):
    """A stream that makes its generator again as it begins."""

    def __init__(self) -> None:
        self.rng: Any = None

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        self.rng = np.random.default_rng(info.seed if info else 0)
        for index in range(SAMPLES):
            yield index, self.rng.random(), random.random()


def trained(run_dir: Path, stops: list[Any], **how: Any) -> list[Any]:
    """Return what a run gives that is stopped at these batches."""
    seen: list[Any] = []
    for leg, stop in enumerate([*stops, None]):
        scatter(leg if leg else 3)
        loader = DataLoader(NewEveryEpoch(), BATCH, num_workers=2, collate_fn=list, **how)
        with RunState.load(run_dir, loader=loader) as state:
            for epoch in state.epochs(3):
                for batch in state.batches():
                    seen.append(batch)
                    if (epoch, state.batch) == stop:
                        state.save()
                        break
                else:
                    continue
                break
    return seen


@pytest.mark.parametrize("how", [{}, {"persistent_workers": True}])
@pytest.mark.quick(2)
def test_generators_that_a_stream_makes_again_in_every_epoch_continue(
    run_dir: Path, tmp_path: Path, how: dict[str, Any]
) -> None:
    seen = trained(run_dir, [(0, 4), (1, 2), (1, 5), (2, 3)], **how)

    assert seen == trained(tmp_path / "other", [], **how)


def test_a_watch_follows_a_generator_that_a_stream_makes_again(in_worker: Any) -> None:
    whole = Streaming(in_worker, NewEveryEpoch())
    for _ in range(3):
        whole.load(3)
        expected = whole.stream.dataset.rng.bit_generator.state
        assert rng.is_same(whole.at.generators["own.dataset.rng"]["state"], expected)
        whole.load(), whole.begin()
