"""What the commands share: how they are declared, the run that they look at, their exit codes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import url
from .errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    FormatTooNew,
    NotARun,
    RemoteError,
    ResumableError,
    RunInUse,
    UsageError,
)
from .journal import plain
from .run import Run

EXIT_CODES = """exit codes:
  0 fine   1 found a problem   2 usage   3 not found   4 damaged   5 in use   6 remote   130 interrupted"""

CODES: dict[type[ResumableError], int] = {
    UsageError: 2,
    CheckpointNotFound: 3,
    NotARun: 3,
    CheckpointDamaged: 4,
    FormatTooNew: 4,
    RunInUse: 5,
    RemoteError: 6,
}
"""An error of another kind is 1."""


def add(
    commands: Any, name: str, command: Callable[[Any], int], summary: str, example: str
) -> argparse.ArgumentParser:
    """Declare a command, which the example shows in use."""
    sub: argparse.ArgumentParser = commands.add_parser(
        name,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"example:\n  {example}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sub.set_defaults(command=command, summary=summary)
    return sub


def add_json(sub: argparse.ArgumentParser) -> None:
    """Declare --json, which every command has."""
    sub.add_argument("--json", action="store_true", help="print JSON; docs/cli.md has its fields")


def add_run(sub: argparse.ArgumentParser) -> None:
    """Declare the run and --json."""
    sub.add_argument("run", metavar="RUN", help="the run directory, such as runs/exp")
    add_json(sub)


def print_json(found: Any) -> None:
    """Print what programs read."""
    print(json.dumps(found, indent=1))


def run_at(path: str, resume: str = "must") -> Run:
    """Return the run in a directory, which has to be there unless `resume` says otherwise."""
    if url.is_url(path):
        raise UsageError(
            f"{url.shown(path)} is a remote folder, and RUN a directory of this machine.",
            fix="give the run directory. That of a training which was given this address instead is "
            f"{url.cache_folder(path)}.",
        )
    run = Run(path)
    run.check(resume)
    return run


def row_of(run: Run, number: int, verify: bool = False, pin: bool = False) -> dict[str, Any] | None:
    """Return what is known of one checkpoint; None if it has gone."""
    row: dict[str, Any] = {"number": number, "path": None, "problem": None, "best": None}
    row |= {"pin": None} if pin else {}
    try:
        found = run.open(number)
        if pin:
            row["pin"] = found.pin()
        elif verify:
            found.verify()
    except (CheckpointDamaged, CheckpointNotFound, FormatTooNew) as exc:
        # A training that goes on may have pruned it meanwhile.
        is_there = run.path_of(number)
        return {**row, "size": None, "problem": exc.problem} if is_there else None
    about = found.about
    return {
        **row,
        "path": str(found.path),
        "boundary": about.boundary.value,
        "epoch": about.epoch,
        "batch": about.batch,
        "step": about.step,
        "samples": about.samples,
        "metrics": plain(about.metrics),
        "size": about.size,
        "saved": about.saved,
        "parent": about.parent,
        "best": about.best and about.best.number,
    }


def print_problems(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print what is wrong with each that is damaged."""
    for row in rows:
        if row["problem"]:
            print(row["problem"], file=sys.stderr)
