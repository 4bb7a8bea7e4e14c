"""One call to a filesystem that may hang: it is watched while it moves, and can be given up."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any

Moved = Callable[[int], object]
"""What is told how many bytes have been moved; any thread may call it."""


class TooLong(ValueError):
    """More bytes came than there should be."""


class Meter:
    """Counts the bytes that a call moves: one that moves is alive."""

    def __init__(self, moved: Moved, limit: int) -> None:
        self.last = time.monotonic()
        """When something was moved for the last time."""
        self._moved = moved
        self._limit = limit
        self._done = 0
        self._is_stopped = False

    def add(self, size: int) -> None:
        """Note that so many bytes have been moved."""
        self.last = time.monotonic()
        if self._is_stopped:
            raise CancelledError
        if self._done + size > self._limit:
            raise TooLong(f"it has more than the {self._limit:,} bytes that it should have")
        self._done += size
        self._moved(size)

    def fill(self) -> None:
        """Note that all has been moved; not every filesystem tells of each piece."""
        self.add(self._limit - self._done)

    def undo(self) -> None:
        """Note that what was moved counts no more."""
        self._moved(-self._done)
        self._done = 0

    def stop(self) -> None:
        """Let the next piece be the last."""
        self._is_stopped = True

    def callback(self) -> Any:
        """Return this as fsspec's filesystems want to be given it."""
        from fsspec.callbacks import Callback

        meter = self

        class Told(Callback):  # type: ignore[misc, unused-ignore]
            def absolute_update(self, value: int) -> None:
                meter.add(value - meter._done)

            def relative_update(self, inc: int = 1) -> None:
                meter.add(inc)

        return Told()


class Request:
    """One call that is on its way. Whoever waits for it may give it up, though it may never end."""

    def __init__(self, meter: Meter | None = None) -> None:
        self._meter = meter or Meter(lambda size: None, 0)
        self._guard = threading.Lock()
        self._ended = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None
        self._cancel: Callable[[], object] = lambda: None

    def begin_in_loop(self, work: Coroutine[Any, Any, Any], loop: Any) -> None:
        """Begin it as a task of a loop, where it can be ended at any moment."""
        future = asyncio.run_coroutine_threadsafe(work, loop)
        self._cancel = future.cancel
        future.add_done_callback(lambda found: self._run(found.result))

    def begin_in_thread(self, job: Callable[[], Any]) -> None:
        """Begin it in a thread of its own, which ends with the next piece that it moves."""
        # A daemon: one that hangs for ever must not keep the process.
        threading.Thread(target=self._run, args=(job,), name="resumable-remote", daemon=True).start()

    def _run(self, job: Callable[[], Any]) -> None:
        try:
            value, error = job(), None
        except BaseException as exc:
            value, error = None, exc
        self._end(value, error)

    def _end(self, value: Any, error: BaseException | None) -> None:
        with self._guard:
            if not self._ended.is_set():
                self._value, self._error = value, error
                self._ended.set()

    def is_pending(self) -> bool:
        """Whether it is on its way."""
        return not self._ended.is_set()

    def give_up(self, error: BaseException) -> None:
        """End it, as far as it lets itself be ended; who waits for it gets the error."""
        self._meter.stop()
        self._end(None, error)
        self._cancel()

    def wait(self, patience: float) -> Any:
        """Return what it has returned; TimeoutError if nothing moves for so many seconds."""
        while not self._ended.wait(max(0.0, self._meter.last + patience - time.monotonic())):
            if time.monotonic() - self._meter.last >= patience:
                raise TimeoutError(errno.ETIMEDOUT, f"nothing has moved for {round(patience, 1):g} s")
        if self._error:
            raise self._error
        return self._value
