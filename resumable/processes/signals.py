"""Signals that ask a training to end: noted inside its loops, and acted on between two batches."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Collection, Iterator, Sequence
from multiprocessing import sharedctypes, util
from types import FrameType
from typing import Any

Shared = tuple[tuple[int, ...], Any]
"""The signals that a training notes, and a flag that is set while it does; for its loader workers."""

CAN_BLOCK = hasattr(signal, "pthread_sigmask")
"""Whether signals can be blocked; false on Windows."""

_noting: weakref.ref[Signals] | None = None


class LeftAtOnce(SystemExit, KeyboardInterrupt):
    """A second Ctrl-C: it ends the script without a traceback."""


class Signals:
    """The signals received inside a training's loops; outside of them each signal acts as it did before.

    >>> signals = Signals([signal.SIGTERM])
    >>> signals.begin()
    >>> signal.raise_signal(signal.SIGTERM)
    >>> signals.received
    <Signals.SIGTERM: 15>
    """

    def __init__(
        self, watched: Sequence[signal.Signals], *, shows_hint: bool = True, exits: bool = False
    ) -> None:
        self._watched = tuple(watched)
        self._shows_hint = shows_hint
        self._exits = exits
        self.has_left = False
        """Whether a second Ctrl-C has ended the loop without a save."""
        self._before: dict[int, Any] = {}
        self._passing: set[int] = set()
        """The signals that the handler before is being called for: it may call this one."""
        self._loops = 0
        self._is_in_loop: Any = None
        self._interrupts = 0
        self._process = os.getpid()
        self.received: signal.Signals | None = None
        """The first signal that has not been acted on."""
        self.received_at = 0.0
        """The time it came at, by the monotonic clock."""

    def begin(self) -> None:
        """Note signals from now on, as a loop begins."""
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
            # An ignored signal stays ignored (nohup, background jobs); None is one that is not Python's.
            if before not in (signal.SIG_IGN, None, self._note):
                self._before[number] = before
                signal.signal(number, self._note)

    def end(self) -> None:
        """Stop noting signals, as a loop ends."""
        self._loops = max(0, self._loops - 1)
        if not self._loops:
            self._restore_handlers()

    def close(self) -> None:
        """Stop noting signals, even if a loop that an error left is still referenced."""
        self._loops = 0
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        # A forked child shares the flag with its parent's workers.
        if self._is_in_loop is not None and os.getpid() == self._process:
            self._is_in_loop.value = False
        if threading.current_thread() is not threading.main_thread():
            # Only the main thread can set handlers; until it does, each signal is passed on.
            return
        for number, before in [*self._before.items()]:
            # A handler installed on top of this one still calls it.
            if signal.getsignal(number) in (self._note, _ignore):
                signal.signal(number, before)
                # A loop that is garbage-collected meanwhile removes entries too.
                self._before.pop(number, None)

    def acted_on(self) -> None:
        """Note that the training has done what the signal asked: the next signal is the first again."""
        self.received, self._interrupts = None, 0

    def pass_on(self) -> None:
        """Let a signal that was noted but not acted on do what it would have done by itself."""
        received, self.received = self.received, None
        if received is None:
            return
        before = self._beneath(received, signal.getsignal(received))
        # Any other handler was called when the signal was noted.
        if not callable(before) or before is signal.default_int_handler:
            _do(received, None, before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in self._passing:
            return
        before = self._beneath(number)
        if not self._is_noting():
            if not self._is_loading_for_it():
                _do(number, frame, before)
            return
        if number == signal.SIGINT:
            self._count_interrupt(frame)
        if self.received is None:
            self.received, self.received_at = signal.Signals(number), time.monotonic()
        self._quiet_lost_workers()
        if callable(before) and before is not signal.default_int_handler:
            self._passing.add(number)
            try:
                before(number, frame)
            finally:
                self._passing.discard(number)

    def _is_noting(self) -> bool:
        # A forked child does not note signals.
        return self._loops > 0 and os.getpid() == self._process

    def _beneath(self, number: int, otherwise: Any = signal.SIG_DFL) -> Any:
        """Return the handler that was there before, and before all trainings whose loops are over."""
        seen: list[Signals] = [self]
        before = self._before.get(number, otherwise)
        # A loop that an error has left may end, or be collected, in the loop of a later training: its
        # handler would then do what the signal does by itself, before that one has saved.
        while isinstance(owner := getattr(before, "__self__", None), Signals) and not owner._is_noting():
            if owner in seen:
                break
            seen.append(owner)
            before = owner._before.get(number, signal.SIG_DFL)
        # One that began again, above a later one, comes round to itself.
        return signal.SIG_DFL if owner in seen else before

    def _is_loading_for_it(self) -> bool:
        # Workers of loaders that RunState does not know (for validation) receive Ctrl-C in a terminal too.
        data = sys.modules.get("torch.utils.data")
        is_worker = data is not None and data.get_worker_info() is not None
        return is_worker and self._is_in_loop.value

    def _count_interrupt(self, frame: FrameType | None) -> None:
        self._interrupts += 1
        if self._interrupts > 1:
            # Otherwise closing this training later would be interrupted again.
            self.received = None
            if self._exits:
                self.has_left = True
                # The terminal has echoed ^C.
                with contextlib.suppress(OSError):
                    os.write(2, b"\n" * self._shows_hint)
                raise LeftAtOnce(128 + signal.SIGINT)
            signal.default_int_handler(signal.SIGINT, frame)
        if self._shows_hint:
            # The signal may have interrupted a print(), which must not be called again inside itself.
            with contextlib.suppress(OSError):
                os.write(2, _HINT)

    def _quiet_lost_workers(self) -> None:
        # A signal to the whole process group (from torchrun, SLURM, a terminal) also ends workers of loaders
        # that RunState does not know; torch would raise that before the current batch is finished.
        if hasattr(signal, "SIGCHLD") and signal.SIGCHLD not in self._before:
            before = signal.getsignal(signal.SIGCHLD)
            if callable(before):
                self._before[signal.SIGCHLD] = before
                signal.signal(signal.SIGCHLD, _ignore)

    def shared(self) -> Shared | None:
        """Return what a worker needs to note the same signals."""
        if self._is_in_loop is None:
            return None
        return tuple(number for number in self._before if number in self._watched), self._is_in_loop


class _Flag:
    """A boolean shared between processes: with forked ones at once, with others by pickling it."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 1)
        self._sent: Any = None

    @property
    def value(self) -> bool:
        """The current value."""
        return self._memory[0] == 1

    @value.setter
    def value(self, value: bool) -> None:
        self._memory[0] = value
        if self._sent is not None:
            self._sent.value = value

    def __reduce__(self) -> Any:
        # A shared value needs a file, so it is created only when one is needed.
        if self._sent is None:
            self._sent = sharedctypes.RawValue(ctypes.c_bool, self.value)
        return _identity, (self._sent,)


