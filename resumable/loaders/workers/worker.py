"""Stamps each batch where it is loaded: in a worker, or in this process if there are none."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
from collections.abc import Collection, Mapping, MutableSequence
from multiprocessing import connection, util
from typing import Any

from torch.utils.data import DataLoader, get_worker_info

from ...processes import signals
from ..generators import rng, search, worker_rng
from ..generators.worker_rng import States, Watch
from .datasets import Seeded, Stream, put_back
from .memory import Memory
from .states import Stamp, Start, freeze, is_stateful, states_of, thaw


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
        """`late`: shared with the training, by worker: whether it has drawn since its last stamp."""
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
        self._sent: dict[str, Any] = {}
        self._late = late
        self._unsent: States = {}
        self._keeps_objects = stream is None or loader.persistent_workers
        self._memory: Memory | None = None

    @property
    def spared(self) -> Collection[int]:
        """The signals that this worker ignores, and starts with blocked."""
        return self._signals[0] if self._signals else ()

    def begin(self, number: int) -> None:
        """Call the user's `worker_init_fn`, and then restore this worker's state."""
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
            # After the user's function, which may seed what is restored here.
            for name, part in self._parts().items():
                if name in start.standing.data and is_stateful(part):
                    part.load_state_dict(thaw(start.standing.data[name]))
            put_back(start.standing.generators, self._root())
            for indices in start.standing.failed:
                self._fail_again(indices)
        self._watch = Watch(search.find(self._root()), not self._is_seeded)
        if self._stream:
            has_ended = self._stream_ended if self._late else None
            self._stream.prepare(start, self._root(), self._watch, has_ended)
        if number == 0 and self._keeps_objects:
            # All other workers would find the same.
            self._memory = Memory(self._parts())

    def __call__(self, samples: Any) -> tuple[Any, Stamp]:
        """Make a batch, and stamp it."""
        # The result of __getitems__ may have no length.
        size = len(samples) if self._is_batched and hasattr(samples, "__len__") else 1
        batch = self._collate(samples)
        is_short = self._stream is not None and size < (self._batch_size or 1)
        if self._watch is None:
            return batch, (self._number, size, is_short, {}, None, {}, [])
        began = None
        if self._stream:
            began = self._stream.take_began()
            # A stream may make new generators when it begins.
            self._batches = self._batches if began is None else 0
        self._batches += 1
        if self._batches & (self._batches - 1) == 0:
            # Many datasets make their generators at the first sample, some even later.
            self._watch.add(search.find(self._root()), is_new=True)
        # A stream is run again from its epoch's beginning: what it has there is kept from the epoch before.
        is_due = self._stream is None or began is not None
        found = self._memory.after_fetch() if self._memory and is_due else []
        return batch, (self._number, size, is_short, self._changes(), began, self._changed_data(), found)

    def _changes(self) -> States:
        changes = self._watch.changes() if self._watch else {}
        if self._unsent:
            changes, self._unsent = worker_rng.merged(self._unsent, changes), {}
        if self._late:
            self._late[self._number] = False
        return changes

    def _stream_ended(self) -> None:
        """Note what the stream has drawn since its last batch; the stamp of a later one includes it."""
        if self._watch and self._late:
            self._watch.add(search.find(self._root()), is_new=True)
            self._unsent = self._watch.changes()
            self._late[self._number] = bool(self._unsent)

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
        if self._stream is not None:
            states = self._stream.state()
        elif hasattr(self._dataset, "state_dict") or hasattr(self._collate, "state_dict"):
            states = states_of(self._parts())
        else:
            # Most loaders: with every batch, each call counts.
            return {}
        frozen = {name: freeze(state) for name, state in states.items()}
        changed = {name: state for name, state in frozen.items() if self._sent.get(name) != state}
        self._sent |= changed
        return changed


def _users_dataset() -> Any:
    info: Any = get_worker_info()
    if isinstance(info.dataset, (Stream, Seeded)):
        # The user's functions must find their own dataset there. The class is frozen.
        object.__setattr__(info, "dataset", info.dataset.dataset)
    return info.dataset


def _end_with_parent() -> None:
    """End this worker when the training is killed: one with results to deliver would wait forever."""
    parent, above = multiprocessing.parent_process(), os.getppid()
    assert parent is not None

    def watch() -> None:
        # A fork server survives the training, and other workers hold the sentinel open: look at both.
        while os.getppid() == above and not connection.wait([parent.sentinel], timeout=1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _leave() -> None:
    """Exit like a forked process: a thread that still delivers aborts an interpreter that ends."""
    if sys.exc_info()[0] is None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


# After the finalizer at -5, which waits for the thread that delivers.
_AT_LAST = -100
