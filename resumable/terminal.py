"""Rows at the bottom of a terminal or below a notebook's cell; what anyone prints scrolls above them."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

Rows = Callable[[int], list[str]]
"""Returns the rows, each at most this many characters wide."""

_LEAST_HEIGHT = 6
_NOTEBOOK_WIDTH = 100

# Escape sequences: ESC 7 and ESC 8 save and restore the cursor, ESC D moves it down and scrolls at the end.
_NO_REGION = "\x1b7\x1b[r\x1b8"


def _cleared_below(rows: int) -> str:
    """Return what clears all that is below the cursor, makes room there and saves the cursor.

    After a resize, or a kill of the process before this one, old rows may be anywhere below the cursor.
    """
    return "\x1b[J" + "\x1bD" * rows + _up(rows) + "\x1b7"


def _up(rows: int) -> str:
    return f"\x1b[{rows}A" if rows else ""


def is_terminal() -> bool:
    """Return whether stderr is a terminal that can show rows at its bottom."""
    # stderr may be missing, closed, or a stream without a file.
    with contextlib.suppress(AttributeError, ValueError, OSError):
        is_capable = os.environ.get("TERM", "dumb") not in ("", "dumb") and sys.platform != "win32"
        return is_capable and os.isatty(sys.stderr.fileno())
    return False


def is_notebook() -> bool:
    """Return whether this is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return "IPKernelApp" in getattr(shell, "config", ())


class _Claim(NamedTuple):
    rows: int
    size: os.terminal_size


class Terminal:
    """The last rows of the terminal of stderr, outside of the region that scrolls.

    A row is drawn with one write, which leaves the cursor where it was: output of this process, its threads,
    its children and of C libraries stays whole.
    """

    def __init__(self) -> None:
        # Reentrant: SIGTSTP may come while its own thread draws.
        self._lock = threading.RLock()
        self._claim: _Claim | None = None
        self._rows: Rows | None = None
        self._is_drawing = False
        self._process = 0

    def paint(self, rows: Rows) -> None:
        """Draw the rows; do nothing in a background job, and if the terminal is gone."""
        if self._is_of_a_parent():
            return
        # A lost terminal must not end the training.
        with self._lock, contextlib.suppress(OSError, ValueError, AttributeError):
            size = os.get_terminal_size(sys.stderr.fileno())
            if size.lines < _LEAST_HEIGHT:
                self.clear()
            elif _is_in_foreground():
                self._rows, self._is_drawing = rows, True
                try:
                    _write(self._drawn(rows(size.columns - 1), size))
                finally:
                    self._is_drawing = False

    def _drawn(self, lines: list[str], size: os.terminal_size) -> str:
        count = max(len(lines), self._claim.rows if self._claim else 0)
        begin, claim = "\x1b7", _Claim(count, size)
        if claim != self._claim:
            begin = f"{_NO_REGION}{_cleared_below(count)}\x1b[1;{size.lines - count}r"
            self._claim = claim
            self._watch()
        lines = [*[""] * (count - len(lines)), *lines]
        # Count rows from the bottom, and let none wrap: the terminal may have another size by now.
        drawn = "\x1b[B".join(f"\r\x1b[m{line}\x1b[K" for line in lines)
        return f"{begin}\x1b[?7l\x1b[9999;1H{_up(count - 1)}{drawn}\x1b[?7h\x1b8"

    def clear(self, last: Rows | None = None) -> None:
        """Give the rows back to the terminal; `last` stays as lines of their own."""
        if self._is_of_a_parent() or self._claim is None:
            return
        with self._lock, contextlib.suppress(OSError, ValueError, AttributeError):
            columns, self._claim = self._claim.size.columns, None
            # The spaces end a line that was begun, and do nothing at the beginning of one.
            kept = "".join(f"{line}\x1b[K\r\n" for line in last(columns - 1)) if last else ""
            kept = kept and f"\x1b[m{' ' * (columns - 1)}\r{kept}"
            _write(f"{_NO_REGION}{_cleared_below(1)}\x1b8{kept}")
            self._handle(signal.SIGTSTP, self._stop, signal.SIG_DFL)
            self._handle(signal.SIGWINCH, self._resized, signal.SIG_DFL)

    def recover(self) -> None:
        """Remove the rows that a process has left which was killed with SIGKILL."""
        if self._claim is None and is_terminal() and _is_in_foreground():
            with contextlib.suppress(OSError, ValueError):
                _write(f"{_NO_REGION}\x1b[J")

    def _is_of_a_parent(self) -> bool:
        """Whether the rows belong to the process that forked this one, such as a loader's worker."""
        return self._claim is not None and self._process != os.getpid()

    def _watch(self) -> None:
        """Clear the rows when the process ends or stops (Ctrl-Z), and draw them again after a resize."""
        self._handle(signal.SIGTSTP, signal.SIG_DFL, self._stop)
        self._handle(signal.SIGWINCH, signal.SIG_DFL, self._resized)
        if self._process != os.getpid():
            self._process = os.getpid()
            # Unlike atexit, it also runs in processes that multiprocessing forks.
            importlib.import_module("multiprocessing.util").Finalize(None, self.clear, exitpriority=0)

    def _handle(self, number: int, before: Any, after: Any) -> None:
        # A handler of the script stays.
        if threading.current_thread() is threading.main_thread() and signal.getsignal(number) == before:
            signal.signal(number, after)
            # Otherwise a resize would interrupt what a C library is waiting for.
            signal.siginterrupt(number, False)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.clear()
        signal.signal(number, signal.SIG_DFL)
        # The process stops here; the next look of the bars draws them again.
        os.kill(os.getpid(), number)

    def _resized(self, number: int, frame: FrameType | None) -> None:
        # The terminal has forgotten the region: what is printed now would overwrite the rows.
        # In the midst of drawing, the next look does it.
        if self._claim is not None and self._rows is not None and not self._is_drawing:
            self.paint(self._rows)


def _is_in_foreground() -> bool:
    # Without a controlling terminal, as under torchrun, there are no jobs.
    with contextlib.suppress(OSError):
        return os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
    return True


def _write(text: str) -> None:
    os.write(sys.stderr.fileno(), text.encode(sys.stderr.encoding or "utf-8", "replace"))


class Notebook:
    """Rows in the output of a notebook's cell."""

    def __init__(self) -> None:
        self._handle: Any = None

    def paint(self, rows: Rows) -> None:
        """Draw the rows."""
        self._show("\n".join(rows(_NOTEBOOK_WIDTH)))

    def clear(self, last: Rows | None = None) -> None:
        """Remove the rows; `last` stays."""
        if self._handle is not None:
            self._show("\n".join(last(_NOTEBOOK_WIDTH)) if last else "")
            self._handle = None

    def _show(self, text: str) -> None:
        content = {"text/plain": text}
        if self._handle is None:
            display = importlib.import_module("IPython.display").display
            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)


TERMINAL = Terminal()
"""The terminal of this process: it has one, however many trainings draw."""
