"""Parse, call one function, print, choose the exit code; nothing else."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from . import __version__, history, tables, url
from .copying import Copying, Transfer
from .errors import (
    CannotRead,
    CheckpointDamaged,
    CheckpointNotFound,
    FormatTooNew,
    NotARun,
    RemoteError,
    ResumableError,
    ResumableWarning,
    RunInUse,
    UsageError,
)
from .journal import Line, plain
from .policy import bytes_of
from .progress import Progress
from .pulling import attended
from .pusher import told
from .remote import Remote
from .run import Run
from .store import Store

EXIT_CODES = """exit codes:
  0 fine   1 found a problem   2 usage   3 not found   4 damaged   5 in use   6 remote   130 interrupted"""

_CODES: dict[type[ResumableError], int] = {
    UsageError: 2,
    CheckpointNotFound: 3,
    NotARun: 3,
    CheckpointDamaged: 4,
    FormatTooNew: 4,
    RunInUse: 5,
    RemoteError: 6,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    given = _parser().parse_args(arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("always", ResumableWarning)
        warnings.showwarning = partial(_print_warning, warnings.showwarning)
        return _run_command(given)


def _run_command(given: argparse.Namespace) -> int:
    try:
        return int(given.command(given))
    except ResumableError as exc:
        print(f"resumable: {exc}", file=sys.stderr)
        return next((code for kind, code in _CODES.items() if isinstance(exc, kind)), 1)
    except BrokenPipeError:
        # Whoever read the output (head, less) has seen enough.
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        return 130


def _print_warning(
    before: Callable[..., None], text: Warning | str, kind: type[Warning], *place: Any
) -> None:
    # Which line of ours has warned helps nobody who has typed a command.
    if issubclass(kind, ResumableWarning):
        print(f"resumable: {text}", file=sys.stderr)
    else:
        before(text, kind, *place)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="resumable",
        description="Look at trainings that can be killed anywhere and go on bit for bit.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"resumable {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command, summary in (
        ("ls", _ls, "look: the checkpoints of a run, and the processes that made them"),
        ("verify", _verify, "trust: read every byte of a run and say whether it is as it was written"),
    ):
        sub = _add(commands, name, command, summary, f"resumable {name} runs/exp")
        _add_run(sub)
    commands.choices["verify"].add_argument(
        "--pin", action="store_true", help="print of each a digest of its content: RunState.load(expect=...)"
    )
    for name, command, summary, which in (
        ("push", _push, "move: copy checkpoints of a run to a remote folder", ("newest", "best", "all")),
        ("pull", _pull, "move: bring checkpoints of a remote folder into a run", ("newest", "best")),
    ):
        _add_move(_add(commands, name, command, summary, f"resumable {name} runs/exp s3://bucket/exp"), which)
    demo = _add(
        commands, "demo", _demo, "try: a training is killed twice and ends the same", "resumable demo"
    )
    demo.add_argument("--dir", type=Path, help="a folder to keep the two runs in, to look at them")
    return parser


def _add(
    commands: Any, name: str, command: Callable[[Any], int], summary: str, example: str
) -> argparse.ArgumentParser:
    sub: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary.partition(': ')[2].capitalize()}.",
        epilog=f"example:\n  {example}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sub.set_defaults(command=command)
    return sub


def _add_run(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("run", metavar="RUN", help="the run directory, such as runs/exp")
    sub.add_argument("--json", action="store_true", help="print JSON; docs/cli.md has its fields")


def _add_move(sub: argparse.ArgumentParser, words: Sequence[str]) -> None:
    _add_run(sub)
    sub.add_argument("remote", metavar="REMOTE", help="the address of its remote folder: s3://bucket/exp")
    sub.add_argument(
        "--which",
        metavar="WHICH",
        type=partial(_which, words),
        default="newest",
        help=f"{', '.join(words)} or a save number; default: newest, and with it the best",
    )
    sub.add_argument("--dry-run", action="store_true", help="say what would be moved, and change nothing")
    sub.description = f"{sub.description}\n\n{_GOES_ON}"


_GOES_ON = """What was interrupted goes on from there when the same command is run again. Credentials
are found as by the filesystem's own tools; docs/recipes/remotes.md says where."""


def _which(words: Collection[str], text: str) -> str | int:
    if text in words:
        return text
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(words)}, and no save number")


