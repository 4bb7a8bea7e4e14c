"""The text of a row of progress: how far a loop or a transfer is, since when, and how long it will take."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

_UNITS = {"epochs": "epoch", "steps": "step", "batches": "batch"}
_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


class Row(NamedTuple):
    """The cells of a row."""

    head: str
    percent: str
    share: float | None
    times: str
    others: list[list[str]]
    """Groups of cells; where there is no room, those at the end are left out first."""
    kept: str | None = None
    """The cell that is left out last."""


class Count:
    """The progress of one loop or transfer.

    >>> count = Count("epochs", 90, 12)
    >>> count.done = 13
    >>> count.head(), count.percent()
    ('epoch 13/90', '14%')
    """

    def __init__(self, what: str, total: int | None, done: float, unit: str | None = None) -> None:
        self.what = what
        self.done = done
        self._total = total
        self._start = done
        self._unit = unit or _UNITS[what]
        self._began = time.time()

    def share(self) -> float:
        """Return the finished share; the work after the last item counts as one more."""
        return self.done / (self._total + 1) if self._total else 0.0

    def move(self, done: float) -> None:
        """Move to another position without counting it as work."""
        self._start += done - self.done
        self.done = done

    def is_complete(self) -> bool:
        """Whether all is done."""
        return self._total is not None and self.done >= self._total

    def head(self) -> str:
        """Return what is counted, and how much of it is done."""
        if self._unit == "B":
            return f"{self.what}: {_size(self.done)} of {_size(self._total or 0)}"
        return f"{self._unit} {int(self.done)}" + (f"/{self._total}" if self._total else "")

    def percent(self) -> str:
        """Return the share that is done; nothing where the total is unknown."""
        return f"{min(100, int(100 * self.done / self._total))}%" if self._total else ""

    def left(self) -> float | None:
        """Return the seconds that are left, by the rate of all work of this process; None if unknown."""
        # A recent rate would leave out evaluations.
        rate = self._rate()
        return (self._total - self.done) / rate if rate and self._total else None

    def row(self, others: Sequence[Sequence[str]] = ()) -> Row:
        """Return what is done, since when and until when, and these groups of cells."""
        left, elapsed = self.left(), clock(time.time() - self._began)
        share = min(1.0, self.done / self._total) if self._total else None
        times = elapsed if left is None or self.is_complete() else f"{elapsed}<{clock(left)}"
        return Row(self.head(), self.percent(), share, times, [[*group] for group in others])

    def _rate(self) -> float:
        elapsed = time.time() - self._began
        return (self.done - self._start) / elapsed if elapsed > 0 else 0.0

    def pace(self) -> list[str]:
        """Return the rate of this process; nothing before there is one."""
        rate, unit = self._rate(), self._unit
        if rate <= 0:
            return []
        if unit == "B":
            return [f"{_size(rate)}/s"]
        many = "batches" if unit == "batch" else f"{unit}s"
        return [f"{_number(rate)} {many}/s" if rate >= 1 else f"{_number(1 / rate)} s/{unit}"]


def texts(rows: Sequence[Row], width: int) -> list[str]:
    """Return rows of at most `width` characters, with their bars below each other.

    >>> epochs = Row("epoch 1/2", "50%", 0.5, "00:10<00:10", [["saved 1"]])
    >>> for text in texts([epochs, Row("batch 7", "", None, "00:02", [])], 60):
    ...     print(text)
    epoch 1/2 50% ━━━━━━──────  00:10<00:10  saved 1
    batch 7                     00:02
    """
    head, percent, times = (max(len(str(row[at])) for row in rows) for at in (0, 1, 3))
    found = []
    for row in rows:
        bar = _bar(row.share, width // 5)
        text = f"{row.head:<{head}} {row.percent:>{percent}} {bar}  {row.times:<{times}}"
        found.append(_fitting(text, row, width))
    return found


def _fitting(text: str, row: Row, width: int) -> str:
    room, shown = width - len(text), set[str]()
    cells = [cell for group in row.others for cell in group]
    for cell in sorted(cells, key=lambda cell: cell != row.kept):
        if len(cell) + 2 <= room:
            room -= len(cell) + 2
            shown.add(cell)
    groups = [", ".join(cell for cell in group if cell in shown) for group in row.others]
    return "  ".join([text, *filter(None, groups)]).rstrip()[: max(0, width)]


def _bar(share: float | None, width: int) -> str:
    if share is None:
        return " " * width
    done, left = "━─" if _has_lines() else "#-"
    whole = int(share * width)
    return done * whole + left * (width - whole)


def _has_lines() -> bool:
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    return encoding.lower().replace("-", "").startswith("utf")


def clock(seconds: float) -> str:
    """Return a duration as a clock shows it.

    >>> clock(75), clock(3675), clock(180_000)
    ('01:15', '1:01:15', '50:00:00')
    """
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _size(count: float) -> str:
    for size, unit in _SIZES:
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{int(count)} B"


def age(seconds: float) -> str:
    """Return a duration as text.

    >>> [age(seconds) for seconds in (12.3, 500, 40_000, 500_000)]
    ['12 s', '8 min', '11 h', '5 days']
    """
    for size, unit, most in ((1, "s", 100), (60, "min", 100), (3600, "h", 48)):
        if seconds < size * most:
            return f"{max(0, int(seconds / size))} {unit}"
    return f"{int(seconds / 86400)} days"
