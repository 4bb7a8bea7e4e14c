"""Progress bars of a training, and of reading a checkpoint."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

Told = Callable[[int], object]
"""Callback with the number of bytes read; any thread may call it."""

_EVERY = 0.5  # seconds between two updates of the bars: a terminal is slow, and a training may be fast
_LONG = 1.0  # seconds after which reading a checkpoint shows a bar
_UNITS = {"epochs": "epoch", "steps": "step", "batches": "batch"}
_WHOLE = "{l_bar}{bar}| {whole}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


def is_shown(wanted: bool | None, is_first: bool = True) -> bool:
    """Return whether to show bars: as wanted, by default on a terminal or in a notebook; only on rank 0.

    >>> is_shown(True), is_shown(True, is_first=False), is_shown(False)
    (True, False, False)
    """
    if not is_first or wanted is False:
        return False
    return bool(wanted) or _is_terminal() or _is_notebook()


def _is_terminal() -> bool:
    # stderr may be missing or closed.
    with contextlib.suppress(AttributeError, ValueError):
        return sys.stderr.isatty()
    return False


def _is_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return "IPKernelApp" in getattr(shell, "config", ())


class Progress:
    """The bars of one training: one for epochs and one for batches below it, or one for steps.

    The bars are visible only while batches (or steps) are trained, so a script can print in the rest of
    an epoch's body.

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
        """The only loop over batches that has a bar."""
        self._epoch = 0.0
        self._has_batches = False
        self._next = 0.0
        self._saved: tuple[int, float] | None = None
        self._saving: int | None = None
        self.means: Callable[[], str] = str
        """Returns the running means as text."""

    def is_shown(self) -> bool:
        """Whether bars are shown."""
        return is_shown(self._wanted, self._is_first)

    @contextlib.contextmanager
    def loop(self, what: str, total: int, done: int) -> Iterator[None]:
        """Show the progress of a loop over "epochs" or "steps" while it runs; one at a time."""
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
        """Set the number of finished bodies of the loop."""
        outer = self._outer
        if outer is None or outer.what != what:
            return
        self.end_batches(self.batches_of)
        outer.done = self._epoch = done
        if not self._has_batches and time.monotonic() >= self._next:
            self._draw()

    def begin_batches(self, loop: object, total: int | None, done: int) -> None:
        """Start the bar of a loop over batches, some of which are done; `total` is None if unknown."""
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
            # Another process trained these batches: they must not count in this one's rate.
            self._outer.move(self._epoch + self._batches.share())
        if time.monotonic() >= self._next:
            self._draw()

    def count_batches(self, loop: object, done: int) -> None:
        """Set the number of finished batches of the epoch."""
        if loop == self.batches_of and self._batches:
            self._batches.done = done
            if time.monotonic() >= self._next:
                self._draw()

    def end_batches(self, loop: object) -> None:
        """End the bar of a loop over batches; a second call changes nothing."""
        if loop != self.batches_of or self._batches is None:
            return
        if self._outer:
            self._outer.done = self._epoch + self._batches.share()
        self._batches.close()
        self._batches = self.batches_of = None
        if self._outer:
            self._outer.hide()

    def go_to(self, *, epochs: int, steps: int) -> None:
        """Move to another position in the training, and end the bars of running loops over batches."""
        self.end_batches(self.batches_of)
        if self._outer:
            self._epoch = {"epochs": epochs, "steps": steps}[self._outer.what]
            self._outer.move(self._epoch)

    def close(self) -> None:
        """Remove the bars, so that the next output starts on a new line."""
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
        # The writer thread changes both.
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
        """Yield a callback for the number of bytes moved, of `total`; any thread may call it."""
        with self.reading(what, total) as told:
            yield told or _unheard

    @contextlib.contextmanager
    def reading(self, what: str, total: int) -> Iterator[Told | None]:
        """Yield a callback for the number of bytes read, of `total`; a slow read shows a bar.

        Yield None if no bars are shown.
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


def _unheard(size: int) -> None:
    """Ignore the progress if no bars are shown."""


class _Count:
    """Progress of one loop or transfer, and its bar once it is drawn."""

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
        # Average the rate over all of this process's work: a recent rate would leave out evaluations.
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
        """Return the finished share; the work after the last item counts as one more."""
        return self.done / (self._total + 1) if self._total else 0.0

    def move(self, done: float) -> None:
        """Move to another position without counting it as work."""
        self._start += done - self.done
        self.done = done
        if self.bar:
            # Otherwise the rate would include work of another process, or be negative.
            self.bar.initial = self._start

    def draw(self) -> None:
        """Draw the current progress."""
        if self.is_lost:
            return
        with self.outliving_the_terminal():
            if self.bar is None:
                self.bar = self._make()
            self.is_drawn = True
            self.bar.update(self.done - self.bar.n)

    @contextlib.contextmanager
    def outliving_the_terminal(self) -> Iterator[None]:
        """Stop drawing if the terminal is gone or closed: that must not end a training."""
        try:
            yield
        except (OSError, ValueError):
            _let_go_of_the_lock()
            self.is_lost, self.is_drawn = True, False
            if self.bar is not None:
                # Otherwise tqdm would try to draw again when it is garbage-collected.
                self.bar.disable, self.bar = True, None

    def _make(self) -> Any:
        # A minimal delay: otherwise tqdm draws before `start_t` is set.
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
        """Clear the bar from the terminal until it is drawn again."""
        if self.is_drawn:
            with self.outliving_the_terminal():
                self.bar.clear()
            self.is_drawn = False

    def close(self) -> None:
        """Draw the final progress, or remove the bar."""
        if self.bar is None:
            return
        self.bar.n = self.done
        if not self._looks["leave"]:
            # A notebook would keep a bar that ends early, in red; but a break is no error.
            self.bar.total = None
        with self.outliving_the_terminal():
            self.bar.close()
        self.is_drawn = False


def _let_go_of_the_lock() -> None:
    # tqdm keeps its lock if drawing fails: every other thread that draws or reads would block forever.
    with contextlib.suppress(RuntimeError):
        while True:
            _kind().get_lock().release()


def age(seconds: float) -> str:
    """Return a duration as text.

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
        # tqdm's monitor thread would make each later fork() of a DataLoader a fork with two threads.
        monitor_interval = 0
        # tqdm's own lock is a multiprocessing semaphore: a script could not call set_start_method() after it,
        # and a worker killed while holding it would block the training.
        _lock = threading.RLock()
        tail: Callable[[], str] = staticmethod(str)

        @property
        def format_dict(self) -> dict[str, Any]:
            # Read only when the bar is drawn: nothing is formatted in between.
            return {**super().format_dict, "whole": int(self.n), "postfix": self.tail()}

    return Bar
