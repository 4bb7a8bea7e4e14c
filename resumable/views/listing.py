"""The checkpoints of a run as rows, with what its history says of them: what `resumable ls` shows."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import CannotRead
from ..files import lock
from ..files.jsonl import Line
from ..run import history
from ..run.directory import Run
from ..run.manifest import Best
from . import index
from .index import Facts, Index, Saves
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


class _Here(NamedTuple):
    """A checkpoint that is on the disk."""

    number: int
    path: str
    facts: Facts | None = None
    problem: str | None = None


def of_run(run: Run) -> Listed:
    """Return what there is to list of a run.

    >>> listed = of_run(Run("runs/none"))
    >>> listed.rows, listed.state
    ([], None)
    """
    # Before the checkpoints: a training that ends meanwhile has not crashed.
    holder = lock.holder(run.path / ".lock")
    data, problem = _history(run)
    here, best, saves = _read(run, data)
    rows, size = _rows(here)
    newest = next((one.number for one in reversed(here) if one.facts and not one.problem), None)
    _add_history(rows, here, saves, newest)
    for row in rows:
        row["newest"], row["best"] = row["number"] == newest, bool(best and row["number"] == best.number)
    last = [_save_line(number, attempt) for attempt, number in saves.last.items()]
    attempts, remote = history.attempts([*saves.others, *last]), history.remote(saves.others)
    _add_remote(rows, here, saves.others, remote)
    return Listed(rows, attempts, remote, *_state(holder, attempts), best, size, problem)


def _history(run: Run) -> tuple[bytes, str | None]:
    try:
        return history.content(run.path), None
    except CannotRead as exc:
        # The checkpoints can be read without it.
        return b"", str(exc)


def _read(run: Run, data: bytes) -> tuple[list[_Here], Best | None, Saves]:
    """Return the checkpoints, the best according to the newest intact one, and the saves of the history."""
    names, top = run.names(), f"{run.folder}{os.sep}"
    memory, is_long = Index(run), len(names) > index.LONG
    look = memory.look([*names.values()][: -index.LONG] if is_long else [])
    try:
        saves = memory.saves(data)
        kept = {number: Kept(run, number) for number in [*names][-index.LONG :]}
    finally:
        known = memory.known(look)
    here, best, opened = [], None, 0
    for number, name in names.items():
        path = top + name
        if facts := known.get(name):
            here.append(_Here(number, path, facts))
            continue
        one, opened = kept.get(number) or Kept(run, number), opened + 1
        # One that is missing may have been pruned meanwhile by the training.
        if not one.problem or os.path.lexists(path):
            facts = index.facts_of(one.about, one.files) if one.about else None
            here.append(_Here(number, path, facts, one.problem))
        if one.about and not one.problem:
            best = one.about.best
    if is_long:
        intact = {names[one.number]: one.facts for one in here if one.facts and not one.problem}
        memory.update(intact, opened - index.LONG)
    return here, best, saves


def _rows(here: Sequence[_Here]) -> tuple[list[Row], int]:
    """Return the facts about the checkpoints, and the bytes of all of them together."""
    inodes = [inode for one in here if one.facts for inode in one.facts.inodes]
    shared, sizes = set[int](), dict[int, int]()
    # In most runs no file has two names: counting them all takes longer than to see that.
    if len({*inodes}) < len(inodes):
        shared = {inode for inode, count in Counter(inodes).items() if count > 1}
        files = (pair for one in here if one.facts for pair in _files(one.facts))
        sizes = {inode: size for inode, size in files if inode in shared}
    rows = [_row(one, shared) for one in here]
    return rows, sum(row["own"] or 0 for row in rows) + sum(sizes.values())


def _files(facts: Facts) -> Iterator[tuple[int, int]]:
    return zip(facts.inodes, facts.sizes, strict=True)


def _row(one: _Here, shared: Container[int]) -> Row:
    if (facts := one.facts) is None:
        # Without an intact manifest only what stands outside it is known.
        nothing = dict.fromkeys(("path", "size", "own"))
        return {"number": one.number, "problem": one.problem, **nothing}
    own = facts.size
    if shared and facts.sizes:
        own = sum([size for inode, size in _files(facts) if inode not in shared])
    return {
        "number": one.number,
        "path": one.path,
        "problem": one.problem,
        "boundary": facts.boundary,
        "epoch": facts.epoch,
        "batch": facts.batch,
        "step": facts.step,
        "samples": facts.samples,
        "metrics": facts.metrics,
        "size": facts.size,
        "own": own,
        "elsewhere": facts.elsewhere,
        "saved": facts.saved,
        "parent": facts.parent,
    }


def _save_line(number: int, attempt: int | None) -> Line:
    return {"event": "save", "number": number, "attempt": attempt, "parent": None, "superseded": False}


def _add_history(rows: Sequence[Row], here: Sequence[_Here], saves: Saves, newest: int | None) -> None:
    parents = {one.number: one.facts.parent for one in here if one.facts and not one.problem}
    left = {*saves.superseded}
    if newest is not None:
        left = history.abandoned({**saves.parents, **parents}, newest, saves.superseded)
    for row in rows:
        row["why"], row["interval"] = saves.why.get(row["number"], (None, None))
        # Nothing can come from a damaged one.
        row["abandoned"] = row["number"] in left and not row["problem"]


def _add_remote(
    rows: Sequence[Row], here: Sequence[_Here], lines: Sequence[Line], remote: Mapping[str, str] | None
) -> None:
    place, push = (remote["url"], remote["push"]) if remote else ("", "")
    there = history.pushed(lines).get(place, set())
    # What was pruned there need not be pushed again.
    ever = history.pushed({**line, "removed": []} for line in lines).get(place, set())
    # Another node pushes the rest of a part, and notes it.
    parts = {one.number for one in here if one.facts and not one.facts.is_first_part}
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
