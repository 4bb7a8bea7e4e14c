"""Lets workers begin with signals blocked, and ends those that ignore them as the process ends."""

from __future__ import annotations

import contextlib
import multiprocessing
import weakref
from collections.abc import Collection, Iterator
from multiprocessing import resource_tracker, util
from typing import Any

from torch.utils.data import DataLoader

from ...processes import signals


@contextlib.contextmanager
def sheltered(view: DataLoader[Any], numbers: Collection[int]) -> Iterator[None]:
    """Let workers that are made for the loader `view` begin with these signals blocked."""
    if not numbers or not signals.CAN_BLOCK:
        yield
        return
    context: Any = view.multiprocessing_context or multiprocessing
    if context.get_start_method() != "fork":
        # Starting the tracker unblocks SIGINT and SIGTERM in this thread, so do it first.
        resource_tracker.ensure_running()
    if context.get_start_method() == "forkserver":
        from .forkserver import Context

        view.multiprocessing_context = Context()
    before = {*multiprocessing.active_children()}
    if not _spared:
        # After the finalizers that end the loops, and before multiprocessing waits for its daemons.
        util.Finalize(None, _end_spared, exitpriority=50)
    with signals.blocked(numbers):
        try:
            yield
        finally:
            _spared.update({*multiprocessing.active_children()} - before)


def _end_spared() -> None:
    """End the workers that are left as the process ends, with a timeout for each."""
    there = [worker for worker in multiprocessing.active_children() if worker in _spared]
    for worker in there:
        worker.terminate()
    for worker in there:
        worker.join(_PATIENCE)
        if worker.is_alive():
            worker.kill()


_spared: weakref.WeakSet[Any] = weakref.WeakSet()
"""The workers that ignore signals."""
_PATIENCE = 5
"""Seconds for a worker to end as the process exits."""
