"""The commands that show whether a run or a script can be trusted: verify and audit."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any, NoReturn

from ..errors import CheckpointDamaged, CheckpointNotFound, FormatTooNew, UsageError
from ..progress import Progress
from ..run import address
from ..run.checkpoint import Checkpoint, open_checkpoint
from ..run.policy import bytes_of
from ..views.tables import painted
from .command import CODES, add, add_json, folder_of, print_json, print_problems, run_at, whole_number

Row = dict[str, Any]


def declare(commands: Any) -> None:
    """Declare the commands."""
    summary = "read every byte of checkpoints and report damage"
    sub = add(commands, "verify", _verify, summary, "resumable verify runs/exp --all")
    sub.add_argument(
        "run",
        metavar="RUN[@N]",
        help="runs/exp (what a resume would use: the newest intact checkpoint, and the best), runs/exp@41, "
        "runs/exp@best, or a checkpoint's folder",
    )
    sub.add_argument("--all", action="store_true", help="all checkpoints of the run")
    sub.add_argument("--pin", action="store_true", help="print content digests for RunState.load(expect=...)")
    add_json(sub)
    _declare_audit(commands)


def _declare_audit(commands: Any) -> None:
    summary = "test whether a script resumes exactly, and name what does not"
    sub = add(commands, "audit", _audit, summary, "resumable audit --steps 40 -- python train.py --lr 0.1")
    sub.usage = "resumable audit [options] -- COMMAND ..."
    sub.add_argument(
        "script", metavar="COMMAND", nargs=argparse.REMAINDER, help="starts the training; may be torchrun"
    )
    sub.add_argument(
        "--steps", type=whole_number, default=20, metavar="N", help="how many steps to train (default: 20)"
    )
    sub.add_argument(
        "--at",
        type=whole_number,
        action="append",
        default=[],
        metavar="N",
        help="stop after N steps, and resume; repeatable (default: in mid-epoch, at an "
        "epoch's last batch, and at an epoch's end)",
    )
    sub.add_argument(
        "--deterministic", action="store_true", help="use deterministic operations where torch has them"
    )
    add_json(sub)
    sub.description = (
        f"{sub.description}\n\nThe script and its runs stay unchanged: it trains in temporary directories,\n"
        "three times without a stop and once with several. The exit code is 0 if all\n"
        "results are equal bit for bit, and 1 if not."
    )


def _audit(given: argparse.Namespace) -> int:
    from ..audit import audit, trials, verdicts

    command = given.script[given.script[:1] == ["--"] :]
    if not command:
        raise UsageError(
            "no command was given to audit.",
            fix="give it after two dashes: resumable audit -- python train.py",
        )
    trials.check(command)
    with _leaving():
        found = audit.audit(
            command,
            steps=given.steps,
            at=given.at,
            deterministic=given.deterministic,
            told=lambda text: print(text, end="", file=sys.stderr, flush=True),
        )
    if given.json:
        print_json(found.to_json())
    else:
        verdicts.print_it(found)
    return 0 if found.is_exact else 1


@contextlib.contextmanager
def _leaving() -> Iterator[None]:
    """End the training that was started when this process is told to leave: it would not stop by itself."""
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.signal(number, _leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _verify(given: argparse.Namespace) -> int:
    rows: list[Row] = []
    for row in _verified(given):
        rows.append(row)
        if not given.json:
            state = "damaged" if row["problem"] else f"intact   {bytes_of(row['size'])}"
            state += f"  {row['pin']}" if row.get("pin") else ""
            state += f"  a part: {row['elsewhere']} files on other disks" if row["elsewhere"] else ""
            print(f"checkpoint {row['number']:>6}  {painted(state)}", flush=True)
    if given.json:
        print_json(rows)
    else:
        print_problems(rows)
    return CODES[CheckpointDamaged] if any(row["problem"] for row in rows) else 0


def _verified(given: argparse.Namespace) -> Iterator[Row]:
    path, which = address.named(given.run)
    if which is None and (folder := folder_of(path)):
        found = open_checkpoint(folder)
        yield _row(found.about.number, lambda: found, given.pin)
        return
    run = run_at(path)
    if which is not None and which != "newest":
        chosen = run.choose(which, lambda found: found)
        assert chosen
        yield _row(chosen[0].about.number, lambda: chosen[0], given.pin)
        return
    # First what a resume would try, in order; then what restore("best") would use.
    best = None
    for number in run.numbers() if given.all else reversed(run.numbers()):
        row = _row(number, partial(run.open, number), given.pin)
        # A running training may have pruned it.
        if row["problem"] and not run.path_of(number):
            continue
        yield row
        if not row["problem"] and not given.all:
            best = run.open(number).about.best
            break
    if best and best.number != number and which is None and run.path_of(best.number):
        yield _row(best.number, partial(run.open, best.number), given.pin)


def _row(number: int, open_it: Callable[[], Checkpoint], pin: bool) -> Row:
    row: Row = {
        "number": number,
        "path": None,
        "size": None,
        "elsewhere": 0,
        "problem": None,
        **({"pin": None} if pin else {}),
    }
    try:
        found = open_it()
        with Progress().moving(f"checkpoint {number}", found.about.size) as told:
            if pin:
                row["pin"] = found.pin(told)
            else:
                found.verify(told)
    except (CheckpointDamaged, CheckpointNotFound, FormatTooNew) as exc:
        return {**row, "problem": exc.problem}
    about = found.about
    return {**row, "path": str(found.path), "size": about.size, "elsewhere": len(about.elsewhere)}