def _identity(value: Any) -> Any:
    return value


def is_of_a_handler(error: BaseException) -> bool:
    """Whether a signal handler raised this error: it can come out of any line that was running."""
    codes = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def shared_with_workers() -> Shared | None:
    """Return what a worker that starts now needs to note the training's signals; None if none notes any."""
    there = _noting() if _noting else None
    return there.shared() if there else None


@contextlib.contextmanager
def blocked(numbers: Collection[int]) -> Iterator[None]:
    """Block signals in this thread, and in the processes that it starts from their first instruction on.

    Otherwise a signal that reaches a worker before it calls `spare` would end it.
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
    """Let this worker process survive the signals that its training notes.

    The training and its other processes may need what is still to be loaded to finish the current batch.
    """
    numbers, is_in_loop = shared

    def note(number: int, frame: FrameType | None) -> None:
        # Outside of the training's loops the signal ends its workers as usual.
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
    """Do nothing. SIG_IGN would discard the exit status of children."""


def _end_at_exit(signals: Signals) -> None:
    kept = weakref.ref(signals)
    # This runs before multiprocessing terminates its daemons with a signal and joins them; unlike atexit, it
    # also runs in processes that multiprocessing forked.
    util.Finalize(None, lambda: _end(kept()), exitpriority=100)


_HINT = b"\nCtrl-C: saving when this batch (or validation) has ended; again to leave at once\n"


def _end(signals: Signals | None) -> None:
    # A traceback may still reference a loop that an error left, and its workers have to end now.
    if signals is not None and signals._process == os.getpid():
        signals.close()
