"""The commands that move checkpoints: push and pull."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from .command import CODES, add, add_run, print_json, run_at
from .copying import Copying, Transfer
from .errors import CheckpointDamaged
from .policy import bytes_of
from .progress import Progress
from .pulling import attended
from .pusher import told
from .remote import Remote
from .run import Run
from .store import Store


def declare(commands: Any) -> None:
    """Declare them."""
    for name, command, summary, which in (
        ("push", _push, "copy checkpoints of a run to a remote folder", ("newest", "best", "all")),
        ("pull", _pull, "bring checkpoints of a remote folder into a run", ("newest", "best")),
    ):
        _add_move(add(commands, name, command, summary, f"resumable {name} runs/exp s3://bucket/exp"), which)


def _add_move(sub: argparse.ArgumentParser, words: Sequence[str]) -> None:
    add_run(sub)
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


def _push(given: argparse.Namespace) -> int:
    done = _moved(given, run_at(given.run), lambda copying: copying.push(given.which))
    return CODES[CheckpointDamaged] if any(one.problem for one in done) else 0


def _pull(given: argparse.Namespace) -> int:
    _moved(given, run_at(given.run, "auto"), lambda copying: copying.pull(given.which))
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
        print_json({**about, "checkpoints": [one._asdict() for one in done]})
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
