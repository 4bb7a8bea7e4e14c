"""Torch's iterators over a loader, made to continue in mid-epoch; all private names of torch are here."""

from __future__ import annotations

import copy
import os
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from multiprocessing import util
from typing import Any, Protocol

from torch._utils import ExceptionWrapper
from torch.autograd import profiler
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _DatasetKind,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from ...errors import Unsupported, UsageError
from ...processes import signals
from ...tracebacks import shorten
from . import torchdata
from .order import Order
from .shelter import sheltered
from .states import Stamp
from .worker import Worker

METHODS = (
    "_reset",
    "_try_put_index",
    "_process_data",
    "_get_data",
    "_try_get_data",
    "_next_data",
    "_shutdown_workers",
)
ATTRIBUTES = ("_worker_queue_idx_cycle", "_send_idx", "_task_info", "_workers_status", "_workers")
"""The private names of torch's iterator that are used here; the attributes exist only in instances."""


class Observer(Protocol):
    """Callbacks for the events of an iterator."""

    def order_begins(self) -> None:
        """Note that the order of an epoch is about to be drawn."""

    def batches_begin(self) -> None:
        """Note that the rest of the epoch before has been discarded."""

    def came_out(self, stamped: Stamp | None, number: int | None, worker: int | None) -> None:
        """Note that a batch is handed out; without a stamp it is an error of its worker."""

    def discarded(self, stamped: Stamp) -> None:
        """Note that a batch was loaded, and is discarded."""

    def ran_out(self, worker: int) -> None:
        """Note that a worker's stream has ended."""


def stand_in(
    loader: DataLoader[Any], dataset: Dataset[Any], order: Order, worker: Worker | None
) -> DataLoader[Any]:
    """Return a copy of the user's loader with our order, worker and wrapped dataset."""
    view = copied(loader)
    # DataLoader.__setattr__ refuses these, since they must not change under a running iterator.
    vars(view)["dataset"] = dataset
    vars(view)["sampler" if loader.batch_sampler is None else "batch_sampler"] = order
    if worker is not None:
        view.collate_fn = worker
    if worker is not None and loader.num_workers:
        view.worker_init_fn = worker.begin
    return view


def iterates_as_torch_does(loader: DataLoader[Any]) -> bool:
    """Whether the loader's class leaves it to torch to make its iterators."""
    kind = type(loader)
    return kind.__iter__ is DataLoader.__iter__ and kind._get_iterator is DataLoader._get_iterator


def iterates_as_torchdata_does(loader: DataLoader[Any]) -> bool:
    """Whether the loader's class leaves it to torchdata's StatefulDataLoader to make its iterators."""
    kind = type(loader)
    return all(map(torchdata.is_of_its_loader, (kind.__iter__, kind._get_iterator)))


def handed_out(value: object) -> int | None:
    """Return the number of batches that an iterator of torch has handed out; None for other objects."""
    # Look at its type alone: isinstance() could call the object's code.
    is_torchs = _BaseDataLoaderIter in type(value).__mro__
    return value.__dict__.get("_num_yielded", 0) if is_torchs else None


def _end(reference: weakref.ref[Workers]) -> None:
    if (workers := reference()) is not None:
        workers.end()


class _Unlabelled(_BaseDataLoaderIter):
    """An iterator whose batches have torch's label in a profile, and only there.

    To make the label takes longer than all that is done here with a batch.
    """

    def __next__(self) -> Any:
        is_stream = self._dataset_kind != _DatasetKind.Map
        if profiler._is_profiler_enabled or is_stream or self._sampler_iter is None:
            return super().__next__()
        batch: Any = self._next_data()
        self._num_yielded += 1
        return batch


class _Here(_Unlabelled, _SingleProcessDataLoaderIter):
    pass


def in_process(view: DataLoader[Any]) -> Iterator[Any]:
    """Return an iterator over stamped batches that are loaded in this process."""
    # Not by the view, whose class may make iterators of its own, as torchdata's does.
    return _Here(view)


