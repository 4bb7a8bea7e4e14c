"""The commands that tidy: prune."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .. import intervals
from ..errors import CheckpointDamaged, CheckpointNotFound, UsageError
from ..files import disk
from ..progress import Progress
from ..run import checkpoint, cleanup, history, policy
from ..run.cleanup import Link, Standing, Verdict, Wish
from ..run.directory import Run
from ..run.manifest import Manifest
from ..run.policy import Keep, bytes_of
from ..views.tables import print_table
from .command import add, add_run, print_json, run_at

_NOTES = """Give at least one of --keep, --keep-best, --keep-every, --damaged and
--abandoned. The newest intact checkpoint and the best are never removed. The
newest is verified first; with --damaged all are. While a training uses the
run, nothing is removed (exit code 5). On a terminal it shows what would go
and asks; the exit code is 1 if the answer is no."""


def declare(commands: Any) -> None:
    """Declare the commands."""
    summary = "remove checkpoints that are no longer needed"
    sub = add(commands, "prune", _prune, summary, "resumable prune runs/exp --keep 3 --dry-run")
    sub.description = f"{sub.description}\n\n{_NOTES}"
    add_run(sub)
    sub.add_argument("--keep", type=int, metavar="N", help="keep the newest N, and the best")
    sub.add_argument(
        "--keep-best", type=int, metavar="N", help="keep the N best by the metric of the run; default: 1"
    )
    sub.add_argument(
        "--keep-every",
        metavar="EVERY",
        action="append",
        help="keep the first at or after each multiple: 1000 (steps), '10 epochs', '1 day'; repeatable",
    )
    sub.add_argument("--damaged", action="store_true", help="remove checkpoints with a damaged byte")
    sub.add_argument(
        "--abandoned",
        action="store_true",
        help="remove checkpoints of abandoned branches, as ls shows them",
    )
    sub.add_argument("--dry-run", action="store_true", help="list what would be removed, and change nothing")
    sub.add_argument("--yes", "-y", action="store_true", help="remove without asking on a terminal")


def _prune(given: argparse.Namespace) -> int:
    run, wish = run_at(given.run), _wish(given)
    with _held(run, dry=given.dry_run):
        standing, seen = _standing(run, wish)
        _refuse_without_goal(wish, standing)
        verdicts = cleanup.verdicts(standing, wish)
        going = [one.number for one in verdicts if one.goes]
        paths = {one.number: str(run.path_of(one.number)) for one in verdicts}
        links = {number: one.links for number, one in seen.items()}
        if going and _asks(given):
            rows = [_row(one, paths[one.number], seen.get(one.number), None) for one in verdicts]
            if not _agrees(rows, cleanup.freed(going, links)):
                return 1
        problems = {} if given.dry_run else run.remove(going)
        if going and not given.dry_run:
            _mend_links(run, standing)
    room = cleanup.freed({*going} - {*problems}, links)
    rows = [_row(one, paths[one.number], seen.get(one.number), problems.get(one.number)) for one in verdicts]
    if given.json:
        print_json({"run": str(run), "dry_run": given.dry_run, "freed": room, "checkpoints": rows})
    else:
        _print(rows, room, given.dry_run)
    unread = standing.unread if wish.damaged else ()
    for number in unread:
        print(
            f"resumable: checkpoint {number} stays: that it cannot be read now does not prove it damaged. "
            f"If it is lost for good, delete {paths[number]}.",
            file=sys.stderr,
        )
    return 1 if problems or unread else 0


def _asks(given: argparse.Namespace) -> bool:
    is_seen = sys.stdin.isatty() and sys.stdout.isatty()
    return is_seen and not (given.yes or given.dry_run or given.json)


def _agrees(rows: Sequence[Mapping[str, Any]], room: int) -> bool:
    """Show what would go, and return whether the user agrees; nothing else than y or yes does."""
    _print_rows(rows, dry=True)
    count = policy.counted(sum(row["goes"] for row in rows), "checkpoint")
    with contextlib.suppress(EOFError):
        if input(f"\nRemove {count} ({bytes_of(room)})? [y/N] ").strip().lower() in ("y", "yes"):
            return True
    print("Nothing was changed.")
    return False


def _wish(given: argparse.Namespace) -> Wish:
    counts = {"--keep": given.keep, "--keep-best": given.keep_best}
    for name, count in counts.items():
        if count is not None and count < 1:
            raise UsageError(f"{name} {count} keeps nothing.", fix="give a whole number from 1.")
    rules = [int(text) if text.isdecimal() else text for text in given.keep_every or ()]
    every = intervals.multiples("--keep-every", rules) if rules else None
    keep = None
    if every or any(count is not None for count in counts.values()):
        keep = Keep(given.keep or 1, given.keep_best or 1, every)
    if not (keep or given.damaged or given.abandoned):
        raise UsageError(
            "nothing says which checkpoints are to go.",
            fix="give one of --keep N, --keep-best N, --keep-every EVERY, --damaged or --abandoned; "
            "with --dry-run nothing is removed.",
        )
    return Wish(keep, given.damaged, given.abandoned)


@contextlib.contextmanager
def _held(run: Run, dry: bool) -> Iterator[None]:
    if not dry:
        run.acquire()
    try:
        yield
    finally:
        run.release()


class _Seen(NamedTuple):
    about: Manifest
    links: list[Link]


def _standing(run: Run, wish: Wish) -> tuple[Standing, dict[int, _Seen]]:
    """Return what is known of the checkpoints; the newest, or all, are read to the last byte."""
    seen: dict[int, _Seen] = {}
    damaged: list[int] = []
    unread: list[int] = []
    newest: Manifest | None = None
    for number in reversed(run.numbers()):
        try:
            found = run.open(number)
            seen[number] = _Seen(found.about, [*map(_link, found.look().values())])
            if newest is None or wish.damaged:
                with Progress().moving(f"reading checkpoint {number}", found.about.size) as told:
                    found.verify(told)
            newest = newest or found.about
        except CheckpointDamaged as exc:
            (damaged if disk.is_proof(exc) else unread).append(number)
        except CheckpointNotFound:
            # During a dry run a training may have pruned it.
            continue
    if newest is None:
        raise CheckpointDamaged(
            f"none of the {len(damaged) + len(unread)} checkpoints in {run} is intact, so none is removed: "
            "what is left of the training may still be of use.",
            fix=f"`resumable verify {run} --all` tells what is wrong. To be rid of all, delete the folder.",
        )
    whole = [seen[number].about for number in sorted({*seen} - {*damaged, *unread})]
    # The newest one may come from a script without a metric.
    known = next((about.best for about in reversed(whole) if about.best), None)
    goal, best = (known.goal, known.number) if known else (None, None)
    if best not in {about.number for about in whole}:
        leader = policy.best_of(goal, ((about.number, about.metrics) for about in whole))
        best = leader.number if leader else None
    left = set()
    if wish.abandoned:
        parents = {about.number: about.parent for about in whole}
        left = history.left_behind(history.read(run.path), parents, newest.number)
    facts = [*map(policy.facts_of, whole)]
    return Standing(facts, damaged, unread, left, newest.number, best, goal), seen


def _link(found: os.stat_result) -> Link:
    return Link(checkpoint.identity(found), found.st_nlink, found.st_size)


def _refuse_without_goal(wish: Wish, standing: Standing) -> None:
    if wish.keep and wish.keep.best > 1 and standing.goal is None:
        raise UsageError(
            f"--keep-best {wish.keep.best}, but nothing in this run says which checkpoints are the best.",
            fix="leave it out; --keep N keeps the newest.",
        )


def _mend_links(run: Run, standing: Standing) -> None:
    for word, number in (("newest", standing.newest), ("best", standing.best)):
        link = run.path / word
        if link.is_symlink() and not link.exists():
            link.unlink()
        run.point(word, run.path_of(number) if number is not None else None)


def _row(verdict: Verdict, path: str, seen: _Seen | None, problem: str | None) -> dict[str, Any]:
    about = seen and seen.about
    return {
        "number": verdict.number,
        "path": path,
        "step": about and about.step,
        "size": about and about.size,
        "goes": verdict.goes,
        "why": verdict.why,
        "problem": problem,
    }


def _print_rows(rows: Sequence[Mapping[str, Any]], dry: bool) -> None:
    head = ["number", "step", "size", "", ""]
    print_table([head, *(_cells(row, dry) for row in rows)], (3, 4), marks=4, has_head=True)


def _print(rows: Sequence[Mapping[str, Any]], room: int, dry: bool) -> None:
    _print_rows(rows, dry)
    going = sum(row["goes"] and not row["problem"] for row in rows)
    stay = len(rows) - going
    if dry:
        print(f"\n{going} would go, {stay} would stay; {bytes_of(room)} would be freed. Nothing was changed.")
    else:
        print(f"\n{going} removed, {stay} there; {bytes_of(room)} freed")


def _cells(row: Mapping[str, Any], dry: bool) -> list[str]:
    size = "" if row["size"] is None else bytes_of(row["size"])
    word = "stays" if not row["goes"] else "would go" if dry else "removed"
    if row["problem"]:
        word = f"not removed: {row['problem']}"
    return [str(row["number"]), "" if row["step"] is None else str(row["step"]), size, word, row["why"]]
