"""The commands that move checkpoints: push and pull, export."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointDamaged, RemoteError, UsageError
from ..progress import Progress
from ..run import address
from ..run.checkpoint import open_checkpoint
from ..run.directory import Run
from ..run.policy import bytes_of
from .command import CODES, add, add_checkpoint, add_json, folder_of, print_json, read_at, run_at

if TYPE_CHECKING:
    from ..interop.exporting import Model
    from ..remote.by_hand import Copying, Transfer
    from ..remote.run_copy import Remote


_STDOUT = "-"


def declare(commands: Any) -> None:
    """Declare the commands."""
    for name, command, summary, which in (
        ("push", _push, "copy checkpoints of a run to a remote folder", ("newest", "best", "all")),
        ("pull", _pull, "bring checkpoints of a remote folder into a run", ("newest", "best")),
    ):
        _add_move(add(commands, name, command, summary, f"resumable {name} runs/exp s3://bucket/exp"), which)
    summary = "write the weights of a checkpoint as a file that other tools read"
    _add_export(
        add(commands, "export", _export, summary, "resumable export runs/exp@best -o model.safetensors")
    )


def _add_move(sub: argparse.ArgumentParser, words: Sequence[str]) -> None:
    sub.add_argument("run", metavar="RUN[@N]", help="the run directory; RUN@41 is RUN with --which 41")
    add_json(sub)
    sub.add_argument("remote", metavar="REMOTE", help="the address of the remote folder: s3://bucket/exp")
    sub.add_argument(
        "--which",
        metavar="WHICH",
        type=partial(_which, words),
        help=f"{', '.join(words)} or a save number; default: the newest and the best",
    )
    sub.add_argument("--dry-run", action="store_true", help="list what would be copied, and change nothing")
    sub.description = f"{sub.description}\n\n{_GOES_ON}"


_GOES_ON = """Run the same command again to continue an interrupted copy.
Credentials come from where the filesystem's own tools look for them; see
docs/recipes/remotes.md."""


def _which(words: Collection[str], text: str) -> str | int:
    if text in words:
        return text
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(words)}, and no save number")


def _push(given: argparse.Namespace) -> int:
    run, which = _run_and_which(given, "must")
    done = _moved(given, run, lambda copying: copying.push(which))
    if any(one.result == "damaged" for one in done):
        return CODES[CheckpointDamaged]
    return CODES[RemoteError] if any(one.problem for one in done) else 0


def _pull(given: argparse.Namespace) -> int:
    run, which = _run_and_which(given, "auto")
    _moved(given, run, lambda copying: copying.pull(which))
    return 0


def _run_and_which(given: argparse.Namespace, resume: str) -> tuple[Run, str | int]:
    path, which = address.named(given.run)
    if which is None and (folder := folder_of(path)):
        path, which = str(folder.parent.parent), str(open_checkpoint(folder).about.number)
    if which is None:
        return run_at(path, resume), given.which or "newest"
    if given.which is not None:
        raise UsageError(
            f"{given.run} names a checkpoint, and so does --which {given.which}.",
            fix="leave out one of them.",
        )
    return run_at(path, resume), int(which) if which.isdecimal() else which


def _moved(given: argparse.Namespace, run: Run, move: Callable[[Copying], list[Transfer]]) -> list[Transfer]:
    # Imported here, because fsspec would slow down `resumable --help`.
    from ..remote.by_hand import Copying
    from ..remote.run_copy import Remote
    from ..remote.storage import Store

    remote = Remote(Store(given.remote))
    tell = partial(_print_transfer, run, remote, given.json)
    copying = Copying(run, remote, dry=given.dry_run, progress=Progress(), tell=tell)
    try:
        done = remote.store.interruptible(lambda: move(copying))
    except KeyboardInterrupt:
        print("resumable: interrupted; the same command continues from there.", file=sys.stderr)
        raise
    if given.json:
        about = {"run": str(run), "remote": str(remote), "dry_run": given.dry_run}
        print_json({**about, "checkpoints": [one._asdict() for one in done]})
    return done


def _print_transfer(run: Run, remote: Remote, is_json: bool, one: Transfer) -> None:
    if one.problem:
        left_out = " It is left out." if one.result == "damaged" else ""
        print(f"resumable: {one.problem}{left_out}", file=sys.stderr)
        return
    if is_json:
        return
    try:
        print(_transfer_line(one, run, remote), flush=True)
    except BrokenPipeError:
        # Whoever read the output has seen enough; what is to be moved is moved all the same.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _transfer_line(one: Transfer, run: Run, remote: Remote) -> str:
    from ..remote.push import summary

    assert one.size is not None
    what = f"checkpoint {one.number}"
    if one.result == "pushed":
        return summary(f"pushed {what} to {remote}", one.sent + one.copied, one.seconds)
    if one.result == "in part":
        return summary(f"pushed what is here of {what} to {remote}", one.sent + one.copied, one.seconds)
    if one.result == "pulled":
        return summary(f"pulled {what} from {remote}", one.size, one.seconds)
    if one.result == "to push":
        part = f"{bytes_of(one.sent)} of " if one.sent < one.size else ""
        return f"would push {what} to {remote}: {part}{bytes_of(one.size)}"
    if one.result == "to pull":
        return f"would pull {what} from {remote}: {bytes_of(one.size)}"
    where = f"{remote} already" if one.result == "there" else f"{run} already, and intact"
    return f"{what} is in {where}: {bytes_of(one.size)}"


def _add_export(sub: argparse.ArgumentParser) -> None:
    add_checkpoint(sub)
    sub.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        required=True,
        help="the output: NAME.safetensors, NAME.pt, or a folder in the Hugging Face layout; "
        "- writes safetensors to stdout",
    )
    sub.add_argument("--model", metavar="NAME", help="which of several models; or extra.ema")
    sub.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        type=_size,
        default="5GB",
        help="maximum size of a file in a folder; default: 5GB",
    )
    sub.add_argument("--force", action="store_true", help="overwrite an existing output")
    add_json(sub)


def _size(text: str) -> int:
    from ..interop import exporting

    try:
        return exporting.size_of(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


def _export(given: argparse.Namespace) -> int:
    # Imported here, because torch takes two seconds and no other command needs it.
    from ..interop import exporting

    if given.output == _STDOUT:
        return _export_to_stdout(given)
    out = Path(given.output)
    exporting.check(out, given.force)
    found, model = read_at(given.checkpoint, partial(exporting.read, name=given.model))
    files = exporting.write(model, out, given.max_shard_size)
    tied = model.tied()
    is_folder = exporting.kind_of(out) == "folder"
    if given.json:
        about = {"checkpoint": str(found.path), "number": found.about.number, "step": found.about.step}
        what = {"model": model.name, "output": str(out), "files": [one._asdict() for one in files]}
        left = _not_exported(model, out)
        print_json({**about, **what, "tensors": len(model.tensors), "tied": tied, "left_out": left})
        return 0
    size = bytes_of(sum(one.size for one in files))
    print(f"exported {model.name} of {found} to {out}: {len(model.tensors)} tensors, {size}")
    for one in files if len(files) > 1 else ():
        print(f"  {one.path}  {bytes_of(one.size)}")
    how = "stored once, and left to the model that loads them" if is_folder else "stored once"
    for name, kept in tied.items():
        print(f"  {name} is {kept}: {how}")
    for name in _not_exported(model, out):
        print(f"resumable: {name} is no tensor, and left out; a .pt file can hold it.", file=sys.stderr)
    return 0


def _export_to_stdout(given: argparse.Namespace) -> int:
    from ..interop import exporting

    if given.json or sys.stdout.isatty():
        what = "JSON as well as the weights" if given.json else "weights, and it is a terminal"
        raise UsageError(f"stdout would get {what}.", fix="send it to a file or a program, without --json.")
    found, model = read_at(given.checkpoint, partial(exporting.read, name=given.model))
    exporting.write_to(sys.stdout.buffer, model)
    for name in [*model.left, *model.values]:
        print(f"resumable: {name} is no tensor, and left out; a .pt file can hold it.", file=sys.stderr)
    print(f"exported {model.name} of {found}: {len(model.tensors)} tensors", file=sys.stderr)
    return 0


def _not_exported(model: Model, out: Path) -> list[str]:
    from ..interop import exporting

    is_torch = exporting.kind_of(out) == "torch"
    return [*model.left, *(() if is_torch else model.values)]
