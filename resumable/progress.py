"""Bars that show how far a training has come, and how long reading a checkpoint takes."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

Told = Callable[[int], object]
"""What is told how many bytes were read; any thread may call it."""

_EVERY = 0.5  # seconds from one look of the bars to the next: a terminal is slow, and a training may be fast
_LONG = 1.0  # seconds after which reading a checkpoint is worth a bar
_UNITS = {"epochs": "epoch", "steps": "step", "batches": "batch"}
_WHOLE = "{l_bar}{bar}| {whole}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


def is_shown(wanted: bool | None, is_first: bool = True) -> bool:
    """Whether bars are to be shown: if nobody says, where a person looks; and by the first process only.

    >>> is_shown(True), is_shown(True, is_first=False), is_shown(False)
    (True, False, False)
    """
    if not is_first or wanted is False:
        return False
    return bool(wanted) or _is_terminal() or _is_notebook()


def _is_terminal() -> bool:
    # There may be no stderr at all, or one that somebody has closed.
    with contextlib.suppress(AttributeError, ValueError):
        return sys.stderr.isatty()
    return False


def _is_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return "IPKernelApp" in getattr(shell, "config", ())


class Progress:
    """The bars of one training: one for epochs and one for batches below it, or one for steps.

    The bars stand on the terminal only while batches (or steps) are trained: what a script prints in
    the rest of an epoch's body has the terminal for itself.

    >>> progress = Progress(False)
    >>> with progress.loop("epochs", total=90, done=12):
    ...     progress.begin_batches("a loop", total=5004, done=310)
    ...     progress.count_batches("a loop", 311)
    ...     progress.end_batches("a loop")
    ...     progress.count("epochs", 13)
    >>> progress.print("resumed runs/exp")
    resumed runs/exp
    """

    def __init__(self, wanted: bool | None = None, *, is_first: bool = True) -> None:
        self._wanted = wanted
        self._is_first = is_first
        self._outer: _Count | None = None
        self._batches: _Count | None = None
        self.batches_of: object = None
        """The loop over batches that has a bar: the others have none."""
        self._epoch = 0.0
        self._has_batches = False
        self._next = 0.0
        self._saved: tuple[int, float] | None = None
        self._saving: int | None = None
        self.means: Callable[[], str] = str
        """What returns the running means as text."""

    def is_shown(self) -> bool:
        """Whether bars are shown."""
        return is_shown(self._wanted, self._is_first)

    @contextlib.contextmanager
    def loop(self, what: str, total: int, done: int) -> Iterator[None]:
        """Show how far a loop over "epochs" or "steps" has come, for as long as it lasts; one at a time."""
        if self._outer or done >= total or not self.is_shown():
            yield
            return
        self.end_batches(self.batches_of)
        self._outer = _Count(what, total, done, self._tail_of_loop)
        self._epoch, self._has_batches = done, False
        if what == "steps":
            self._draw()
        try:
            yield
        finally:
            self.close()

    def count(self, what: str, done: int) -> None:
        """Note that so many of the loop's bodies have ended."""
        outer = self._outer
        if outer is None or outer.what != what:
            return
        self.end_batches(self.batches_of)
        outer.done = self._epoch = done
        if not self._has_batches and time.monotonic() >= self._next:
            self._draw()

    def begin_batches(self, loop: object, total: int | None, done: int) -> None:
        """Note that a loop over batches begins, of which some are done; `total` is None if nobody knows."""
        if (
            self.batches_of is not None
            or (self._outer and self._outer.what == "steps")
            or not self.is_shown()
        ):
            return
        self.batches_of = loop
        self._batches = _Count("batches", total, done, self._tail_of_batches, leave=False)
        self._has_batches = True
        if self._outer:
            # These batches are another process's work: its rate is not this one's.
            self._outer.move(self._epoch + self._batches.share())
        if time.monotonic() >= self._next:
            self._draw()

    def count_batches(self, loop: object, done: int) -> None:
        """Note that so many batches of the epoch are done."""
        if loop == self.batches_of and self._batches:
            self._batches.done = done
            if time.monotonic() >= self._next:
                self._draw()

    def end_batches(self, loop: object) -> None:
        """Note that a loop over batches has ended, or was left; a second time changes nothing."""
        if loop != self.batches_of or self._batches is None:
            return
        if self._outer:
            self._outer.done = self._epoch + self._batches.share()
        self._batches.close()
        self._batches = self.batches_of = None
        if self._outer:
            self._outer.hide()

    def go_to(self, *, epochs: int, steps: int) -> None:
        """Stand where the training has gone; loops over batches that are running end."""
        self.end_batches(self.batches_of)
        if self._outer:
            self._epoch = {"epochs": epochs, "steps": steps}[self._outer.what]
            self._outer.move(self._epoch)

    def close(self) -> None:
        """Take the bars away: what is printed next begins on a line of its own."""
        self.end_batches(self.batches_of)
        if self._outer:
            self._outer.close()
            self._outer = None

    def _draw(self) -> None:
        if self._outer:
            if self._batches:
                self._outer.done = self._epoch + self._batches.share()
            self._outer.draw()
        if self._batches:
            self._batches.draw()
        self._next = time.monotonic() + _EVERY

    @contextlib.contextmanager
    def saving(self, number: int) -> Iterator[None]:
        """Say that a checkpoint is on its way, and then how old it is. Any thread may save."""
        self._saving = number
        try:
            yield
        finally:
            self._saving = None
        self.saved(number, time.time())

    def saved(self, number: int, when: float) -> None:
        """Note that a checkpoint has been durable since `when` (seconds since 1970)."""
        self._saved = number, when

    def _tail_of_loop(self) -> str:
        return self._tail() if self._has_batches else _joined(self.means(), self._tail())

    def _tail_of_batches(self) -> str:
        return _joined(self.means(), "" if self._outer else self._tail())

    def _tail(self) -> str:
        # (the writer's thread changes both)
        saving, saved = self._saving, self._saved
        if saving is not None:
            return f"saving {saving}"
        return f"saved {saved[0]}, {age(time.time() - saved[1])} ago" if saved else ""

    def print(self, line: str) -> None:
        """Print a line, above the bars if there are any."""
        counts = [count for count in (self._outer, self._batches) if count and count.bar]
        is_drawn = any(count.is_drawn for count in counts)
        if is_drawn:
            with counts[0].outliving_the_terminal():
                counts[0].bar.write(line)
        if not is_drawn or counts[0].is_lost:
            print(line)
        sys.stdout.flush()

    @contextlib.contextmanager
    def moving(self, what: str, total: int) -> Iterator[Told]:
        """Give what is to be told how many of `total` bytes have moved; any thread may move them."""
        with self.reading(what, total) as told:
            yield told or _to_nobody

    @contextlib.contextmanager
    def reading(self, what: str, total: int) -> Iterator[Told | None]:
        """Give what is to be told how many of `total` bytes were read: where that takes long, a bar shows it.

        It is None where no bars are shown.
        """
        if not self.is_shown():
            yield None
            return
        count = _Count(what, total, 0, leave=False, unit="B", unit_scale=True)
        lock, due = threading.Lock(), time.monotonic() + _LONG

        def told(size: int) -> None:
            nonlocal due
            with lock:
                count.done += size
                if time.monotonic() >= due:
                    count.draw()
                    due = time.monotonic() + _EVERY

        try:
            yield told
        finally:
            count.close()