def copied(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader like the user's, without its workers."""
    found = copy.copy(loader)
    found._iterator = None
    _copies.add(found)
    return found


def is_copy(loader: DataLoader[Any]) -> bool:
    """Whether the loader is one of our copies, not one of the script's."""
    return loader in _copies


_copies: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()


def kept(loader: DataLoader[Any]) -> Any:
    """Return the iterator that a loader with persistent workers keeps; None before its first use."""
    # A loader that is just being made has no attributes yet.
    return vars(loader).get("_iterator")


def forget(loader: DataLoader[Any]) -> None:
    """Let a loader with persistent workers make them again when it is iterated next."""
    loader._iterator = None


class Owner(Protocol):
    """Makes the iterators for which the script itself asks a loader."""

    def begin(self, loader: DataLoader[Any]) -> Iterator[Any] | None:
        """Return an iterator of the loader; None to leave it to others, and to torch."""


def hook(owner: Owner) -> None:
    """Let the owner make the iterators of the loaders that it knows, for as long as it lives."""
    if not _torchs:
        _torchs.append(DataLoader._get_iterator)
        DataLoader._get_iterator = _get_iterator  # type: ignore[assignment, method-assign]
    _owners[:] = [*(one for one in _owners if one()), weakref.ref(owner)]


def unhook(owner: Owner) -> None:
    """Stop letting the owner make iterators; the last owner to go restores torch's method."""
    _owners[:] = [one for one in _owners if one() not in (owner, None)]
    # Another library may have wrapped ours.
    if not _owners and DataLoader._get_iterator is _get_iterator:
        DataLoader._get_iterator = _torchs.pop()  # type: ignore[assignment, method-assign]


def _get_iterator(loader: DataLoader[Any]) -> Any:
    for reference in [] if is_copy(loader) else reversed(_owners):
        owner = reference()
        if owner is not None and (iterator := owner.begin(loader)) is not None:
            return iterator
    return _torchs[0](loader)


_owners: list[weakref.ref[Owner]] = []
_torchs: list[Callable[[DataLoader[Any]], Any]] = []
"""Torch's own method, while ours replaces it."""


def watched(loader: DataLoader[Any], check: Callable[[], None] = lambda: None) -> Watched:
    """Return the loader's usual iterator, which calls `check` before each batch.

    Its workers ignore the signals that the training handles.
    """
    if not loader.num_workers:
        return _WatchedHere(loader, check)
    view, shared = copied(loader), signals.shared_with_workers()
    if shared is None:
        return _WatchedWorkers(view, check)
    view.worker_init_fn = _Spared(loader.worker_init_fn, shared)
    with sheltered(view, shared[0]):
        return _WatchedWorkers(view, check)


class _Spared:
    """Lets a worker live through signals, and then does what the user's `worker_init_fn` does."""

    def __init__(self, init: Callable[[int], object] | None, shared: signals.Shared) -> None:
        self._init = init
        self._shared = shared

    def __call__(self, number: int) -> None:
        signals.spare(self._shared)
        if self._init is not None:
            self._init(number)


class Watched(_BaseDataLoaderIter):
    """An iterator of torch's own kind, which knows whether it is in the middle of a pass."""

    def __init__(self, loader: DataLoader[Any], check: Callable[[], None]) -> None:
        self._check = check
        self._has_ended = False
        super().__init__(loader)

    def __next__(self) -> Any:
        try:
            self._check()
        except UsageError as error:
            if shorten(error):
                raise error  # RESUMABLE_FULL_TRACEBACK=1 shows where
            raise
        try:
            return super().__next__()
        except StopIteration:
            self._has_ended = True
            raise

    def is_under_way(self) -> bool:
        """Whether it has handed out batches, and has more."""
        return bool(self._num_yielded) and not self._has_ended


class _WatchedHere(Watched, _SingleProcessDataLoaderIter):
    pass


class _WatchedWorkers(Watched, _MultiProcessingDataLoaderIter):
    pass


_Torchs = _MultiProcessingDataLoaderIter  # by name: at every batch, `super()` takes longer


def _ended(*_: object) -> Any:
    raise StopIteration


class Workers(_Unlabelled, _MultiProcessingDataLoaderIter):
    """An iterator over batches from workers, which reports the state of each."""

    def __new__(cls, *args: Any) -> Workers:
        # Not in __init__: torch's __del__ fails on a half-made object, and its traceback hides the error.
        if missing := [name for name in METHODS if not hasattr(_MultiProcessingDataLoaderIter, name)]:
            raise Unsupported(
                f"this torch's loader has no {', '.join(missing)} any more.",
                fix="use a version of torch that docs/tested.md names, or a newer resumable.",
            )
        return super().__new__(cls)

    def __init__(self, view: DataLoader[Any], order: Order, turn: int, observer: Observer) -> None:
        self._order = order
        self._turn = turn
        """The worker to give the first batch to."""
        self._observer = observer
        self._is_draining = self._has_ended = False
        self._process = os.getpid()
        self._given: defaultdict[int, deque[int]] = defaultdict(deque)
        self._failed_by: dict[int, int] = {}
        """The workers of errors that are to be handed out: older versions of torch do not tell."""
        super().__init__(view)
        # Before multiprocessing ends its daemons by SIGTERM: torch would report them as killed.
        util.Finalize(self, _end, (weakref.ref(self),), exitpriority=100)

    def end(self) -> None:
        """End the workers; another thread that waits for a batch gets StopIteration."""
        self._has_ended = True
        self._next_data = self._try_get_data = _ended  # type: ignore[method-assign]
        self._shutdown_workers()

    def _shutdown_workers(self, getpid: Callable[[], int] = os.getpid) -> None:
        # A forked process shares the event and the queues that end its parent's workers. At the interpreter's
        # end the names of this module may be gone.
        if getpid() == self._process:
            super()._shutdown_workers()

    def processes(self) -> set[int | None]:
        """Return the process ids of the workers."""
        return {worker.pid for worker in self._workers}

    def begin_epoch(self, view: DataLoader[Any]) -> None:
        """Begin another epoch with the same workers."""
        self._reset(view)

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        if not first_iter:
            self._discard()
        self._given.clear()
        self._observer.order_begins()
        super()._reset(loader, first_iter)

    def _discard(self) -> None:
        # Batches that were made ahead have moved the workers on, though they are discarded.
        for _, info in sorted(self._task_info.items()):
            if len(info) == 2:
                self._report_lost(info[1])
        for worker, is_active in enumerate(self._workers_status):
            if not is_active:
                self._observer.ran_out(worker)
        self._is_draining = True

    def _report_lost(self, data: Any) -> None:
        if isinstance(data, (tuple, list)):
            self._observer.discarded(data[1])
        elif hasattr(data, "worker_id"):
            self._observer.ran_out(data.worker_id)

    def _get_data(self) -> Any:
        try:
            found = _Torchs._get_data(self)  # type: ignore[no-untyped-call]
        except RuntimeError:
            if self._has_ended:  # while it waited, with a timeout
                raise StopIteration from None
            raise
        number, data = found
        if self._is_draining:
            self._report_lost(data)
        if isinstance(data, ExceptionWrapper) and number in self._task_info:
            self._failed_by[id(data)] = self._task_info[number][0]
        return found

    def _try_put_index(self) -> None:
        if self._send_idx == 0 and not self._given:
            self._is_draining = False
            self._observer.batches_begin()
            # Turn the cycle, not the states: a worker's number decides what it reads and its seed.
            for _ in range(self._turn):
                next(self._worker_queue_idx_cycle)
            self._turn = 0
        sent = self._send_idx
        _Torchs._try_put_index(self)
        if self._send_idx > sent:
            self._given[self._task_info[sent][0]].append(self._order.sent)

    def _process_data(self, data: Any, *worker: int) -> Any:
        if isinstance(data, (tuple, list)):
            data, stamp = data
            by = stamp[0]
            self._observer.came_out(stamp, self._given[by].popleft(), by)
        else:
            by = self._failed_by.pop(id(data), None)
            number = self._given[by].popleft() if by is not None else None
            self._observer.came_out(None, number, by)
        return _Torchs._process_data(self, data, *worker)  # type: ignore[no-untyped-call]
