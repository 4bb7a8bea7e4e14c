"""How saving and loading share a process with the training."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

T = TypeVar("T")


def yield_to_training() -> None:
    """Lower the priority of this thread, and of those that it starts, below the training's."""
    if sys.platform == "linux":
        # A sandbox may forbid it.
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            # Never raised: root may, and the training may run at a lower one already.
            os.setpriority(os.PRIO_PROCESS, thread, max(5, os.getpriority(os.PRIO_PROCESS, thread)))


def allow_captures() -> None:
    """Let other threads capture CUDA graphs while this one works with the GPU.

    By default a capture fails as soon as any thread makes a call that captures forbid, unless that thread
    has opted out.
    """
    if driver := _driver():
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))


@functools.cache
def _driver() -> Any:
    """Return NVIDIA's driver library, if there is one."""
    with contextlib.suppress(OSError):
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    return None


_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector.

    Thousands of small objects come and go, which makes it scan every object of the process again and again:
    that takes longer than everything else.
    """
    was_on = gc.isenabled()
    try:
        # Not before: an interrupt between the two would leave it off.
        gc.disable()
        yield
    finally:
        if was_on:
            gc.enable()


def in_threads(job: Callable[[T], object], items: Iterable[T], count: int) -> None:
    """Run a job for each item in this thread and `count` - 1 others; the first error stops them all.

    No job runs any more when it returns or raises, after an interrupt too: a job may write into memory or a
    file that its caller frees.

    >>> found = []
    >>> in_threads(found.append, [1, 2, 3], count=2)
    >>> sorted(found)
    [1, 2, 3]
    """
    guard, rest, errors = threading.Lock(), iter(items), list[BaseException]()
    # No Event: an interrupt may leave its lock taken, and the next to set it would wait for ever.
    stop, at_work = list[bool](), set[int]()

    def work() -> None:
        # First this, then a look at `stop`: who has set that looks at `at_work` afterwards.
        at_work.add(threading.get_ident())
        try:
            while not stop:
                with guard:
                    item = next(rest, stop)
                if item is stop:
                    break
                job(cast("T", item))
        except BaseException as exc:
            errors.append(exc)
            stop.append(True)
        finally:
            at_work.discard(threading.get_ident())

    others = [threading.Thread(target=work, name="resumable-files") for _ in range(count - 1)]
    try:
        for one in others:
            # Where the system refuses a thread, those that there are do all.
            with contextlib.suppress(RuntimeError):
                one.start()
        work()
        for one in (one for one in others if one.ident):
            one.join()
    except BaseException as exc:
        # An interrupt at the start of another, or while it was waited for.
        errors.append(exc)
    while True:
        # Not by what a thread says of itself: after an interrupt of its start or of a wait that is wrong.
        try:
            stop.append(True)
            while at_work - {threading.get_ident()}:
                time.sleep(0.001)
            break
        except BaseException as exc:
            errors.append(exc)
    if errors:
        _raise_one(errors)


def _raise_one(errors: list[BaseException]) -> None:
    # An interrupt is no damage that another checkpoint could make good.
    error = next((one for one in errors if not isinstance(one, Exception)), errors[0])
    # Its traceback holds what was read or written: a cycle would keep that until a collection.
    errors.clear()
    try:
        raise error
    finally:
        del error


def in_daemons(job: Callable[[T], object], items: Iterable[T], count: int) -> None:
    """Run a job for each item in `count` threads; when all have ended, raise the first error.

    Unlike the threads of a pool they are daemons: they may hang, and must not keep the process alive.

    >>> found = []
    >>> in_daemons(found.append, [1, 2, 3], count=2)
    >>> sorted(found)
    [1, 2, 3]
    """
    guard, rest, errors = threading.Lock(), iter(items), list[BaseException]()

    def work() -> None:
        with contextlib.suppress(StopIteration):
            while not errors:
                with guard:
                    item = next(rest)
                try:
                    job(item)
                except BaseException as exc:
                    errors.append(exc)

    threads = [threading.Thread(target=work, name="resumable-remote", daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
