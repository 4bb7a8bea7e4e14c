"""The command ls: the checkpoints of a run, several runs, or a remote."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointNotFound, UsageError
from ..remote import url
from ..run import address
from ..run.directory import Run
from ..run.manifest import Goal
from ..run.resume_choice import meant_by
from ..views import listing, runs, tables
from ..views.listing import Listed
from .command import add, add_json, folder_of, print_json, print_problems, run_at, run_of, whole_number


def declare(commands: Any) -> None:
    """Declare the command."""
    summary = "runs, or the checkpoints of one run and each start of its training"
    sub = add(commands, "ls", _ls, summary, "resumable ls runs\n  resumable ls runs/exp -n 10")
    sub.add_argument(
        "run",
        metavar="RUN",
        nargs="*",
        default=["."],
        help="a run directory, such as runs/exp, or its remote, s3://bucket/exp: its checkpoints; "
        "a folder of runs, or several: a line for each run (default: those below this folder)",
    )
    sub.add_argument("-n", type=whole_number, metavar="N", dest="last", help="only the last N")
    add_json(sub)


def _ls(given: argparse.Namespace) -> int:
    # Many rows and no cycles: looking for garbage among them takes a tenth of the time.
    is_enabled = gc.isenabled()
    try:
        gc.disable()
        return _list(given)
    finally:
        if is_enabled:
            gc.enable()


def _list(given: argparse.Namespace) -> int:
    if len(given.run) > 1:
        return _list_runs([path for text in given.run for path in _runs_of(text)], given)
    [text] = given.run
    if url.is_url(text):
        return _show(text, _of_remote(text, given.last), given)
    path, which = address.named(text)
    if folder := folder_of(path) if which is None else None:
        return _list_one(str(folder.parent.parent), folder.name, given)
    if which is not None:
        run = run_at(path)
        chosen = run.choose(which, lambda found: found)
        return _list_one(path, chosen[0].path.name if chosen else "", given)
    if runs.is_one(path):
        return _show(path, listing.of_run(run_at(path)), given)
    return _list_runs(_runs_of(path), given)


def _list_runs(paths: Sequence[str], given: argparse.Namespace) -> int:
    rows = [runs.summary(path, _listed(path)) for path in dict.fromkeys(paths)]
    rows = rows[-given.last :] if given.last else rows
    if given.json:
        print_json(rows)
    else:
        runs.print_runs(rows)
    return 0


def _runs_of(text: str) -> Sequence[str]:
    """Return the runs that a word names: itself, or those below a folder."""
    path = run_of(text)
    if url.is_url(path) or runs.is_one(path):
        return [path]
    if found := [*runs.below(path)]:
        return found
    if Path(path).is_dir():
        hint = f" Did you mean {meant}?" if (meant := meant_by(Path(path))) else ""
        raise CheckpointNotFound(
            f"there are no runs in {path}, nor up to three levels below it.{hint}",
            fix="name the folder that holds them: resumable ls FOLDER.",
        )
    # Raises: there is no such folder.
    run_at(path)
    return []


def _listed(path: str) -> Listed:
    if url.is_url(path):
        return _of_remote(path, None)
    return listing.of_run(Run(path))


def _of_remote(address: str, last: int | None) -> Listed:
    # Imported here, because fsspec would slow down the list of a run.
    from ..remote.run_copy import Remote
    from ..remote.storage import Store
    from ..views import remote_listing

    remote = Remote(Store(address))
    listed = remote.store.interruptible(lambda: remote_listing.of_remote(remote, last))
    if not listed.rows:
        raise CheckpointNotFound(
            f"{remote} holds no checkpoint.", fix="check the address, and whether anything was pushed there."
        )
    return listed


def _list_one(path: str, name: str, given: argparse.Namespace) -> int:
    if not Path(path, "checkpoints", name).is_dir():
        raise UsageError(
            f"{given.run[0]} is a checkpoint outside of a run.",
            fix=f"look into it with `resumable show {given.run[0]}`.",
        )
    listed = listing.of_run(Run(path))
    rows = [row for row in listed.rows if row["path"] and os.path.basename(row["path"]) == name]
    return _show(path, listed._replace(rows=rows, attempts=[], remote=None), given)


def _show(path: str, listed: Listed, given: argparse.Namespace) -> int:
    last = given.last or max(len(listed.rows), len(listed.attempts), 1)
    rows, attempts = listed.rows[-last:], listed.attempts[-last:]
    goal = listed.best.goal if listed.best else None
    if given.json:
        what = {"run": url.shown(path) if url.is_url(path) else path, "state": listed.state}
        about = {**what, "detail": listed.detail, "goal": _json_of(goal)}
        print_json({**about, "checkpoints": rows, "attempts": attempts, "remote": listed.remote})
        return 0
    if len(rows) < len(listed.rows):
        print(tables.dim(f"the last {len(rows):,} of {len(listed.rows):,} checkpoints"))
    tables.print_checkpoints(rows, goal.metric if goal else None)
    tables.print_rest(listed.remote, attempts, listed.state)
    if listed.problem:
        print(f"resumable: {listed.problem}", file=sys.stderr)
    print_problems(rows)
    return 0


def _json_of(goal: Goal | None) -> dict[str, Any] | None:
    return {"metric": goal.metric, "maximize": goal.maximize} if goal else None
