"""A condition variable that the handler of a signal may interrupt at any line."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

_LONGEST = 0.1
"""Seconds until a thread looks again by itself: one that was to wake it may have been interrupted."""


class ConditionWithoutLock:
    """Lets threads wait until something is true that can be read without a lock.

    A handler may wait for a thread that waits here. With a `threading.Condition`, the thread that the
    handler interrupts may hold the lock, and all three would wait for each other.
    """

    def __init__(self) -> None:
        self._waiting: list[SimpleQueue[None]] = []

    def notify_all(self) -> None:
        """Let all threads that wait look again."""
        for queue in [*self._waiting]:
            queue.put(None)

    def wait_for(self, is_true: Callable[[], bool], timeout: float = float("inf")) -> bool:
        """Wait until `is_true()`; return False if it is not after `timeout` seconds."""
        end = time.monotonic() + timeout
        mine: SimpleQueue[None] = SimpleQueue()
        self._waiting.append(mine)
        try:
            while not is_true():
                if (left := end - time.monotonic()) <= 0:
                    return False
                with contextlib.suppress(Empty):
                    mine.get(timeout=min(left, _LONGEST))
            return True
        finally:
            self._waiting.remove(mine)