def _ls(given: argparse.Namespace) -> int:
    run = _run(given.run)
    rows = [row for number in run.numbers() if (row := _row(run, number))]
    newest = max((row["number"] for row in rows if not row["problem"]), default=None)
    best = next((row["best"] for row in reversed(rows) if not row["problem"]), None)
    for row in rows:
        row["newest"], row["best"] = row["number"] == newest, row["number"] == best
    lines = _history(run)
    _add_history(rows, lines, newest)
    attempts, remote = history.attempts(lines), history.remote(lines)
    _add_remote(rows, lines, remote)
    if given.json:
        print(json.dumps({"checkpoints": rows, "attempts": attempts, "remote": remote}, indent=1))
    else:
        tables.print_checkpoints(rows)
        tables.print_rest(remote, attempts)
        _print_problems(rows)
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


def _verify(given: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = []
    run = _run(given.run)
    for number in run.numbers():
        if not (row := _row(run, number, verify=True, pin=given.pin)):
            continue
        rows.append({key: row[key] for key in ("number", "path", "size", "problem", "pin") if key in row})
        if not given.json:
            state = "damaged" if row["problem"] else f"intact   {bytes_of(row['size'])}"
            state += f"  {row['pin']}" if row.get("pin") else ""
            print(f"checkpoint {number:>6}  {state}", flush=True)
    if given.json:
        print(json.dumps(rows, indent=1))
    else:
        _print_problems(rows)
    return _CODES[CheckpointDamaged] if any(row["problem"] for row in rows) else 0


def _push(given: argparse.Namespace) -> int:
    done = _moved(given, _run(given.run), lambda copying: copying.push(given.which))
    return _CODES[CheckpointDamaged] if any(one.problem for one in done) else 0


def _pull(given: argparse.Namespace) -> int:
    _moved(given, _run(given.run, "auto"), lambda copying: copying.pull(given.which))
    return 0


def _moved(given: argparse.Namespace, run: Run, move: Callable[[Copying], list[Transfer]]) -> list[Transfer]:
    remote = Remote(Store(given.remote))
    tell = partial(_print_transfer, run, remote, given.json)
    copying = Copying(run, remote, dry=given.dry_run, progress=Progress(), tell=tell)
    try:
        done = attended(remote.store, lambda: move(copying))
    except KeyboardInterrupt:
        print("resumable: interrupted; the same command goes on from there.", file=sys.stderr)
        raise
    if given.json:
        about = {"run": str(run), "remote": str(remote), "dry_run": given.dry_run}
        print(json.dumps({**about, "checkpoints": [one._asdict() for one in done]}, indent=1))
    return done


def _print_transfer(run: Run, remote: Remote, is_json: bool, one: Transfer) -> None:
    if one.problem:
        print(f"resumable: {one.problem} It is left out.", file=sys.stderr)
        return
    if is_json:
        return
    try:
        print(_transfer_line(one, run, remote), flush=True)
    except BrokenPipeError:
        # Whoever read the output has seen enough; what is to be moved is moved all the same.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _transfer_line(one: Transfer, run: Run, remote: Remote) -> str:
    assert one.size is not None
    what = f"checkpoint {one.number}"
    if one.result == "pushed":
        return told(f"pushed {what} to {remote}", one.sent + one.copied, one.seconds)
    if one.result == "pulled":
        return told(f"pulled {what} from {remote}", one.size, one.seconds)
    if one.result == "to push":
        part = f"{bytes_of(one.sent)} of " if one.sent < one.size else ""
        return f"would push {what} to {remote}: {part}{bytes_of(one.size)}"
    if one.result == "to pull":
        return f"would pull {what} from {remote}: {bytes_of(one.size)}"
    where = f"{remote} already" if one.result == "there" else f"{run} already, and intact"
    return f"{what} is in {where}: {bytes_of(one.size)}"


def _demo(given: argparse.Namespace) -> int:
    # The only command that needs torch, which takes seconds to import.
    from . import demo

    if given.dir and given.dir.exists():
        raise UsageError(f"{given.dir} exists already.", fix="name a folder that does not exist yet.")
    return demo.main(given.dir)


def _run(path: str, resume: str = "must") -> Run:
    if url.is_url(path):
        raise UsageError(
            f"{url.shown(path)} is a remote folder, and RUN a directory of this machine.",
            fix="give the run directory. That of a training which was given this address instead is "
            f"{url.cache_folder(path)}.",
        )
    run = Run(path)
    run.check(resume)
    return run


def _row(run: Run, number: int, verify: bool = False, pin: bool = False) -> dict[str, Any] | None:
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


def _print_problems(rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
        if row["problem"]:
            print(row["problem"], file=sys.stderr)
