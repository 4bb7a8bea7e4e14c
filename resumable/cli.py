"""Parse, call one function, print, choose the exit code; nothing else."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from . import __version__, history
from .errors import (
    CannotRead,
    CheckpointDamaged,
    CheckpointNotFound,
    FormatTooNew,
    NotARun,
    ResumableError,
    RunInUse,
    UsageError,
)
from .journal import Line, plain
from .policy import bytes_of
from .run import Run

EXIT_CODES = """exit codes:
  0 fine   1 found a problem   2 usage   3 not found   4 damaged   5 in use   130 interrupted"""

_CODES: dict[type[ResumableError], int] = {
    UsageError: 2,
    CheckpointNotFound: 3,
    NotARun: 3,
    CheckpointDamaged: 4,
    FormatTooNew: 4,
    RunInUse: 5,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    given = _parser().parse_args(arguments)
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
        sub.add_argument("run", metavar="RUN", help="the run directory, such as runs/exp")
        sub.add_argument("--json", action="store_true", help="print JSON; docs/cli.md has its fields")
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


def _ls(given: argparse.Namespace) -> int:
    run = _run(given.run)
    rows = [row for number in run.numbers() if (row := _row(run, number))]
    newest = max((row["number"] for row in rows if not row["problem"]), default=None)
    best = next((row["best"] for row in reversed(rows) if not row["problem"]), None)
    for row in rows:
        row["newest"], row["best"] = row["number"] == newest, row["number"] == best
    lines = _history(run)
    _add_history(rows, lines, newest)
    attempts = history.attempts(lines)
    if given.json:
        print(json.dumps({"checkpoints": rows, "attempts": attempts}, indent=1))
    else:
        _print_table([_HEAD, *(_cells(row) for row in rows)], to_the_left=(4, 7, 8))
        if attempts:
            print()
            _print_table([_attempt_cells(attempt) for attempt in attempts], to_the_left=range(1, 6))
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


def _verify(given: argparse.Namespace) -> int:
    rows = []
    run = _run(given.run)
    for number in run.numbers():
        if not (row := _row(run, number, verify=True)):
            continue
        rows.append({key: row[key] for key in ("number", "path", "size", "problem")})
        if not given.json:
            state = "damaged" if row["problem"] else f"intact   {bytes_of(row['size'])}"
            print(f"checkpoint {number:>6}  {state}", flush=True)
    if given.json:
        print(json.dumps(rows, indent=1))
    else:
        _print_problems(rows)
    return _CODES[CheckpointDamaged] if any(row["problem"] for row in rows) else 0


def _demo(given: argparse.Namespace) -> int:
    # The only command that needs torch, which takes seconds to import.
    from . import demo

    if given.dir and given.dir.exists():
        raise UsageError(f"{given.dir} exists already.", fix="name a folder that does not exist yet.")
    return demo.main(given.dir)


def _run(path: str) -> Run:
    run = Run(path)
    run.check("must")
    return run


def _row(run: Run, number: int, verify: bool = False) -> dict[str, Any] | None:
    row: dict[str, Any] = {"number": number, "path": None, "problem": None, "best": None}
    try:
        found = run.open(number)
        if verify:
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


_HEAD = ("number", "epoch", "batch", "step", "metrics", "size", "saved", "why", "")


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    if row["problem"]:
        return (str(row["number"]), *[""] * (len(_HEAD) - 2), "damaged")
    metrics = ", ".join(f"{k} {float(v):.4g}" for k, v in row["metrics"].items())
    marks = ", ".join(word for word in ("newest", "best", "abandoned") if row[word])
    counts = (str(row[key]) for key in ("number", "epoch", "batch", "step"))
    return (*counts, metrics, bytes_of(row["size"]), _age(row["saved"]), str(row["why"] or ""), marks)


def _attempt_cells(attempt: Mapping[str, Any]) -> tuple[str, ...]:
    came_from, ended = attempt["from"], attempt["ended"]
    return (
        f"attempt {attempt['attempt']}",
        str(attempt["host"] or ""),
        f"process {attempt['pid']}",
        "fresh" if came_from is None else f"from checkpoint {came_from}",
        _age(attempt["time"]),
        f"ended: {ended.splitlines()[0]}" if ended else "running, or ended without a word",
    )


def _print_table(rows: Sequence[Sequence[str]], to_the_left: Collection[int]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        # Numbers to the right, as they are added up; words to the left.
        cells = [
            c.ljust(w) if i in to_the_left else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def _print_problems(rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
        if row["problem"]:
            print(row["problem"], file=sys.stderr)


def _age(saved: str) -> str:
    seconds = (datetime.now(timezone.utc) - datetime.fromisoformat(saved)).total_seconds()
    for length, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds // length:.0f} {unit} ago"
    return f"{max(0, seconds):.0f} s ago"
