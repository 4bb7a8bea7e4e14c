"""The checkpoints of a run as rows, with what its history says of them: what `resumable ls` shows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import CannotRead
from ..files import lock
from ..files.jsonl import Line, plain
from ..files.strict_json import Json
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


class _Saves(NamedTuple):
    """What a history says about saves, and its other lines."""

    parents: Mapping[int, int | None]
    superseded: Collection[int]
    why: Mapping[int, tuple[str | None, Json]]
    """Why each was made, and the interval that its rule had chosen."""
    last: Mapping[int | None, int]
    """The last save of each attempt."""
    others: Sequence[Line]


def of_run(run: Run) -> Listed:
    """Return what there is to list of a run.

    >>> listed = of_run(Run("runs/none"))
    >>> listed.rows, listed.state
    ([], None)
    """
    # Before the checkpoints: a training that ends meanwhile has not crashed.
    holder = lock.holder(run.path / ".lock")
    lines, problem = _history(run)
    here, saves = overview.kept(run), _saves(lines)
    intact = [one.about for one in here if one.about and not one.problem]
    best, newest = (intact[-1].best, intact[-1].number) if intact else (None, None)
    rows = [*map(_row, here)]
    _add_history(rows, saves, newest)
    for row in rows:
        row["newest"], row["best"] = row["number"] == newest, bool(best and row["number"] == best.number)
    last = [_save_line(number, attempt) for attempt, number in saves.last.items()]
    attempts, remote = history.attempts([*saves.others, *last]), history.remote(saves.others)
    _add_remote(rows, here, saves.others, remote)
    return Listed(rows, attempts, remote, *_state(holder, attempts), best, _size(here), problem)


def _history(run: Run) -> tuple[list[Line], str | None]:
    try:
        return history.read(run.path), None
    except CannotRead as exc:
        # The checkpoints can be read without it.
        return [], str(exc)


def _saves(lines: Sequence[Line]) -> _Saves:
    saves = [line for line in lines if history.is_save(line)]
    return _Saves(
        {line["number"]: line.get("parent") for line in saves},
        {line["number"] for line in saves if line["superseded"]},
        {line["number"]: (_if(str, line.get("why")), _if(dict, line.get("interval"))) for line in saves},
        {line.get("attempt"): line["number"] for line in saves},
        [line for line in lines if line.get("event") != "save"],
    )


def _if(kind: type, value: Json) -> Any:
    return value if isinstance(value, kind) else None


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


def _save_line(number: int, attempt: int | None) -> Line:
    return {"event": "save", "number": number, "attempt": attempt, "parent": None, "superseded": False}


def _add_history(rows: Sequence[Row], saves: _Saves, newest: int | None) -> None:
    parents = {row["number"]: row["parent"] for row in rows if not row["problem"]}
    left = {*saves.superseded}
    if newest is not None:
        left = history.abandoned({**saves.parents, **parents}, newest, saves.superseded)
    for row in rows:
        row["why"], row["interval"] = saves.why.get(row["number"], (None, None))
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
