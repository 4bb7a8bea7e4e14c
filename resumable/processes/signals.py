"""Signals that ask a training to leave: noted in its loops, and acted on between two batches."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Collection, Iterator, Sequence
from multiprocessing import sharedctypes, util
from types import FrameType
from typing import Any

Shared = tuple[tuple[int, ...], Any]
"""The signals that a training notes, and whether it does so now: for the processes that load for it."""

CAN_BLOCK = hasattr(signal, "pthread_sigmask")
"""Whether signals can be blocked here: not on Windows."""

_noting: weakref.ref[Signals] | None = None


class Signals:
    """The signals that a training has got in its loops; outside of them each does what it did before.

    >>> signals = Signals([signal.SIGTERM])
    >>> signals.begin()
    >>> signal.raise_signal(signal.SIGTERM)
    >>> signals.received
    <Signals.SIGTERM: 15>
    """

    def __init__(self, watched: Sequence[signal.Signals], *, is_told: bool = True) -> None:
        self._watched = tuple(watched)
        self._is_told = is_told
        self._before: dict[int, Any] = {}
        self._loops = 0
        self._is_in_loop: Any = None
        self._interrupts = 0
        self._process = os.getpid()
        self.received: signal.Signals | None = None
        """The first signal that nobody has acted on yet."""
        self.received_at = 0.0
        """When it came, by the monotonic clock."""

    def begin(self) -> None:
        """Note signals from here on: a loop has begun."""
        self._loops += 1
        if self._loops > 1 or not self._watched or threading.current_thread() is not threading.main_thread():
            return
        global _noting
        _noting = weakref.ref(self)
        if self._is_in_loop is None:
            self._is_in_loop = _Flag()
            _end_at_exit(self)
        self._is_in_loop.value = True
        for number in self._watched:
            before = signal.getsignal(number)
            # One that is ignored was meant to be (nohup, a job in the background); None is not Python's.
            if before not in (signal.SIG_IGN, None, self._note):
                self._before[number] = before
                signal.signal(number, self._note)

    def end(self) -> None:
        """Note no more signals: a loop has ended."""
        self._loops = max(0, self._loops - 1)
        if not self._loops:
            self._let_go()

    def close(self) -> None:
        """Note no more signals, though somebody may still keep a loop that an error has left."""
        self._loops = 0
        self._let_go()

    def _let_go(self) -> None:
        # (a child that was forked has the very flag of its parent's workers)
        if self._is_in_loop is not None and os.getpid() == self._process:
            self._is_in_loop.value = False
        if threading.current_thread() is not threading.main_thread():
            # Only the main thread may; until it does, each signal is passed on.
            return
        for number, before in [*self._before.items()]:
            # Who has put another handler on top of this one still calls it.
            if signal.getsignal(number) in (self._note, _ignore):
                signal.signal(number, before)
                # (a loop that is collected meanwhile lets go, too)
                self._before.pop(number, None)

    def acted_on(self) -> None:
        """Note that the training has done what was asked for: the next signal is the first again."""
        self.received, self._interrupts = None, 0

    def pass_on(self) -> None:
        """Let what was noted, and not acted on, do what it would have done without this."""
        received, self.received = self.received, None
        if received is None:
            return
        before = self._before.get(received, signal.getsignal(received))
        # (any other handler has been called when it was noted)
        if not callable(before) or before is signal.default_int_handler:
            _do(received, None, before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number, signal.SIG_DFL)
        # (a child that was forked has no part in this)
        if os.getpid() != self._process or not self._loops:
            if not self._is_loading_for_it():
                _do(number, frame, before)
            return
        if number == signal.SIGINT:
            self._count_interrupt(frame)
        if self.received is None:
            self.received, self.received_at = signal.Signals(number), time.monotonic()
        self._quiet_lost_workers()
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def _is_loading_for_it(self) -> bool:
        # Workers of a loader that we do not know (a validation's): Ctrl-C in a terminal reaches them too.
        data = sys.modules.get("torch.utils.data")
        is_worker = data is not None and data.get_worker_info() is not None
        return is_worker and self._is_in_loop.value

    def _count_interrupt(self, frame: FrameType | None) -> None:
        self._interrupts += 1
        if self._interrupts > 1:
            # (else whoever closes this training later would be interrupted once more)
            self.received = None
            signal.default_int_handler(signal.SIGINT, frame)
        if self._is_told:
            # (print() could have been interrupted, and is not to be called twice at once)
            with contextlib.suppress(OSError):
                os.write(2, _HINT)

    def _quiet_lost_workers(self) -> None:
        # Whoever signals a whole group (torchrun, SLURM, a terminal) also ends the workers of loaders that we
        # do not know; torch would raise that in the middle of the batch that is still to be finished.
        if hasattr(signal, "SIGCHLD") and signal.SIGCHLD not in self._before:
            before = signal.getsignal(signal.SIGCHLD)
            if callable(before):
                self._before[signal.SIGCHLD] = before
                signal.signal(signal.SIGCHLD, _ignore)

    def shared(self) -> Shared | None:
        """Return what a worker needs to know of this."""
        if self._is_in_loop is None:
            return None
        return tuple(number for number in self._before if number in self._watched), self._is_in_loop


class _Flag:
    """A boolean that processes share: those that are forked as it is, others when it is sent to them."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 1)
        self._sent: Any = None

    @property
    def value(self) -> bool:
        """What it is now."""
        return self._memory[0] == 1

    @value.setter
    def value(self, value: bool) -> None:
        self._memory[0] = value
        if self._sent is not None:
            self._sent.value = value

    def __reduce__(self) -> Any:
        # (such a value needs a file, so only those who need it get one)
        if self._sent is None:
            self._sent = sharedctypes.RawValue(ctypes.c_bool, self.value)
        return _as_it_is, (self._sent,)


def _as_it_is(value: Any) -> Any:
    return value


def shared_with_workers() -> Shared | None:
    """Return what a worker that is made now needs to know of the training that notes signals, if one does."""
    there = _noting() if _noting else None
    return there.shared() if there else None


@contextlib.contextmanager
def blocked(numbers: Collection[int]) -> Iterator[None]:
    """Block signals in this thread, and in the processes that it starts, from their first instruction on.

    Without this, one that reaches a worker before `spare` was called there would end it.
    """
    if not numbers or not CAN_BLOCK:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def spare(shared: Shared) -> None:
    """Let this process, a worker, live through the signals that its training notes.

    The batch in hand of the training, and of its other processes, may need what is still to be loaded.
    """
    numbers, is_in_loop = shared

    def note(number: int, frame: FrameType | None) -> None:
        # At the training's end its workers are ended by the same signal.
        if not is_in_loop.value:
            _do(number, frame, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    for number in numbers:
        signal.signal(number, note)
    if CAN_BLOCK:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def _do(number: int, frame: FrameType | None, before: Any) -> None:
    if callable(before):
        before(number, frame)
    elif before == signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing; SIG_IGN would leave no exit status of a child to be asked for."""


def _end_at_exit(signals: Signals) -> None:
    kept = weakref.ref(signals)
    # Before multiprocessing ends its daemons, by a signal, and waits for them: in a process that it has
    # forked, too, where atexit does nothing.
    util.Finalize(None, lambda: _end(kept()), exitpriority=100)


_HINT = b"\nCtrl-C: saving when this batch (or validation) has ended; again to leave at once\n"


def _end(signals: Signals | None) -> None:
    # A loop that an error has left may still be kept by its traceback, and its workers have to end now.
    if signals is not None and signals._process == os.getpid():
        signals.close()
