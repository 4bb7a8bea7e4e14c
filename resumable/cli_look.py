"""The commands that look: ls."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from . import history, tables
from .command import add, add_run, print_json, print_problems, row_of, run_at
from .errors import CannotRead
from .journal import Line
from .run import Run


def declare(commands: Any) -> None:
    """Declare them."""
    summary = "the checkpoints of a run, and the processes that made them"
    add_run(add(commands, "ls", _ls, summary, "resumable ls runs/exp"))


def _ls(given: argparse.Namespace) -> int:
    run = run_at(given.run)
    rows = [row for number in run.numbers() if (row := row_of(run, number))]
    newest = max((row["number"] for row in rows if not row["problem"]), default=None)
    best = next((row["best"] for row in reversed(rows) if not row["problem"]), None)
    for row in rows:
        row["newest"], row["best"] = row["number"] == newest, row["number"] == best
    lines = _history(run)
    _add_history(rows, lines, newest)
    attempts, remote = history.attempts(lines), history.remote(lines)
    _add_remote(rows, lines, remote)
    if given.json:
        print_json({"checkpoints": rows, "attempts": attempts, "remote": remote})
    else:
        tables.print_checkpoints(rows)
        tables.print_rest(remote, attempts)
        print_problems(rows)
    return 0


def _history(run: Run) -> list[Line]:
    try:
        return history.read(run.path)
    except CannotRead as exc:
        # What the checkpoints say of themselves does not depend on it.
        print(f"resumable: {exc}", file=sys.stderr)
        return []


def _add_history(rows: Sequence[dict[str, Any]], lines: Sequence[Line], newest: int | None) -> None:
    saves = {line["number"]: line for line in lines if history.is_save(line)}
    parents = {number: line["parent"] for number, line in saves.items()}
    parents |= {row["number"]: row["parent"] for row in rows if not row["problem"]}
    before = {number for number, line in saves.items() if line["superseded"]}
    left = history.abandoned(parents, newest, before)
    for row in rows:
        line = saves.get(row["number"], {})
        row["why"], row["interval"] = line.get("why"), line.get("interval")
        row["abandoned"] = row["number"] in left


def _add_remote(
    rows: Sequence[dict[str, Any]], lines: Sequence[Line], remote: Mapping[str, str] | None
) -> None:
    place, push = (remote["url"], remote["push"]) if remote else ("", "")
    there = history.pushed(lines).get(place, set())
    # What was pruned there need not be there.
    ever = history.pushed({**line, "removed": []} for line in lines).get(place, set())
    for row in rows:
        is_due = row["best"] and push in ("best", "newest", "all")
        is_due |= row["newest"] and push in ("newest", "all")
        is_due |= push == "all" and row["number"] not in ever
        row["remote"] = "pushed" if row["number"] in there else "not pushed" if is_due else None