def _joined(*texts: str) -> str:
    return ", ".join(filter(None, texts))


def _to_nobody(size: int) -> None:
    """Where no bars are shown, nobody wants to know."""


class _Count:
    """How far something has come, and a bar that shows it once it is drawn."""

    def __init__(
        self,
        what: str,
        total: int | None,
        done: int,
        tail: Callable[[], str] | None = None,
        **looks: Any,
    ) -> None:
        self.what = what
        self._total = total
        self._start: float = done
        self.done: float = done
        self.is_drawn = False
        self.bar: Any = None
        self._began = time.time()
        self._tail = tail
        # The rate is over all of this process's work: that of the last seconds knows of no evaluation.
        known = {"bar_format": _WHOLE} if total and "unit" not in looks else {}
        self.is_lost = False
        self._looks: dict[str, Any] = {
            "unit": _UNITS.get(what),
            "leave": True,
            "smoothing": 0,
            **known,
            **looks,
        }

    def share(self) -> float:
        """Return which part of the whole is done; what follows its end counts as one more."""
        return self.done / (self._total + 1) if self._total else 0.0

    def move(self, done: float) -> None:
        """Stand elsewhere, without having worked for it."""
        self._start += done - self.done
        self.done = done
        if self.bar:
            # Else the rate would be one of work that this process has not done, or negative.
            self.bar.initial = self._start

    def draw(self) -> None:
        """Show how far it has come by now."""
        if self.is_lost:
            return
        with self.outliving_the_terminal():
            if self.bar is None:
                self.bar = self._make()
            self.is_drawn = True
            self.bar.update(self.done - self.bar.n)

    @contextlib.contextmanager
    def outliving_the_terminal(self) -> Iterator[None]:
        """Show nothing any more if the terminal has gone, or is closed: a training must not end of that."""
        try:
            yield
        except (OSError, ValueError):
            _let_go_of_the_lock()
            self.is_lost, self.is_drawn = True, False
            if self.bar is not None:
                # (else it would try once more when it is dropped)
                self.bar.disable, self.bar = True, None

    def _make(self) -> Any:
        # The least delay: else it would show itself before it knows when its work has begun.
        bar = _kind()(
            desc=self.what,
            total=self._total,
            initial=self._start,
            mininterval=0,
            miniters=0,
            delay=1e-9,
            dynamic_ncols=True,
            **self._looks,
        )
        bar.start_t = bar.last_print_t = self._began
        if self._tail:
            bar.tail = self._tail
        return bar

    def hide(self) -> None:
        """Wipe the bar off the terminal until it is drawn again."""
        if self.is_drawn:
            with self.outliving_the_terminal():
                self.bar.clear()
            self.is_drawn = False

    def close(self) -> None:
        """Show how far it has come for the last time, or take the bar away."""
        if self.bar is None:
            return
        self.bar.n = self.done
        if not self._looks["leave"]:
            # In a notebook one that ends early would stay, in red: but to break out of a loop is no error.
            self.bar.total = None
        with self.outliving_the_terminal():
            self.bar.close()
        self.is_drawn = False


