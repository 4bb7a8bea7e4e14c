"""Progress of a training and of reading a checkpoint: bars, or a line a minute in a log file."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from .errors import UsageError, printable
from .messages import say
from .rows import Count, Row, age, texts
from .terminal import TERMINAL, Notebook, is_notebook, is_terminal

Told = Callable[[int], object]
"""Callback with the number of bytes read; any thread may call it."""

_EVERY = 0.5  # seconds between two updates of the bars: a terminal is slow, and a training may be fast
_EVERY_LINE = 60.0  # seconds between two lines of a log file
_LONG = 1.0  # seconds after which reading a checkpoint shows a bar

Where = Literal["terminal", "notebook", "log"]


def where(wanted: bool | None, is_first: bool = True) -> Where | None:
    """Return where progress is shown: only on rank 0, in lines where there is no terminal; None if nowhere.

    >>> where(False), where(True, is_first=False)
    (None, None)
    """
    if not is_first or wanted is False:
        return None
    if is_terminal():
        return "terminal"
    return "notebook" if is_notebook() else "log"


class Progress:
    """The progress of one training: a loop over epochs and one over batches, or one over steps.

    >>> progress = Progress(False)
    >>> with progress.loop("epochs", total=90, done=12):
    ...     progress.begin_batches("a loop", total=5004, done=310)
    ...     progress.count_batches("a loop", 311)
    ...     progress.end_batches("a loop")
    ...     progress.count("epochs", 13)
    >>> progress.print("resumed runs/exp")
    resumed runs/exp
    """

    def __init__(self, wanted: bool | None = None, *, is_first: bool = True, is_quiet: bool = False) -> None:
        self._wanted, self._is_first, self._is_quiet = wanted, is_first, is_quiet
        self._outer: Count | None = None
        self._batches: Count | None = None
        self.batches_of: object = None
        """The only loop over batches whose progress is shown."""
        self._epoch = 0.0
        self._next = 0.0
        self._where: Where | None = None
        self._screen: Any = TERMINAL
        self._rows: list[Row] = []
        """The rows of the loops, as the training has drawn them last: other threads draw them again."""
        self._moving: list[Count] = []
        self._lock = threading.Lock()
        self._saved: tuple[int, float, Mapping[str, str]] | None = None
        self._saving: int | None = None
        self._pushed: int | None = None
        self._values: Mapping[str, Any] = {}
        self.means: Callable[[], str] = str
        """Returns the running means as text."""
        self.goal: str | None = None
        """The metric that decides which checkpoint is the best: a narrow terminal shows it first."""
        self.step: Callable[[], int] | None = None
        """Returns the number of steps."""

    def is_shown(self) -> bool:
        """Whether progress is shown."""
        return where(self._wanted, self._is_first) is not None

    def recover(self) -> None:
        """Remove the bars that a killed process has left on the terminal."""
        if where(self._wanted, self._is_first) == "terminal":
            TERMINAL.recover()

    def _begin(self) -> bool:
        """Look where to show what begins; return whether it is shown."""
        if self._outer is None and self._batches is None and not self._moving:
            self._where = where(self._wanted, self._is_first)
            self._screen = Notebook() if self._where == "notebook" else TERMINAL
            self._next = time.monotonic() + _EVERY_LINE if self._where == "log" else 0.0
        return self._where is not None

    @contextlib.contextmanager
    def loop(self, what: str, total: int, done: int) -> Iterator[None]:
        """Show the progress of a loop over "epochs" or "steps" while it runs; one at a time."""
        if self._outer or done >= total or not self._begin():
            yield
            return
        self.end_batches(self.batches_of)
        self._outer, self._epoch = Count(what, total, done), done
        self._draw_if_due()
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
        self._draw_if_due()

    def begin_batches(self, loop: object, total: int | None, done: int) -> None:
        """Begin to show a loop over batches, some of which are done; `total` is None if unknown."""
        is_below_steps = self._outer is not None and self._outer.what == "steps"
        if self.batches_of is not None or is_below_steps or not self._begin():
            return
        self.batches_of = loop
        self._batches = Count("batches", total, done)
        if self._outer:
            # Another process trained these batches: they must not count in this one's rate.
            self._outer.move(self._epoch + self._batches.share())
        self._draw_if_due()

    def count_batches(self, loop: object, done: int, now: float | None = None) -> None:
        """Set the number of finished batches of the epoch; `now`: the clock's time, if it was read."""
        if loop == self.batches_of and self._batches:
            self._batches.done = done
            if (time.monotonic() if now is None else now) >= self._next:
                self._draw()

    def end_batches(self, loop: object) -> None:
        """End a loop over batches; a second call changes nothing."""
        if loop != self.batches_of or self._batches is None:
            return
        if self._outer:
            self._outer.done = self._epoch + self._batches.share()
            if self._where != "log" and time.monotonic() >= self._next - _EVERY / 2:
                # A validation may follow, in which nothing is drawn.
                self._draw()
        self._batches = self.batches_of = None
        if not self._outer:
            self._clear()

    def go_to(self, *, epochs: int, steps: int) -> None:
        """Move to another position in the training, and end running loops over batches."""
        self.end_batches(self.batches_of)
        if self._outer:
            self._epoch = {"epochs": epochs, "steps": steps}[self._outer.what]
            self._outer.move(self._epoch)

    def close(self) -> None:
        """Remove the bars; that of a finished loop stays as a line."""
        self.end_batches(self.batches_of)
        if outer := self._outer:
            self._outer = None
            self._clear([self._row(outer, self._last_save(has_age=False))] if outer.is_complete() else [])

    def _clear(self, last: Sequence[Row] = ()) -> None:
        self._rows = []
        self._screen.clear(partial(texts, last) if last else None)

    def _draw_if_due(self) -> None:
        if time.monotonic() >= self._next:
            self._draw()

    def _draw(self) -> None:
        if self._outer and self._batches:
            self._outer.done = self._epoch + self._batches.share()
        if self._where == "log":
            self._print_line()
        else:
            self._rows = self._loops()
            self._paint()

    def _print_line(self) -> None:
        # A closed stderr must not end the training.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            print(", ".join(self._line()), file=sys.stderr, flush=True)
        self._next = time.monotonic() + _EVERY_LINE

    def _paint(self) -> None:
        """Draw the rows of the loops, or without a loop those of what is read or sent."""
        rows = self._rows or [count.row([count.pace()]) for count in [*self._moving]]
        self._screen.paint(partial(texts, rows))
        self._next = time.monotonic() + _EVERY

    def _loops(self) -> list[Row]:
        counts = [count for count in (self._outer, self._batches) if count]
        shown = [self._shown(), counts[-1].pace()]
        if len(counts) == 1:
            return [self._row(counts[0], [*self._state(), *shown])]
        return [self._row(counts[0], self._state()), counts[1].row(shown)]

    def _row(self, count: Count, groups: Sequence[Sequence[str]]) -> Row:
        """Return the row of a loop; of what is saved the metric that decides is kept longest."""
        metrics = self._saved[2] if self._saved else {}
        return count.row(groups)._replace(kept=metrics.get(self.goal or ""))

    def _line(self) -> list[str]:
        counts = [count for count in (self._outer, self._batches) if count]
        left = counts[0].left()
        loops = [count.head() for count in counts]
        steps = [] if self.step is None or "step" in loops[0] else [f"step {self.step()}"]
        return [
            *loops,
            *steps,
            *self._shown(),
            *([] if left is None else [f"{age(left)} left"]),
            *itertools.chain(*self._state()),
        ]

    def _shown(self) -> list[str]:
        """Return what the script shows: its means, and the values of `state.show`."""
        means = [text for text in self.means().split(", ") if text]
        return [*means, *(_text(name, value) for name, value in self._values.items())]

    def _state(self) -> list[list[str]]:
        """Return what is known of the checkpoints. The writer's thread changes it."""
        saving, moving, pushed = self._saving, [*self._moving], self._pushed
        found = [f"{count.what} {count.percent()}" for count in moving]
        if saving is not None:
            return [[f"saving {saving}"], found]
        groups = [found, *self._last_save()]
        return groups if pushed is None or moving else [*groups, [f"pushed {pushed}"]]

    def _last_save(self, *, has_age: bool = True) -> list[list[str]]:
        if self._saved is None:
            return []
        number, when, metrics = self._saved
        ago = f" ({age(time.time() - when)} ago)" if has_age else ""
        return [[f"saved {number}{ago}"], [*metrics.values()]]

    @contextlib.contextmanager
    def saving(self, number: int, metrics: Mapping[str, Any] | None = None) -> Iterator[None]:
        """Say that a checkpoint is on its way, and then how old it is. Any thread may save."""
        self._saving = number
        try:
            yield
        finally:
            self._saving = None
        self.saved(number, time.time(), metrics)

    def saved(self, number: int, when: float, metrics: Mapping[str, Any] | None = None) -> None:
        """Note that a checkpoint has been durable since `when` (seconds since 1970)."""
        self._saved = number, when, {name: _text(name, value) for name, value in (metrics or {}).items()}

    def pushed(self, number: int) -> None:
        """Note that a remote has a checkpoint."""
        self._pushed = number

    def show(self, values: Mapping[str, Any]) -> None:
        """Show values until the next call. A tensor is read only when it is drawn."""
        # The graph of a loss would keep the activations of its batch.
        self._values = {name: _shown(name, value) for name, value in values.items()}

    def print(self, line: str, level: int = logging.INFO) -> None:
        """Print a message of the library, above the bars if there are any."""
        if not self._is_quiet:
            say(line, level)

    @contextlib.contextmanager
    def moving(self, what: str, total: int) -> Iterator[Told]:
        """Yield a callback for the number of bytes moved, of `total`; any thread may call it."""
        with self.reading(what, total) as told:
            yield told or _unheard

    @contextlib.contextmanager
    def reading(self, what: str, total: int) -> Iterator[Told | None]:
        """Yield a callback for the number of bytes read, of `total`; a slow read shows a bar.

        Yield None if nothing is shown.
        """
        if not self._begin():
            yield None
            return
        count = Count(what, total, 0, unit="B")
        self._moving.append(count)
        due = time.monotonic() + (_EVERY_LINE if self._where == "log" else _LONG)

        def told(size: int) -> None:
            nonlocal due
            with self._lock:
                count.done += size
                if time.monotonic() >= due:
                    due = time.monotonic() + (_EVERY_LINE if self._where == "log" else _EVERY)
                    self._draw_moving(count)

        try:
            yield told
        finally:
            self._moving.remove(count)
            if not (self._outer or self._batches or self._moving):
                self._clear()

    def _draw_moving(self, count: Count) -> None:
        # While a loop runs, its next look shows this too.
        if self._outer or self._batches:
            return
        if self._where != "log":
            self._paint()
            return
        with contextlib.suppress(OSError, ValueError, AttributeError):
            print(f"{count.head()}, {count.percent()}", file=sys.stderr, flush=True)


def counted(total: int, what: str, is_shown: bool) -> Iterator[int]:
    """Yield the numbers from 1 to a total; now and then a line on stderr says how far they are.

    For work that a loader's worker may do, which must not draw bars.
    """
    due = time.monotonic() + _LONG
    for number in range(1, total + 1):
        if is_shown and time.monotonic() >= due:
            print(f"{what}: {number}/{total} batches", file=sys.stderr, flush=True)
            due = time.monotonic() + 10 * _LONG
        yield number


def _shown(name: str, value: Any) -> Any:
    if not hasattr(value, "item"):
        return value
    if math.prod(value.shape) != 1:
        raise UsageError(
            f"show({name}=...) was given {math.prod(value.shape)} elements.",
            fix=f"give one: show({name}=value.mean()).",
        )
    return value.detach() if hasattr(value, "detach") else value


def _text(name: str, value: Any) -> str:
    # A value may be a tensor.
    if hasattr(value, "item"):
        value = value.item()
    return printable(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}", but="")


def _unheard(size: int) -> None:
    """Ignore the progress if nothing is shown."""
