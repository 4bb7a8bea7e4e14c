"""What runs where the samples are loaded: in each worker, or in this process if there are none."""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import os
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from multiprocessing import connection, util
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ..errors import CannotStore, ResumableWarning
from ..files import codec
from ..processes import signals
from . import rng, worker_rng
from .counters import Counters
from .sample_seeds import Seeded
from .worker_rng import States, Watch

Stamp = tuple[int, int, bool, States, "States | None", dict[str, Any], "list[tuple[str, str, str]]"]
"""Worker, samples, whether the stream has ended, and what changed with the batch: generators, those when
the stream began, states of the data, and counters that no state tells.

A plain tuple: a class of ours would double the cost of its way."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where one worker stands: all its stamps in one."""

    generators: States = field(default_factory=dict)
    began: States = field(default_factory=dict)
    """What the generators were when the stream began this epoch."""
    data: dict[str, Any] = field(default_factory=dict)
    """What the dataset, and the iterator of a stream, said of themselves; frozen."""
    is_short: bool = False
    """Whether the last batch took the stream's last sample."""
    is_through: bool = False
    """Whether the stream has been asked for more after that."""
    batches: int = 0
    """Batches of this epoch."""
    failed: Sequence[Any] = ()
    """The indices that it could not load since its last stamp: trying has moved its generators too."""
    draws_late: bool = False
    """Whether the stream has drawn after its last batch, which no stamp tells of."""

    def after(self, stamped: Stamp) -> Standing:
        """Return where it stands with one more batch."""
        _, _, is_short, generators, began, data, _ = stamped
        return Standing(
            generators=worker_rng.merged(self.generators, generators) if generators else self.generators,
            began=self.began if began is None else began,
            data={**self.data, **data} if data else self.data,
            is_short=is_short,
            batches=self.batches + 1,
        )

    def collect(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "generators": self.generators,
            "began": self.began,
            "data": {name: thaw(frozen) for name, frozen in self.data.items()},
            "is_short": self.is_short,
            "is_through": self.is_through,
            "batches": self.batches,
            "failed": list(self.failed),
            # (earlier versions do not know it)
            **({"draws_late": True} if self.draws_late else {}),
        }

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> Standing:
        """Return the standing that `collect` told of."""
        return cls(**{**saved, "data": {name: freeze(state) for name, state in saved["data"].items()}})


def freeze(state: Any) -> Any:
    """Return a state as bytes, which nobody can change; one that cannot be stored as the error that says so.

    It becomes an error only if a checkpoint is made of it.
    """
    try:
        files = codec.to_files({"rank": codec.encode({"state": state})})
    except CannotStore as exc:
        return exc
    return {name: bytes(content) for name, content in files.items()}


def thaw(frozen: Any) -> Any:
    """Return the state that was frozen."""
    if isinstance(frozen, CannotStore):
        raise frozen
    files = {name: memoryview(bytearray(content)) for name, content in frozen.items()}
    tree = codec.from_files(files)["rank"]
    return codec.decode(tree.json, tree.tensors)["state"]


def is_stateful(value: object) -> bool:
    """Whether it can say where it stands, and be put there."""
    if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
        return False
    # MosaicML's datasets want to be told how many samples were trained: only their loader knows.
    with contextlib.suppress(ValueError):
        try:
            inspect.signature(value.state_dict).bind()
        except TypeError:
            return False
    return True


