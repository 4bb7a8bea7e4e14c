"""Torch's iterators over a loader, made to go on in the middle; all private names of torch are here."""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any, Protocol

from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from .errors import Unsupported
from .order import Order
from .worker import Stamp, Worker

METHODS = ("_reset", "_try_put_index", "_process_data", "_get_data", "_try_get_data", "_next_data")
ATTRIBUTES = ("_worker_queue_idx_cycle", "_send_idx", "_task_info", "_workers_status")
"""What is used of torch's iterator beyond its public side, and what of it only exists in an instance."""


class Told(Protocol):
    """Who is told what happens in an iterator."""

    def order_begins(self) -> None:
        """The order of an epoch is about to be drawn."""

    def batches_begin(self) -> None:
        """What was left of the epoch before has been thrown away."""

    def came_out(self, stamped: Stamp | None, number: int | None, worker: int | None) -> None:
        """A batch is handed out; one without a stamp is an error of its worker's."""

    def thrown_away(self, stamped: Stamp) -> None:
        """A batch was made, and nobody wants it any more."""

    def ran_out(self, worker: int) -> None:
        """A worker's stream has come to its end."""


def stand_in(loader: DataLoader[Any], dataset: Dataset[Any], order: Order, worker: Worker) -> DataLoader[Any]:
    """Return a loader like the user's, with our order, worker and wrapped dataset; theirs stays as it is."""
    view = copy.copy(loader)
    # (torch refuses to set these, lest they change under a running iterator)
    vars(view)["dataset"] = dataset
    vars(view)["sampler" if loader.batch_sampler is None else "batch_sampler"] = order
    view.collate_fn = worker
    if loader.num_workers:
        view.worker_init_fn = worker.begin
    return view


def iterates_as_torch_does(loader: DataLoader[Any]) -> bool:
    """Whether the loader's class leaves it to torch to make its iterators."""
    kind = type(loader)
    return kind.__iter__ is DataLoader.__iter__ and kind._get_iterator is DataLoader._get_iterator


def handed_out(value: object) -> int | None:
    """Return how many batches one of torch's iterators has handed out; None of what is no such iterator."""
    # (by the kind alone: to ask the object could call its code)
    is_torchs = _BaseDataLoaderIter in type(value).__mro__
    return value.__dict__.get("_num_yielded", 0) if is_torchs else None


def in_process(view: DataLoader[Any]) -> Iterator[Any]:
    """Return an iterator over stamped batches that are loaded in this process."""
    return DataLoader.__iter__(view)


class Workers(_MultiProcessingDataLoaderIter):
    """An iterator over batches from workers, which tells where each of them stands."""

    def __new__(cls, *args: Any) -> Workers:
        # Not in __init__: torch's __del__ fails on what was never made, and its traceback hides the error.
        if missing := [name for name in METHODS if not hasattr(_MultiProcessingDataLoaderIter, name)]:
            raise Unsupported(
                f"this torch's loader has no {', '.join(missing)} any more.",
                fix="use a version of torch that docs/tested.md names, or a newer resumable.",
            )
        return super().__new__(cls)

    def __init__(self, view: DataLoader[Any], order: Order, turn: int, told: Told) -> None:
        self._order = order
        self._turn = turn
        """The worker to give the first batch to."""
        self._told = told
        self._is_draining = self._has_ended = False
        self._given: defaultdict[int, deque[int]] = defaultdict(deque)
        super().__init__(view)

    def end(self) -> None:
        """End the workers; who waits for a batch of theirs, in another thread, has come to the end."""
        self._has_ended = True
        self._shutdown_workers()

    def _next_data(self) -> Any:
        if self._has_ended:
            raise StopIteration
        return super()._next_data()  # type: ignore[no-untyped-call]

    def _try_get_data(self, *timeout: float) -> tuple[bool, Any]:
        found: tuple[bool, Any] = super()._try_get_data(*timeout)  # type: ignore[no-untyped-call]
        if self._has_ended and not found[0]:
            raise StopIteration
        return found

    def begin_anew(self, view: DataLoader[Any]) -> None:
        """Begin another epoch with the same workers."""
        self._reset(view)

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        if not first_iter:
            self._throw_away()
        self._given.clear()
        self._told.order_begins()
        super()._reset(loader, first_iter)

    def _throw_away(self) -> None:
        # What was made ahead has moved the workers on, though nobody gets it.
        for _, info in sorted(self._task_info.items()):
            if len(info) == 2:
                self._told_of_lost(info[1])
        for worker, is_active in enumerate(self._workers_status):
            if not is_active:
                self._told.ran_out(worker)
        self._is_draining = True

    def _told_of_lost(self, data: Any) -> None:
        if isinstance(data, (tuple, list)):
            self._told.thrown_away(data[1])
        elif hasattr(data, "worker_id"):
            self._told.ran_out(data.worker_id)

    def _get_data(self) -> Any:
        number, data = super()._get_data()  # type: ignore[no-untyped-call]
        if self._is_draining:
            self._told_of_lost(data)
        return number, data

    def _try_put_index(self) -> None:
        if self._send_idx == 0 and not self._given:
            self._is_draining = False
            self._told.batches_begin()
            # The cycle and not the states: a worker's number decides what it reads and how it is seeded.
            for _ in range(self._turn):
                next(self._worker_queue_idx_cycle)
            self._turn = 0
        sent = self._send_idx
        super()._try_put_index()
        if self._send_idx > sent:
            self._given[self._task_info[sent][0]].append(self._order.sent)

    def _process_data(self, data: Any, *worker: int) -> Any:
        is_error = not isinstance(data, (tuple, list))
        stamp = None if is_error else data[1]
        by = stamp[0] if stamp else worker[0] if worker else None
        number = self._given[by].popleft() if by is not None else None
        self._told.came_out(stamp, number, by)
        return super()._process_data(data if is_error else data[0], *worker)  # type: ignore[no-untyped-call]
