"""Calls to a filesystem that may hang: watched while they move bytes, and given up when nothing moves."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any, TypeVar

T = TypeVar("T")

Moved = Callable[[int], object]
"""Called with the number of bytes that were moved, by any thread."""


class Meter:
    """Counts the bytes that a call moves: one that moves bytes is alive. As a context, of one transfer.

    >>> moved = []
    >>> with Meter(moved.append, 100) as meter:
    ...     meter.add(30)
    >>> moved
    [30, 70]
    """

    def __init__(self, moved: Moved = lambda size: None, size: int = 0) -> None:
        self.last = time.monotonic()
        """When bytes were moved for the last time."""
        self._moved = moved
        self._size = size
        self._done = 0
        self._is_stopped = False

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Not every filesystem reports every piece, and of a transfer that failed nothing counts.
        self._report(-self._done if kind else self._size - self._done)

    def add(self, size: int) -> None:
        """Count bytes that were moved; CancelledError if the call was given up."""
        self.last = time.monotonic()
        if self._is_stopped:
            raise futures.CancelledError
        # A client that sends a part again reports it again.
        self._report(min(size, self._size - self._done))

    def _report(self, size: int) -> None:
        self._done += size
        self._moved(size)

    def stop(self) -> None:
        """Make the next piece the last one."""
        self._is_stopped = True

    def callback(self) -> Any:
        """Return the callback that fsspec's filesystems take."""
        from fsspec.callbacks import Callback

        meter = self

        class Metered(Callback):  # type: ignore[misc, unused-ignore]
            def absolute_update(self, value: int) -> None:
                meter.add(value - meter._done)

            def relative_update(self, inc: int = 1) -> None:
                meter.add(inc)

        return Metered()


class Call:
    """A call in progress, which can be given up though it may never return."""

    def __init__(self, future: futures.Future[Any], meter: Meter | None = None) -> None:
        self._future = future
        self._meter = meter or Meter()

    def is_done(self) -> bool:
        """Return whether it has returned, raised or was given up."""
        return self._future.done()

    def give_up(self) -> None:
        """Stop it as far as that is possible; whoever waits for it gets a CancelledError."""
        self._meter.stop()
        self._future.cancel()

    def wait(self, patience: float) -> Any:
        """Return its result; TimeoutError if no byte has moved for `patience` seconds."""
        while True:
            left = self._meter.last + patience - time.monotonic()
            try:
                return self._future.result(max(0.0, left))
            except (TimeoutError, futures.TimeoutError):
                # The call itself may have raised one.
                if self._future.done():
                    return self._future.result()
            if time.monotonic() - self._meter.last >= patience:
                raise TimeoutError(errno.ETIMEDOUT, f"nothing has moved for {round(patience, 1):g} s")


def in_thread(job: Callable[[], T]) -> futures.Future[T]:
    """Run a job in a thread of its own, which does not keep the process alive: it may hang for ever."""
    future = futures.Future[T]()

    def work() -> None:
        # A future that was given up meanwhile takes no result.
        with contextlib.suppress(futures.InvalidStateError):
            try:
                found = job()
            except BaseException as exc:
                future.set_exception(exc)
            else:
                future.set_result(found)

    threading.Thread(target=work, name="resumable-remote", daemon=True).start()
    return future