def states_of(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of the parts that have one; a model's may be large, and seldom changes."""
    return {
        name: part.state_dict()
        for name, part in parts.items()
        if is_stateful(part) and (name == "dataset" or not isinstance(part, torch.nn.Module))
    }


@dataclass(frozen=True, slots=True)
class Start:
    """Where a worker is to begin."""

    standing: Standing
    is_next_epoch: bool = False
    """Whether it stands where an epoch ended, and the next one begins."""
    shows_progress: bool = False


class Stream(IterableDataset[Any]):
    """The user's iterable dataset: it knows its iterator, and begins where it is told."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.dataset = loader.dataset
        self.iterator: Any = None
        self.start: Start | None = None
        self.root: object = None
        """Where the generators hang that are put back."""
        self.watch: Watch | None = None
        self.began: States | None = None
        """What the generators were when it began, if that is news."""
        self.has_ended: Callable[[], None] | None = None
        """What to call when it has given its last sample."""
        self._collate = loader.collate_fn
        self._batch_size = loader.batch_size
        self._drop_last = loader.drop_last
        self._first: Any = None
        """The dataset's state before it was put anywhere."""
        self._is_stuck = False

    def __iter__(self) -> Iterator[Any]:
        start, self.start, self.began = self.start, None, None
        if start is None:
            self.iterator = self._fresh()
        elif start.is_next_epoch:
            self.iterator = self._next_epoch(start.standing)
        elif start.standing.data:
            self.iterator = self._go_on(start.standing)
        else:
            self.iterator = self._run_again(start)
        # (no step of ours between two samples)
        return chain(self.iterator, self._at_end()) if self.has_ended else self.iterator

    def _at_end(self) -> Iterator[Any]:
        if self.has_ended:
            self.has_ended()
        yield from ()

    def state(self) -> dict[str, Any]:
        """Return what the dataset and its iterator say of themselves."""
        found = {}
        if is_stateful(self.dataset) and self.iterator is not self.dataset:
            found["dataset"] = self.dataset.state_dict()  # type: ignore[attr-defined]
        if is_stateful(self.iterator):
            found["iterator"] = self.iterator.state_dict()
        return found

    def _fresh(self) -> Any:
        # Before iter(): a dataset may draw its order there, and not only with its first sample.
        self.began = self.watch.states() if self.watch else worker_rng.read(rng.find(self.root))
        if self._is_stuck:
            self._load(self._first)
        return iter(self.dataset)

    def _load(self, frozen: Any) -> None:
        dataset: Any = self.dataset
        self._first = self._first or freeze(dataset.state_dict())
        dataset.load_state_dict(thaw(frozen))
        # Hugging Face's begin there each time, until they are put elsewhere, and do not say so.
        self._is_stuck = frozen is not self._first and freeze(dataset.state_dict()) != frozen

    def _go_on(self, at: Standing) -> Any:
        if "dataset" in at.data:
            self._load(at.data["dataset"])
        # To iterate again after the last sample would be to begin again.
        iterator: Any = iter(()) if at.is_short else iter(self.dataset)
        if "iterator" in at.data:
            # (one that is its own iterator has a state though it is not iterated again)
            owner: Any = self.dataset if at.is_short and "dataset" not in at.data else iterator
            if is_stateful(owner):
                owner.load_state_dict(thaw(at.data["iterator"]))
        put_back(at.generators, self.root)
        return iterator

    def _next_epoch(self, at: Standing) -> Any:
        if not at.data:
            # (the stamp of a short batch is made after the stream has ended, and tells all)
            draws_late = at.draws_late and not at.is_short
            if at.is_through and (draws_late or (self._drop_last and at.generators)):
                self._run_through(at)
            else:
                put_back(at.generators, self.root)
            return self._fresh()
        iterator = self._go_on(at)
        if at.is_through:
            # What it does after its last sample (a counter, a shuffle of what is left) counts.
            deque(iterator, maxlen=0)
        return _OrAnew(self, self._fresh())

    def _run_through(self, at: Standing) -> None:
        # What is drawn after the last batch, and for a batch that is dropped, no stamp tells of.
        put_back(at.began, self.root)
        iterator, size = iter(self.dataset), self._batch_size or 1
        while len(samples := list(islice(iterator, size))) == size:
            self._collate(samples if self._batch_size else samples[0])

    def _run_again(self, start: Start) -> Any:
        at = start.standing
        put_back(at.began, self.root)
        iterator = iter(self.dataset)
        for number in _with_progress(start, type(self.dataset).__name__):
            samples = list(islice(iterator, self._batch_size or 1))
            if not samples or (self._drop_last and len(samples) < (self._batch_size or 1)):
                raise StreamEnded(f"{number} batches now, {at.batches} before")
            self._collate(samples if self._batch_size else samples[0])
        put_back(at.generators, self.root)
        return iterator


class _OrAnew:
    """The iterator of a stream that was put where its last epoch ended: it may have to begin anew first."""

    def __init__(self, stream: Stream, iterator: Any) -> None:
        self._stream = stream
        self._inner = iterator
        self._is_first = True

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        is_first, self._is_first = self._is_first, False
        try:
            return next(self._inner)
        except StopIteration:
            if not is_first:
                raise
        self._inner = iter(self._stream.dataset)
        return next(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class StreamEnded(Exception):
    """A stream that was run again had fewer batches than before."""


def _with_progress(start: Start, name: str) -> Any:
    from tqdm import tqdm

    return tqdm(
        range(start.standing.batches),
        desc=f"running {name} again up to where it was; a state_dict would save this",
        unit=" batches",
        disable=not start.shows_progress,
    )


def put_back(generators: States, root: object) -> None:
    """Put the generators of this process into these states."""
    if lost := worker_rng.restore(generators, root):
        warnings.warn(
            f"the generators {', '.join(lost)} were there when the checkpoint was made, and are not there "
            "when a worker begins: what they draw is not what it would have been.",
            ResumableWarning,
            stacklevel=2,
        )


class Worker:
    """The `collate_fn` and `worker_init_fn` of a loader: those of the user, and a stamp on each batch."""

    def __init__(
        self,
        loader: DataLoader[Any],
        stream: Stream | None,
        own: Mapping[str, rng.Generator],
        starts: Mapping[int, Start],
        is_seeded: bool,
        late: MutableSequence[int] | None = None,
    ) -> None:
        """`late`: shared with the training, by worker: whether it has drawn what no stamp tells of."""
        self._collate = loader.collate_fn
        self._init = loader.worker_init_fn
        self._batch_size = loader.batch_size if loader.batch_sampler is not None else None
        self._is_batched = loader.batch_sampler is not None
        self._stream = stream
        self._own = own
        self._starts = dict(starts)
        self._is_seeded = is_seeded
        self._signals = signals.shared_with_workers()
        self._number = -1
        self._batches = 0
        self._dataset: Any = None
        self._watch: Watch | None = None
        self._told: dict[str, Any] = {}
        self._late = late
        self._untold: States = {}
        self._keeps_objects = stream is None or loader.persistent_workers
        self._counters: list[Counters] = []

    @property
    def spared(self) -> Collection[int]:
        """The signals that this worker lives through, and begins with blocked."""
        return self._signals[0] if self._signals else ()

    def begin(self, number: int) -> None:
        """Do what the user's `worker_init_fn` does, and then stand where this worker stood."""
        _end_with_parent()
        util.Finalize(None, _leave, exitpriority=_AT_LAST)
        if self._signals:
            signals.spare(self._signals)
        self._number, self._dataset = number, _users_dataset()
        if self._init is not None:
            self._init(number)
        start = self._starts.get(number)
        self._starts = {}
        if start and self._stream is None:
            # After the user's function: it may have seeded what is to be put back.
            for name, part in self._parts().items():
                if name in start.standing.data and is_stateful(part):
                    part.load_state_dict(thaw(start.standing.data[name]))
            put_back(start.standing.generators, self._root())
            for indices in start.standing.failed:
                self._fail_again(indices)
        self._watch = Watch(rng.find(self._root()), not self._is_seeded)
        if self._stream:
            self._stream.start, self._stream.root, self._stream.watch = start, self._root(), self._watch
            self._stream.has_ended = self._stream_ended if self._late else None
        if number == 0 and self._keeps_objects:
            # (each of the others would find the same)
            self._counters = [Counters(name, part) for name, part in self._parts().items()]
            for counters in self._counters:
                counters.begin()

    def __call__(self, samples: Any) -> tuple[Any, Stamp]:
        """Make a batch, and stamp it."""
        # (what __getitems__ returns may have no length)
        size = len(samples) if self._is_batched and hasattr(samples, "__len__") else 1
        batch = self._collate(samples)
        is_short = self._stream is not None and size < (self._batch_size or 1)
        if self._watch is None:
            return batch, (self._number, size, is_short, {}, None, {}, [])
        began = None
        if self._stream:
            began, self._stream.began = self._stream.began, None
            # A stream may make its generators anew as it begins.
            self._batches = self._batches if began is None else 0
        self._batches += 1
        found: list[tuple[str, str, str]] = []
        if self._batches & (self._batches - 1) == 0:
            # Many datasets make their generators at the first sample, some even later.
            self._watch.add(rng.find(self._root()), is_new=True)
            found = self._counted(is_first=began is not None)
        return batch, (self._number, size, is_short, self._changes(), began, self._changed_data(), found)

    def _changes(self) -> States:
        changes = self._watch.changes() if self._watch else {}
        if self._untold:
            changes, self._untold = worker_rng.merged(self._untold, changes), {}
        if self._late:
            self._late[self._number] = False
        return changes

    def _stream_ended(self) -> None:
        """Note what the stream has drawn since its last batch; if another one comes, its stamp tells it."""
        if self._watch and self._late:
            self._watch.add(rng.find(self._root()), is_new=True)
            self._untold = self._watch.changes()
            self._late[self._number] = bool(self._untold)

    def _counted(self, *, is_first: bool) -> list[tuple[str, str, str]]:
        """Return the counters that are new; `is_first`: whether a stream has just begun an epoch."""
        for counters in self._counters:
            if self._stream is None:
                counters.loaded()
            elif is_first:
                counters.epoch_begun()
            elif self._batches == 2:
                counters.epoch_goes_on()
        new = (counter for counters in self._counters for counter in counters.new())
        return [(counter.role, counter.name, counter.first) for counter in new]

    def _parts(self) -> dict[str, Any]:
        return {"dataset": self._dataset, "collate_fn": self._collate}

    def _fail_again(self, indices: Any) -> None:
        with contextlib.suppress(Exception):
            if not self._is_batched:
                self._collate(self._dataset[indices])
            elif load_all := getattr(self._dataset, "__getitems__", None):
                self._collate(load_all(indices))
            else:
                self._collate([self._dataset[index] for index in indices])

    def _root(self) -> dict[str, Any]:
        return {"dataset": self._dataset, "collate_fn": self._collate, "extra": self._own}

    def _changed_data(self) -> dict[str, Any]:
        states = self._stream.state() if self._stream else states_of(self._parts())
        frozen = {name: freeze(state) for name, state in states.items()}
        changed = {name: state for name, state in frozen.items() if self._told.get(name) != state}
        self._told |= changed
        return changed


def _users_dataset() -> Any:
    info: Any = get_worker_info()
    if isinstance(info.dataset, (Stream, Seeded)):
        # (the class is frozen) The user's functions are to find their own dataset there.
        object.__setattr__(info, "dataset", info.dataset.dataset)
    return info.dataset


def _end_with_parent() -> None:
    """Let this worker end when the training is killed: one with results to deliver would wait for ever."""
    parent, above = multiprocessing.parent_process(), os.getppid()
    assert parent is not None

    def watch() -> None:
        # (a fork server lives on when the training is killed; a sentinel is held open by other workers)
        while os.getppid() == above and not connection.wait([parent.sentinel], timeout=1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _leave() -> None:
    """Leave as a forked process does: a thread that still delivers aborts an interpreter that ends."""
    if sys.exc_info()[0] is None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


# (the thread that delivers, where it has to be waited for, is at -5)
_AT_LAST = -100
