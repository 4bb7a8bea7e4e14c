"""Several runs, a line each: where they are, how they ended, their best and their size."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import rows as progress_rows
from ..run import address
from ..run.policy import bytes_of, counted, moment
from .columns import Column, cut
from .listing import NOT_RECORDED, Listed
from .tables import print_columns

Row = dict[str, Any]
_DEPTH = 3
_LONGEST_DETAIL = 60
_UNENDED = "killed or crashed"


def below(folder: str) -> Iterator[str]:
    """Yield the runs in a folder and three levels below it, by name; hidden folders are passed over.

    >>> [*below("runs/none")]
    []
    """
    yield from _below(folder, _DEPTH)


def _below(folder: str, depth: int) -> Iterator[str]:
    try:
        with os.scandir(folder) as entries:
            names = sorted(one.name for one in entries if not one.name.startswith(".") and one.is_dir())
    except OSError:
        # One that may not be read holds nothing that could be shown.
        return
    for name in names:
        path = name if folder == "." else os.path.join(folder, name)
        if address.is_run(path):
            yield path
        # A link may lead to a folder above.
        elif depth > 1 and not os.path.islink(path):
            yield from _below(path, depth - 1)


def is_one(path: str) -> bool:
    """Return whether a folder is a run, or what is left of one.

    >>> is_one("runs/none")
    False
    """
    return address.is_run(path) or (Path(path) / "checkpoints").is_dir()


def summary(path: str, listed: Listed) -> Row:
    """Return the facts about a run that stand in one line."""
    newest = next((row for row in reversed(listed.rows) if row.get("newest")), {})
    best = listed.best
    value = best and {"metric": best.goal.metric, "value": _plain(best.value), "number": best.number}
    return {
        "run": path,
        "state": listed.state,
        "detail": listed.detail,
        "epoch": newest.get("epoch"),
        "step": newest.get("step"),
        "best": value,
        "checkpoints": len(listed.rows),
        "newest": newest.get("number"),
        "warnings": len(listed.attempts[-1]["warnings"]) if listed.attempts else 0,
        "damaged": sum(bool(row["problem"]) for row in listed.rows),
        "size": listed.size,
        "saved": newest.get("saved"),
    }


def _plain(value: float) -> float | str:
    return value if abs(value) < float("inf") else str(value)


def print_runs(rows: Sequence[Row]) -> None:
    """Print a line for each run."""
    now = time.time()
    columns = [
        Column("run", [row["run"] for row in rows], is_left=True),
        Column("state", [row["state"] or "" for row in rows], is_left=True, has_marks=True),
        Column("epoch", [_text(row["epoch"]) for row in rows], 60),
        Column("step", [_text(row["step"]) for row in rows], 90),
        Column(*_best([row["best"] for row in rows]), 80, is_left=True),
        Column("checkpoints", [_text(row["checkpoints"]) for row in rows], 20),
        Column("size", [bytes_of(row["size"]) if row["size"] else "" for row in rows], 50),
        Column("age", [_age(row["saved"], now) for row in rows], 70),
        Column("", [_detail(row) for row in rows], 65, is_left=True, has_marks=True, least=len(_UNENDED)),
    ]
    print_columns(columns)


def _text(value: int | None) -> str:
    return "" if value is None else str(value)


def _best(bests: Sequence[Mapping[str, Any] | None]) -> tuple[str, list[str]]:
    """Return the head and the cells of the column for the best; a metric of all runs stands in the head."""
    metrics = {best["metric"] for best in bests if best}
    head = f"best {metrics.pop()}" if len(metrics) == 1 else "best"
    named = ["" if best is None or not metrics else f"{best['metric']} " for best in bests]
    values = ["" if best is None else f"{float(best['value']):.4g} @{best['number']}" for best in bests]
    return head, [name + value for name, value in zip(named, values, strict=True)]


def _age(saved: str | None, now: float) -> str:
    then = moment(saved) if saved else None
    return "" if then is None else progress_rows.age(now - then)


def _detail(row: Row) -> str:
    line = (row["detail"] or "").partition("\n")[0]
    line = _UNENDED if line == NOT_RECORDED else line
    words = [line if row["state"] in ("running", "stopped", "crashed") else ""]
    words += [f"{row['damaged']} damaged"] if row["damaged"] else []
    words += [counted(row["warnings"], "warning")] if row["warnings"] else []
    return cut(", ".join(word for word in words if word), _LONGEST_DETAIL)
