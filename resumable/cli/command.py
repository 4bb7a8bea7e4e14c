"""Shared by the commands: their declaration, the run that they read, their exit codes."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    FormatTooNew,
    NotARun,
    RemoteError,
    ResumableError,
    RunInUse,
    UsageError,
)
from ..remote import url
from ..run import address, checkpoint, manifest
from ..run.checkpoint import Checkpoint
from ..run.directory import Run
from ..views import tables

T = TypeVar("T")

EXIT_CODES = """exit codes:
  0 fine      1 found a problem   2 usage    3 not found
  4 damaged   5 in use            6 remote   130 interrupted"""

CODES: dict[type[ResumableError], int] = {
    UsageError: 2,
    CheckpointNotFound: 3,
    NotARun: 3,
    CheckpointDamaged: 4,
    FormatTooNew: 4,
    RunInUse: 5,
    RemoteError: 6,
}
"""The exit codes by error; 1 for any other."""


def add(
    commands: Any, name: str, command: Callable[[Any], int], summary: str, example: str
) -> argparse.ArgumentParser:
    """Declare a command; its help ends with the example."""
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


def whole_number(text: str) -> int:
    """Parse a positive whole number, as the type of an argument."""
    if text.isdecimal() and int(text):
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")


def print_json(found: Any) -> None:
    """Print JSON for programs."""
    print(json.dumps(found, indent=1))


def run_at(path: str, resume: str = "must") -> Run:
    """Return the run in a directory, which must exist unless `resume` says otherwise."""
    if url.is_url(path):
        raise UsageError(
            f"{url.shown(path)} is a remote folder, and RUN a directory of this machine.",
            fix="give the run directory. That of a training which was given this address instead is "
            f"{url.cache_folder(path)}.",
        )
    url.refuse_nearly(path)
    path, which = address.named(path)
    if which is not None or folder_of(path):
        raise UsageError(
            f"{path}{'@' + which if which else ''} is a checkpoint, and RUN a run directory.",
            fix=f"give the run: {path if which else Path(path).resolve().parent.parent}.",
        )
    run = Run(path)
    run.check(resume)
    return run


def run_of(text: str) -> str:
    """Return the path of the run that is named, by itself or by one of its checkpoints."""
    path, which = address.named(text)
    folder = folder_of(path) if which is None else None
    return str(folder.parent.parent) if folder else path


def sub_of(parser: argparse.ArgumentParser, name: str) -> argparse.ArgumentParser:
    """Return the parser of one command."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    sub: argparse.ArgumentParser = groups[0].choices[name]
    return sub


def add_checkpoint(sub: argparse.ArgumentParser, dest: str = "checkpoint", metavar: str = "RUN[@N]") -> None:
    """Declare one checkpoint, as `read_at` takes it."""
    sub.add_argument(
        dest,
        metavar=metavar,
        help="runs/exp (its newest intact checkpoint), runs/exp@41, runs/exp@best, or a checkpoint's folder, "
        "such as runs/exp/best",
    )


def read_at(text: str, read: Callable[[Checkpoint], T]) -> tuple[Checkpoint, T]:
    """Return the checkpoint that RUN, RUN@41, RUN@best or a folder names, and the result of `read`.

    RUN alone means the newest that `read` does not find damaged.
    """
    path, which = address.named(text)
    if which is None and (folder := folder_of(path)):
        found = checkpoint.open_checkpoint(folder)
        return found, read(found)
    chosen = run_at(path).choose("newest" if which is None else which, read)
    assert chosen
    return chosen


def folder_of(path: str) -> Path | None:
    """Return the folder of a checkpoint, if the path is one or leads to one, as runs/exp/best does."""
    return Path(path).resolve() if os.path.lexists(os.path.join(path, manifest.NAME)) else None


def print_problems(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the problem of each damaged checkpoint."""
    for row in rows:
        if row["problem"]:
            print(tables.error_text(row["problem"]), file=sys.stderr)
