"""Tables, colours and relative times, as the commands print them for people."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from .. import rows as progress_rows
from ..errors import printable
from ..run.policy import bytes_of, moment

_HEAD = ("number", "epoch", "batch", "step", "metrics", "size", "own", "saved", "why", "")


def print_checkpoints(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a line for each checkpoint."""
    some_share = any(row["own"] != row["size"] for row in rows)
    cells = (_cells(row, some_share) for row in rows)
    print_table([_HEAD, *cells], to_the_left=(4, 8, 9), marks=len(_HEAD) - 1)


def print_rest(remote: Mapping[str, str] | None, attempts: Sequence[Mapping[str, Any]]) -> None:
    """Print where checkpoints are pushed to, and a line for each start of the training."""
    if remote or attempts:
        print()
    if remote:
        print(printable(f"remote  {remote['url']} (push {remote['push']})", but=""))
    if attempts:
        print_table([_attempt_cells(attempt) for attempt in attempts], to_the_left=range(1, 6))


def _cells(row: Mapping[str, Any], some_share: bool) -> tuple[str, ...]:
    remote = [row["remote"]] if row["remote"] else []
    if row["size"] is None:
        return (str(row["number"]), *[""] * (len(_HEAD) - 2), ", ".join(["damaged", *remote]))
    damaged = ["damaged"] if row["problem"] else []
    metrics = numbers(row["metrics"])
    part = ["a part"] if row["elsewhere"] else []
    marks = ", ".join(
        damaged + part + [word for word in ("newest", "best", "abandoned") if row[word]] + remote
    )
    counts = (str(row[key]) for key in ("number", "epoch", "batch", "step"))
    own = bytes_of(row["own"]) if some_share else ""
    why = str(row["why"] or "")
    return (*counts, metrics, bytes_of(row["size"]), own, age(row["saved"]), why, marks)


def numbers(metrics: Mapping[str, float | str]) -> str:
    """Return metrics as text.

    >>> numbers({"loss": 0.51812, "acc": "nan"})
    'loss 0.5181, acc nan'
    """
    return ", ".join(f"{name} {float(value):.4g}" for name, value in metrics.items())


def _attempt_cells(attempt: Mapping[str, Any]) -> tuple[str, ...]:
    came_from, ended = attempt["from"], attempt["ended"]
    return (
        f"attempt {attempt['attempt']}",
        str(attempt["host"] or ""),
        f"process {attempt['pid']}",
        "fresh" if came_from is None else f"from checkpoint {came_from}",
        age(attempt["time"]),
        f"ended: {ended.splitlines()[0]}" if ended else "running or crashed (no exit recorded)",
    )


def print_table(
    rows: Iterable[Sequence[str]],
    to_the_left: Collection[int] = (),
    indent: str = "",
    marks: int | None = None,
) -> None:
    """Print rows of cells in columns; the words in the column `marks` are coloured."""
    shown = [[printable(cell, but="") for cell in row] for row in rows]
    # A column that is empty below its head is left out.
    used = [i for i, column in enumerate(zip(*shown, strict=True)) if any(column[1:] or column)]
    widths = {i: max(len(row[i]) for row in shown) for i in used}
    for row in shown:
        # Numbers are aligned right, words left.
        cells = [row[i].ljust(widths[i]) if i in to_the_left else row[i].rjust(widths[i]) for i in used]
        if marks in used:
            cells[used.index(marks)] = painted(cells[used.index(marks)])
        print(indent + "  ".join(cells).rstrip())


def painted(text: str) -> str:
    """Return a text in which the words for a state are coloured, if a person looks at it on a terminal.

    >>> painted("newest, best")
    'newest, best'
    """
    if not _is_coloured():
        return text
    return _WORDS.sub(lambda word: f"\x1b[{_COLOURS[word[0]]}m{word[0]}\x1b[0m", text)


def bold(text: str) -> str:
    """Return a text in bold, if a person looks at it on a terminal."""
    return f"\x1b[1m{text}\x1b[0m" if _is_coloured() else text


def _is_coloured() -> bool:
    # See https://no-color.org. A dumb terminal prints the codes, as old ones of Windows do.
    is_unwanted = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or sys.platform == "win32"
    return not is_unwanted and sys.stdout.isatty()


_COLOURS = {
    "newest": "1",
    "best": "32",
    "intact": "32",
    "damaged": "31",
    "abandoned": "2",
    "not pushed": "33",
    "pushed": "36",
    "removed": "31",
    "goes": "31",
    "exact": "32",
    "NOT exact": "31",
    "NOT repeatable": "31",
    "FAILED": "31",
}
_WORDS = re.compile("|".join(rf"\b{word}\b" for word in _COLOURS))


def age(saved: str) -> str:
    """Return how long ago a time was.

    >>> age("2100-01-01T00:00:00+00:00")
    '0 s ago'
    """
    if (then := moment(saved)) is None:
        return "?"
    return f"{progress_rows.age(time.time() - then)} ago"
