"""What `resumable ls` prints for people: tables, and how long ago things were."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .errors import printable
from .policy import bytes_of, moment

_HEAD = ("number", "epoch", "batch", "step", "metrics", "size", "saved", "why", "")


def print_checkpoints(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a line for each checkpoint."""
    _print_table([_HEAD, *(_cells(row) for row in rows)], to_the_left=(4, 7, 8))


def print_rest(remote: Mapping[str, str] | None, attempts: Sequence[Mapping[str, Any]]) -> None:
    """Print where the checkpoints are pushed to, and a line for each start of the training."""
    if remote or attempts:
        print()
    if remote:
        print(printable(f"remote  {remote['url']} (push {remote['push']})", but=""))
    if attempts:
        _print_table([_attempt_cells(attempt) for attempt in attempts], to_the_left=range(1, 6))


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    remote = [row["remote"]] if row["remote"] else []
    if row["problem"]:
        return (str(row["number"]), *[""] * (len(_HEAD) - 2), ", ".join(["damaged", *remote]))
    metrics = ", ".join(f"{k} {float(v):.4g}" for k, v in row["metrics"].items())
    marks = ", ".join([word for word in ("newest", "best", "abandoned") if row[word]] + remote)
    counts = (str(row[key]) for key in ("number", "epoch", "batch", "step"))
    return (*counts, metrics, bytes_of(row["size"]), age(row["saved"]), str(row["why"] or ""), marks)


def _attempt_cells(attempt: Mapping[str, Any]) -> tuple[str, ...]:
    came_from, ended = attempt["from"], attempt["ended"]
    return (
        f"attempt {attempt['attempt']}",
        str(attempt["host"] or ""),
        f"process {attempt['pid']}",
        "fresh" if came_from is None else f"from checkpoint {came_from}",
        age(attempt["time"]),
        f"ended: {ended.splitlines()[0]}" if ended else "running, or ended without a word",
    )


def _print_table(rows: Sequence[Sequence[str]], to_the_left: Collection[int]) -> None:
    shown = [[printable(cell, but="") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row in shown:
        # Numbers to the right, as they are added up; words to the left.
        cells = [
            c.ljust(w) if i in to_the_left else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def age(saved: str) -> str:
    """Return how long ago a time was.

    >>> age("2100-01-01T00:00:00+00:00")
    '0 s ago'
    """
    if (then := moment(saved)) is None:
        return "?"
    seconds = time.time() - then
    for length, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds // length:.0f} {unit} ago"
    return f"{max(0, seconds):.0f} s ago"
