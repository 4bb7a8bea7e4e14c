"""The commands that read a run: ls, show, diff, report."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ..errors import CannotRead, UsageError, printable
from ..files.jsonl import Line
from ..run import history
from ..run.checkpoint import Checkpoint
from ..run.directory import Run
from ..run.policy import bytes_of
from . import listing
from .command import (
    add,
    add_checkpoint,
    add_json,
    print_json,
    read_at,
    run_at,
    run_of,
    whole_number,
)


def declare(commands: Any) -> None:
    """Declare the commands."""
    listing.declare(commands)
    summary = "what one checkpoint holds: tensors, settings, environment"
    sub = add(commands, "show", _show, summary, "resumable show runs/exp@best")
    add_checkpoint(sub)
    _add_depth(sub)
    summary = "how two checkpoints differ: tensors, values, settings, environment"
    sub = add(commands, "diff", _diff, summary, "resumable diff runs/exp@41 runs/other@best")
    add_checkpoint(sub, "before", "A")
    add_checkpoint(sub, "after", "B")
    _add_depth(sub)
    sub.add_argument(
        "--trace",
        action="store_true",
        help="compare two traces, written by RunState.load(..., trace=FILE), and show where they diverge",
    )
    sub.description = f"{sub.description}\n\nThe exit code is 0 if they are equal, and 1 if they differ."
    _declare_report(commands)


def _add_depth(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--all", action="store_true", help="print a line for each tensor and each value")
    sub.add_argument(
        "--depth", type=whole_number, metavar="N", help="group tensors by the first N names of their path"
    )
    add_json(sub)


def _declare_report(commands: Any) -> None:
    summary = "one page about runs: state, curves, resumes, costs, what differs"
    sub = add(commands, "report", _report, summary, "resumable report runs/exp runs/wider -o report.html")
    sub.add_argument("run", metavar="RUN", nargs="+", help="the run directories")
    sub.add_argument("-o", dest="output", metavar="FILE", help="the output file; default: report.html")
    sub.add_argument("--verify", action="store_true", help="read every byte of the checkpoints")
    add_json(sub)


def _report(given: argparse.Namespace) -> int:
    # Here and not above: no other command needs what makes the page.
    from ..views import report

    # A run without checkpoints may still have its history.
    paths = dict.fromkeys(map(run_of, given.run))
    runs = [run_at(path, "auto" if Path(path, history.NAME).exists() else "must") for path in paths]
    if given.json and given.output is None:
        print_json({"page": None, "runs": report.facts(runs, reads_all=given.verify)})
        return 0
    made, facts = report.write(runs, given.output or report.NAME, reads_all=given.verify)
    if given.json:
        print_json({"page": str(made.path), "runs": facts})
    else:
        print(f"{made.path}: {bytes_of(made.path.stat().st_size)}, opens in any browser")
    return 0


def _show(given: argparse.Namespace) -> int:
    # Here and not above: they import torch, which takes longer than `ls` needs to answer.
    from ..progress import Progress
    from ..views import contents, details

    def read(found: Checkpoint) -> tuple[contents.Contents, contents.Measured]:
        with Progress().moving(f"reading checkpoint {found.about.number}", found.about.size) as told:
            held = contents.read(found)
            return held, contents.measure(held, told)

    found, (held, measured) = read_at(given.checkpoint, read)
    facts = details.facts(held, measured, _why(found))
    if given.json:
        print_json(facts)
    else:
        details.print_facts(facts, given.depth, all_of_it=given.all)
    return 0


def _why(found: Checkpoint) -> str | None:
    """Return why a checkpoint was made, if its run's history says so."""
    lines = _history(Run(found.path.parent.parent))
    about = found.about
    saves = [line for line in lines if history.is_save(line) and line["number"] == about.number]
    why = saves[-1].get("why") if saves and saves[-1].get("time") == about.saved else None
    return why if isinstance(why, str) else None


def _diff(given: argparse.Namespace) -> int:
    if given.trace:
        return _diff_traces(given)
    # See _show.
    from ..progress import Progress
    from ..views import comparison, contents, details

    _, then = read_at(given.before, contents.read)
    _, now = read_at(given.after, contents.read)
    with Progress().moving("comparing", comparison.size_to_read(then, now)) as told:
        found = comparison.compare(then, now, told)
    if given.json:
        rows = [{key: row[key] for key in row if key != "distance"} for row in found["tensors"]]
        print_json({**found, "tensors": rows})
    else:
        kinds = {name: then.kind_of(name) for name in then.found.about.parts}
        if not given.all:
            found = comparison.folded(found, kinds, then.found.about, now.found.about)
        details.print_differences(found, kinds, given.depth, all_of_it=given.all)
    return 0 if found["equal"] else 1


def _diff_traces(given: argparse.Namespace) -> int:
    from ..trace import trace_diff

    if given.all or given.depth:
        raise UsageError(
            "--trace compares what was written down at each boundary; --all and --depth are for checkpoints.",
            fix="leave them out; --json has all that differs.",
        )
    compared = trace_diff.compare(given.before, given.after)
    if given.json:
        print_json(trace_diff.to_json(compared))
    else:
        for line in trace_diff.lines(compared):
            print(printable(line))
    return 0 if compared["equal"] else 1


def _history(run: Run) -> list[Line]:
    try:
        return history.read(run.path)
    except CannotRead as exc:
        # The checkpoints can be read without it.
        print(f"resumable: {exc}", file=sys.stderr)
        return []
