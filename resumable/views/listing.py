"""The checkpoints of a run as rows, with what its history says of them: what `resumable ls` shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..files import lock
from ..files.jsonl import Line, plain
from ..run import history
from ..run.directory import Run
from ..run.manifest import Best
from . import overview
from .overview import Kept

Row = dict[str, Any]

NOT_RECORDED = "no exit recorded"
"""How a start ended that was killed or crashed."""


class Listed(NamedTuple):
    """A run: its checkpoints, the processes that made them, and what became of the last one."""

    rows: list[Row]
    attempts: list[Line]
    remote: dict[str, str] | None
    state: str | None
    """`running`, `finished`, `stopped` or `crashed`; None if no training has begun here."""
    detail: str | None
    """The process that runs, or how the last one ended."""
    best: Best | None
    size: int
    """The bytes of all files, each once."""
    problem: str | None
    """Why the history cannot be read."""


def of_run(run: Run) -> Listed:
    """Return what there is to list of a run.

    >>> listed = of_run(Run("runs/none"))
    >>> listed.rows, listed.state
    ([], None)
    """
    # Before the checkpoints: a training that ends meanwhile has not crashed.
    holder = lock.holder(run.path / ".lock")
    lines, problem = overview.history_of(run)
    here = overview.kept(run)
    intact = [one.about for one in here if one.about and not one.problem]
    best, newest = (intact[-1].best, intact[-1].number) if intact else (None, None)
    rows = [*map(_row, here)]
    _add_history(rows, lines, newest)
    for row in rows:
        row["newest"], row["best"] = row["number"] == newest, bool(best and row["number"] == best.number)
    attempts, remote = history.attempts(lines), history.remote(lines)
    _add_remote(rows, here, lines, remote)
    state, why = _state(holder, attempts), None if problem is None else str(problem)
    return Listed(rows, attempts, remote, *state, best, _size(here), why)


def _size(here: Sequence[Kept]) -> int:
    """Return the bytes of all files, each once."""
    files = {key: size for one in here for key, size in one.files.items()}
    return sum(files.values()) + sum(one.about.size for one in here if one.about and not one.files)


def _row(one: Kept) -> Row:
    if (about := one.about) is None:
        # Without an intact manifest only what stands outside it is known.
        nothing = dict.fromkeys(("path", "size", "own"))
        return {"number": one.number, "problem": one.problem, **nothing}
    return {
        "number": one.number,
        "path": one.path,
        "problem": one.problem,
        "boundary": about.boundary.value,
        "epoch": about.epoch,
        "batch": about.batch,
        "step": about.step,
        "samples": about.samples,
        "metrics": {name: plain(value) for name, value in about.metrics.items()},
        "size": about.size,
        "own": one.own if one.files else about.size,
        "elsewhere": len(about.elsewhere),
        "saved": about.saved,
        "parent": about.parent,
    }


def _add_history(rows: Sequence[Row], lines: Sequence[Line], newest: int | None) -> None:
    saves = {line["number"]: line for line in lines if history.is_save(line)}
    parents = {row["number"]: row["parent"] for row in rows if not row["problem"]}
    left = history.left_behind(lines, parents, newest)
    for row in rows:
        save = saves.get(row["number"], {})
        row["why"] = why if isinstance(why := save.get("why"), str) else None
        row["interval"] = one if isinstance(one := save.get("interval"), dict) else None
        # Nothing can come from a damaged one.
        row["abandoned"] = row["number"] in left and not row["problem"]


def _add_remote(
    rows: Sequence[Row], here: Sequence[Kept], lines: Sequence[Line], remote: Mapping[str, str] | None
) -> None:
    place, push = (remote["url"], remote["push"]) if remote else ("", "")
    there = history.pushed(lines).get(place, set())
    # What was pruned there need not be pushed again.
    ever = history.pushed({**line, "removed": []} for line in lines).get(place, set())
    # Another node pushes the rest of a part, and notes it.
    parts = {one.number for one in here if one.about and not one.about.is_first_part}
    for row in rows:
        is_due = row["best"] and push in ("best", "newest", "all")
        is_due |= row["newest"] and push in ("newest", "all")
        is_due |= push == "all" and row["number"] not in ever
        word = "pushed" if row["number"] in there else "not pushed" if is_due else None
        row["remote"] = None if row["number"] in parts else word


def _state(holder: str | None, attempts: Sequence[Line]) -> tuple[str | None, str | None]:
    """Return what a run is doing, and the process that runs or how the last one ended."""
    if holder:
        return "running", holder
    if not attempts:
        return None, None
    ended = attempts[-1]["ended"]
    if ended in history.CLOSED:
        return "finished", ended
    if ended and (ended.startswith("SIG") or ended == "max_time"):
        return "stopped", ended
    return "crashed", ended or NOT_RECORDED
