"""A connection to a filesystem of fsspec: its calls have deadlines, are retried, and can be abandoned."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from functools import partial
from typing import Any, TypeVar

from ..errors import RemoteError
from . import failures, filesystem, url
from .deadline import Call, Meter, in_thread

T = TypeVar("T")
C = TypeVar("C", bound="Connection")


class Connection:
    """A connection to an address. A call that moves no byte for `patience` seconds is given up.

    What may work a little later is retried for as long, at growing intervals. After that a RemoteError says
    why, without any secret.
    """

    def __init__(self, place: str, options: Mapping[str, Any], patience: float) -> None:
        url.check(place)
        self.url = url.shown(place)
        """The address without secrets."""
        self.trouble: str | None = None
        """Why the last try failed, while it is retried."""
        self._place = place
        self._options = options
        self._patience = patience
        self._secrets = url.secrets_in(place, options)
        self._guard = threading.Lock()
        self._opened: tuple[Any, str] | None = None
        self._pending: set[Call] = set()
        self._abandoned = threading.Event()

    def with_patience(self: C, patience: float) -> C:
        """Return another connection to the same address."""
        return type(self)(self._place, self._options, patience)

    def open(self) -> tuple[Any, str]:
        """Return the filesystem, connected, and the path of the address on it."""
        if (opened := self._opened) is None:
            from fsspec import get_filesystem_class

            # Before the clock runs: from a slow disk the import may take longer than a remote has to answer.
            get_filesystem_class(self._place.partition("://")[0])
            # Some filesystems connect while they are made, which may hang like any other call.
            made = self.do(self._make)
            with self._guard:
                opened = self._opened = self._opened or made
        return opened

    def _make(self) -> tuple[Any, str]:
        from fsspec.core import url_to_fs

        options = filesystem.without_retries(self._place, self._options)
        try:
            # Not the cached one that others use: a connection that hangs is closed with its filesystem.
            made: tuple[Any, str] = url_to_fs(self._place, **options, skip_instance_cache=True)
        except FileNotFoundError as exc:
            # A file with a key, for example: it would look like an empty remote.
            raise PermissionError(f"{exc}") from None
        return made

    def retry(self, problem: str, job: Callable[[], T]) -> T:
        """Return the result of a job, retried while that may help; RemoteError with the problem if not."""
        end, delay = time.monotonic() + self._patience, _FIRST_DELAY
        while True:
            self._refuse_if_abandoned()
            try:
                found = job()
                self.trouble = None
                return found
            except RemoteError:
                raise
            except Exception as exc:
                self._refuse_if_abandoned()
                if failures.is_final(exc) or time.monotonic() + delay > end:
                    # Not "from exc": its text may hold a secret.
                    raise self._error(problem, exc) from None
                self.trouble = failures.text(exc, self._secrets)
                self._reconnect()
            # Processes that were refused together must not come back together.
            self._abandoned.wait(delay * _DICE.uniform(0.5, 1))
            delay = min(2 * delay, _LONGEST_DELAY)

    def _error(self, problem: str, exc: BaseException) -> RemoteError:
        error = RemoteError(f"{problem}: {failures.text(exc, self._secrets)}.", fix=failures.advice(exc))
        error.is_final = failures.is_final(exc)
        return error

    def call(
        self, name: str, *args: Any, meter: Meter | None = None, in_flight: int = 0, **kwargs: Any
    ) -> Any:
        """Return the result of a filesystem's method, which may move `in_flight` bytes unseen."""
        fs, _ = self.open()
        if meter:
            kwargs["callback"] = meter.callback()
        if not filesystem.is_async(fs):
            return self.do(partial(getattr(fs, name), *args, **kwargs), meter, in_flight)
        work = getattr(fs, f"_{name}")(*args, **kwargs)
        return self._wait_for(asyncio.run_coroutine_threadsafe(work, fs.loop), meter, in_flight)

    def do(self, job: Callable[[], T], meter: Meter | None = None, in_flight: int = 0) -> T:
        """Return the result of a job that uses the filesystem."""
        found: T = self._wait_for(in_thread(job), meter, in_flight)
        return found

    def _wait_for(self, future: futures.Future[Any], meter: Meter | None, in_flight: int) -> Any:
        call = Call(future, meter)
        with self._guard:
            self._pending.add(call)
        try:
            self._refuse_if_abandoned()
            return call.wait(self._patience * (1 + in_flight / _SLOWEST))
        except BaseException:
            if not call.is_done():
                call.give_up()
                self._disconnect()
            raise
        finally:
            with self._guard:
                self._pending.discard(call)

    def is_abandoned(self) -> bool:
        """Return whether it was abandoned."""
        return self._abandoned.is_set()

    def abandon(self) -> None:
        """Give up all calls in progress, and refuse new ones."""
        self._abandoned.set()
        with self._guard:
            pending = [*self._pending]
        for call in pending:
            call.give_up()

    def _refuse_if_abandoned(self) -> None:
        if self.is_abandoned():
            raise RemoteError(f"{self.url} was given up.", fix="the next start goes on with it.")

    def interruptible(self, job: Callable[[], T]) -> T:
        """Return the result of a job that uses this; an interrupt does not wait for a call that hangs.

        >>> Connection("memory://exp", {}, 60).interruptible(lambda: 3)
        3
        """
        running: list[futures.Future[T]] = []
        try:
            running.append(in_thread(job))
            return running[0].result()
        except KeyboardInterrupt:
            self.abandon()
            # It removes its progress bar and releases the run.
            futures.wait(running, _TO_LEAVE)
            raise

    def close(self) -> None:
        """Close it, if it is not shared with others; the next call connects again."""
        if (opened := self._opened) and not filesystem.is_async(opened[0]):
            self._disconnect()

    def _reconnect(self) -> None:
        # An object store connects for each request; a client with one connection would find it closed.
        if (opened := self._opened) and not filesystem.is_object_store(opened[0]):
            self._disconnect()

    def _disconnect(self) -> None:
        with self._guard:
            opened, self._opened = self._opened, None
        # Whatever still hangs in it ends with its connection; most filesystems have none to close.
        with contextlib.suppress(Exception):
            if opened:
                opened[0].client.close()


_SLOWEST = 16 << 20
"""Bytes that have to move within one patience."""
# Python's own generator is the training's: a draw here would give it other numbers.
_DICE = random.SystemRandom()
_FIRST_DELAY = 0.5
_LONGEST_DELAY = 30.0
_TO_LEAVE = 5.0