def _let_go_of_the_lock() -> None:
    # tqdm keeps it where what it draws on fails: no other thread could draw, or read on, ever again.
    with contextlib.suppress(RuntimeError):
        while True:
            _kind().get_lock().release()


def age(seconds: float) -> str:
    """Return how long something has been.

    >>> [age(seconds) for seconds in (12.3, 500, 40_000, 500_000)]
    ['12 s', '8 min', '11 h', '5 days']
    """
    for size, unit, most in ((1, "s", 100), (60, "min", 100), (3600, "h", 48)):
        if seconds < size * most:
            return f"{max(0, int(seconds / size))} {unit}"
    return f"{int(seconds / 86400)} days"


@functools.cache
def _kind() -> Any:
    from tqdm.auto import tqdm  # type: ignore[import-untyped, unused-ignore]

    class Bar(tqdm):  # type: ignore[misc, type-arg, unused-ignore]
        # A thread that wakes every 10 s would make each later fork() of a DataLoader one of two threads.
        monitor_interval = 0
        # tqdm's own lock is a semaphore of multiprocessing: a script could not set_start_method() after it,
        # and a worker that is killed while it has it would stop the training.
        _lock = threading.RLock()
        tail: Callable[[], str] = staticmethod(str)

        @property
        def format_dict(self) -> dict[str, Any]:
            # Asked for only when the bar is drawn: nothing is formatted in between.
            return {**super().format_dict, "whole": int(self.n), "postfix": self.tail()}

    return Bar
