"""One run directory: list its checkpoints, find the newest intact one, prune."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import re
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Protocol, TypeGuard, TypeVar

from ..errors import (
    CannotRead,
    CheckpointDamaged,
    CheckpointNotFound,
    FormatTooNew,
    NotARun,
    RemoteError,
    ResumableError,
    RunExists,
    SaveFailed,
    UsageError,
    warn,
)
from ..files import disk, lock
from . import checkpoint, html, manifest, policy
from .checkpoint import Checkpoint, Stage
from .listing import Changes, Listing, Stamp, number_of, stamp
from .manifest import Best, Goal, Manifest
from .policy import Facts, Keep, counted, when

T = TypeVar("T")
Which = str | int | os.PathLike[str]
"""A word, a save number or a checkpoint's path."""


class Copies(Protocol):
    """Copies of a run's checkpoints elsewhere."""

    @property
    def numbers(self) -> Mapping[int, str]:
        """The names of the folders, by save number."""

    def pull(self, number: int) -> None:
        """Copy one into the run, in place of a damaged one."""

    def best(self, above: int) -> int | None:
        """Return the number of the best, according to those above a number."""


_AT_A_GLANCE = 5
_NEWEST = ("must", "newest", "latest", "last")
_WORDS = ("auto", "never", "best", *_NEWEST)


class Run:
    """A run directory, to inspect and to prune; nothing is read before a method is called.

    >>> Run("runs/exp").numbers()
    []
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._given = os.fspath(path)
        # Absolute, because a script may change its working directory.
        self.path = Path(path).absolute()
        self.folder = self.path / "checkpoints"
        self._lock: lock.Lock | None = None
        self._is_free = threading.Event()
        self._is_free.set()
        # A save in the background and the script may both list the run.
        self._guard = threading.RLock()
        self._kept: Listing | None = None
        # Not the manifests: those of a large model are megabytes.
        self._facts: dict[str, tuple[Stamp | None, Facts]] = {}

    def __str__(self) -> str:
        return str(self._given)

    def _repr_html_(self) -> str:
        """Return the table that a notebook shows: the newest checkpoints."""
        there = self.numbers()
        caption = f"{self}: {counted(len(there), 'checkpoint')}"
        caption += f", the newest {_AT_A_GLANCE}" if len(there) > _AT_A_GLANCE else ""
        rows = map(self._glance, reversed(there[-_AT_A_GLANCE:]))
        return html.table(caption, ("number", "epoch", "batch", "step", "metrics", "saved"), rows, (4, 5))

    def _glance(self, number: int) -> tuple[object, ...]:
        try:
            about = self.open(number).about
        except (CheckpointDamaged, CheckpointNotFound, FormatTooNew):
            return number, *[""] * 4, "damaged"
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in about.metrics.items())
        return number, about.epoch, about.batch, about.step, metrics, when(about.saved)

    def check(self, resume: Which, is_copied: bool = False) -> None:
        """Raise if the path cannot be a run, before anything is made or locked.

        What is not here may be in a remote copy, if there is one.
        """
        for path in (self.folder, *self.folder.parents):
            if os.path.lexists(path) and not _is_folder(path):
                raise NotARun(
                    f"{path} is not a folder.",
                    fix="give the run a directory: a new one, an empty one, or one of an earlier run.",
                )
        is_empty = self.highest() is None
        if resume == "never" and not is_empty:
            held = len(self.numbers())
            raise RunExists(
                f"{self.path} holds {held} checkpoint{'s' * (held != 1)}, and resume='never'.",
                fix="give the new run another directory, or move this one away.",
            )
        if is_copied and (resume in _WORDS or is_number(resume)):
            return
        if resume in (*_NEWEST, "best") and is_empty:
            raise self._missing()
        if resume not in _WORDS:
            self._open_named(resume)

    def numbers(self) -> list[int]:
        """Return the save numbers, oldest first, without opening a checkpoint."""
        with self._guard:
            return [*self._look().parsed().numbers]

    def highest(self) -> int | None:
        """Return the highest save number, None without a checkpoint."""
        with self._guard:
            newest = self._look().newest()
        return None if newest is None else number_of(newest)

    def holds_more_than(self, count: int) -> bool:
        """Return whether there are more than `count` checkpoints."""
        with self._guard:
            return len(self._look().parsed().numbers) > count

    def _look(self) -> Listing:
        kept = self._kept
        if kept and kept.is_current():
            return kept
        try:
            self._kept = fresh = Listing(self.folder)
        except OSError as exc:
            self._kept = None
            raise CannotRead(
                f"{self.folder} cannot be read: {exc.strerror}.",
                fix="mend the cause (the disk, permissions) and start again.",
            ) from exc
        # Another process may have put another checkpoint under a known name.
        if kept and not kept.is_sure and kept.leaders and kept.names == fresh.parsed().names:
            fresh.leaders = kept.leaders
        return fresh

    def holds(self, found: Checkpoint) -> bool:
        """Return whether a checkpoint belongs to this run."""
        return found.path.resolve().parent == self.folder.resolve()

    def path_of(self, number: int) -> Path | None:
        """Return the folder of a checkpoint, if it exists."""
        with self._guard:
            name = self._look().parsed().names.get(number)
        return None if name is None else self.folder / name

    def open(self, number: int) -> Checkpoint:
        """Return one checkpoint by its save number."""
        path = self.path_of(number)
        if path is None:
            raise self._no_such(number)
        return _opened(path)

    def _no_such(self, number: int) -> CheckpointNotFound:
        there = ", ".join(map(str, self.numbers())) or "none"
        return CheckpointNotFound(
            f"there is no checkpoint {number} in {self.path}; there are: {there}.",
            fix="name one of these, or resume='auto' for the newest intact one.",
        )

    def checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints whose manifests are intact, oldest first."""
        return [*reversed([*self._intact()])]

    def _intact(self) -> Iterator[Checkpoint]:
        for path in self._newest_first():
            with contextlib.suppress(CheckpointDamaged):
                yield _opened(path)

    def _newest_first(self) -> Iterator[Path]:
        with self._guard:
            newest = self._look().newest()
        if newest is None:
            return
        yield self.folder / newest
        # Sorted only now: it is nearly always the newest, and sorting thousands of others takes time.
        for number in reversed(self.numbers()):
            path = self.path_of(number)
            if path and path.name != newest:
                yield path

    def choose(
        self,
        which: Which,
        read: Callable[[Checkpoint], T],
        copies: Copies | None = None,
        skip: Container[int] = (),
    ) -> tuple[Checkpoint, T] | None:
        """Return the checkpoint that `which` means and the result of `read` for it; None to start fresh.

        What is not here, or is damaged, is taken from its `copies`. Of the newest, those to `skip` come last.
        """
        is_empty = self.highest() is None and not (copies and copies.numbers)
        if which == "never" or (which == "auto" and is_empty):
            return None
        if which == "auto" or which in _NEWEST:
            return self._newest_intact(read, copies, skip)
        if which != "best" and not is_number(which):
            found = self._open_named(which)
            return found, read(found)
        number = self._best_number(copies) if which == "best" else int(which)
        return self._read(number, read, copies)

    def _newest_intact(
        self, read: Callable[[Checkpoint], T], copies: Copies | None, skip: Container[int]
    ) -> tuple[Checkpoint, T]:
        # Newest is the highest save number: after restore(), the highest step may be on an abandoned branch.
        last: ResumableError | None = None
        for number in _those_last(skip, self._newest_numbers(copies)):
            try:
                return self._read(number, read, copies)
            except (CheckpointDamaged, RemoteError) as exc:
                if isinstance(exc, RemoteError) and self.highest() is None:
                    raise
                # Warn of each: every skipped checkpoint is lost training.
                warn(f"{exc.problem} It is skipped; an older checkpoint is used.")
                last = exc
        if last is None:
            raise self._missing()
        if isinstance(last, RemoteError):
            raise last
        where, count, other = f"{self.path}", len(self.numbers()), "another directory"
        if copies and copies.numbers:
            where, count = f"{where} or {copies}", len({*self.numbers(), *copies.numbers})
            other += " and another remote folder"
        raise CheckpointDamaged(
            f"none of the {count} checkpoints in {where} is intact. Of the last one tried: {last.problem}",
            fix=f"look at them with `resumable verify {self} --all`; to start fresh, give the run {other}.",
        ) from last

    def _newest_numbers(self, copies: Copies | None) -> Iterator[int]:
        if copies and copies.numbers:
            yield from sorted({*self.numbers(), *copies.numbers}, reverse=True)
            return
        for path in self._newest_first():
            yield number_of(path.name)

    def _read(
        self, number: int, read: Callable[[Checkpoint], T], copies: Copies | None
    ) -> tuple[Checkpoint, T]:
        is_copied = copies is not None and number in copies.numbers
        if is_copied and self.path_of(number) is None:
            assert copies is not None
            copies.pull(number)
        try:
            found = self.open(number)
            return found, read(found)
        except CheckpointDamaged as exc:
            if not is_copied:
                raise
            warn(f"{exc.problem} It is taken from {copies}.")
        assert copies is not None
        copies.pull(number)
        found = self.open(number)
        return found, read(found)

    def _best_number(self, copies: Copies | None = None) -> int:
        here = next((found.about for found in self._intact() if found.about.best), None)
        # A newer one in the remote may know of a better one.
        if copies and (best := copies.best(above=here.number if here else 0)):
            return best
        if here and here.best:
            return here.best.number
        raise CheckpointNotFound(
            f"no checkpoint in {self.path} is known to be the best.",
            fix="say which metric decides (maximize= or minimize=) and give it to save().",
        )

    def _open_named(self, which: Which) -> Checkpoint:
        if isinstance(which, bool) or not isinstance(which, (int, str, os.PathLike)):
            raise UsageError(
                f"resume={which!r} does not say what to go on from.",
                fix="say 'auto', 'must', 'never', 'best', a save number, or a checkpoint's path.",
            )
        if is_number(which):
            return self.open(int(which))
        assert not isinstance(which, int)
        path = Path(which).resolve()
        if os.path.lexists(path / manifest.NAME):
            return checkpoint.open_checkpoint(path)
        raise CheckpointNotFound(
            f"resume={os.fspath(which)!r} is neither a word that is known nor a checkpoint's folder.",
            fix="say 'auto', 'must', 'never', 'best', a save number, or the path of a folder with a "
            f"{manifest.NAME}.",
        )

    def _missing(self) -> CheckpointNotFound:
        """Return the error for a run that has to exist and does not."""
        hint = f" Did you mean {meant}?" if (meant := _meant(self.path)) else ""
        what = "holds no checkpoint" if self.path.is_dir() else "does not exist"
        return CheckpointNotFound(
            f"{self.path} {what}.{hint}",
            fix="check the path. In a script, resume='auto' starts fresh where there is nothing yet.",
        )

    def acquire(self) -> None:
        """Become the only process that writes this run, and clean up after the last one."""
        is_held = self._lock is not None and self._lock.is_held()
        if self._lock and is_held and self._lock.is_in_place():
            self._lock.renew()
            return
        # The locked folder may have been moved; another process could start here.
        self.release()
        with self._writing():
            disk.make_folder(self.path)
            disk.flush_names(self.path)
            self._lock = lock.Lock(self.path / ".lock")
            self._is_free.clear()
            self._remove_debris()
        if is_held:
            warn(
                f"{self.path} is not what this process has locked: it was moved or deleted, or its disk is "
                "not mounted any more. What is saved from here on goes to the folder that has this name now."
            )

    def release(self) -> None:
        """Release the lock, so that another process can write this run."""
        if self._lock:
            self._lock.release()
            self._lock = None
        self._is_free.set()

    def wait_until_free(self, patience: float) -> None:
        """Wait until the lock of this object is released, for so many seconds at most."""
        self._is_free.wait(patience)

    def identity(self, known: str | None = None) -> str:
        """Return the run's id; the first call in its life writes it, the `known` id if given."""
        path = self.path / "run.json"
        if os.path.lexists(path):
            try:
                return self._written_id()
            except FormatTooNew as exc:
                raise FormatTooNew(f"{path} cannot be read: {exc.problem}", fix=exc.fix) from exc
            except (CheckpointDamaged, ValueError, KeyError) as exc:
                if self.highest() is None and not self._id_text().startswith(b'{"checksum"'):
                    raise NotARun(
                        f"{path} was not written by resumable.",
                        fix="give the run a directory of its own; nothing in this one was touched.",
                    ) from exc
                # Nothing is lost: every manifest repeats the id.
                warn(f"{path} is damaged and written anew")
        told = (found.about.run_id for found in self._intact())
        run_id = known or next(told, None) or os.urandom(8).hex()
        self.adopt(run_id)
        return run_id

    def known_id(self) -> str | None:
        """Return the run's id if it has checkpoints, without writing anything."""
        known = next((found.about.run_id for found in self._intact()), None)
        if known is None and self.highest() is not None:
            # All are damaged: checkpoints of another run must not be mixed with them.
            with contextlib.suppress(CheckpointDamaged, ValueError, KeyError):
                return self._written_id()
        return known

    def _written_id(self) -> str:
        return str(manifest.unseal(self._id_text())["run_id"])

    def _id_text(self) -> bytes:
        # The run may be a link to a folder elsewhere.
        return disk.read_small(Path(os.path.realpath(self.path)), "run.json")

    def adopt(self, run_id: str) -> None:
        """Take over a run id, in place of the one that was here."""
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        with self._writing():
            disk.replace(self.path / "run.json", manifest.seal({"run_id": run_id, "created": created}))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except ResumableError:
            raise
        except OSError as exc:
            raise SaveFailed(
                f"{self.path} cannot be written: {exc}.",
                fix="mend the cause (room on the disk, permissions), or give another run directory.",
            ) from exc

    def point(self, word: str, target: Path | None) -> None:
        """Link runs/exp/`word` to a checkpoint: for people; nothing here reads it."""
        link = self.path / word
        if target is None:
            return
        if os.path.lexists(link) and not os.path.islink(link):
            return
        try:
            if os.path.lexists(link) and os.path.realpath(link) == os.path.realpath(target):
                return
            disk.point(link, target)
        except OSError as exc:
            warn(f"the link {link} could not be made ({exc.strerror}); nothing depends on it")

    def best(self, goal: Goal | None) -> Best | None:
        """Return the best of the intact checkpoints; only new ones are opened."""
        with self._guard:
            listing = self._look().parsed()
            if goal in listing.leaders and self._is_as_it_was(listing, listing.leaders[goal]):
                return listing.leaders[goal]
            history = ((number, self._facts_of(name).metrics) for number, name in listing.names.items())
            listing.leaders[goal] = leader = policy.best_of(goal, history)
            return leader

    def _is_as_it_was(self, listing: Listing, leader: Best | None) -> bool:
        if leader is None:
            return True
        name = listing.names[leader.number]
        return self._facts[name][0] == stamp(self.folder / name / manifest.NAME)

    def _facts_of(self, name: str) -> Facts:
        seen = stamp(self.folder / name / manifest.NAME)
        known = self._facts.get(name)
        if known and known[0] == seen:
            return known[1]
        facts = _named(name)
        with contextlib.suppress(CheckpointDamaged):
            facts = policy.facts_of(_opened(self.folder / name).about)
        self._facts[name] = seen, facts
        return facts

    def _known(self, name: str) -> Facts:
        # Cached: every= may keep thousands of checkpoints, and each save prunes.
        known = self._facts.get(name)
        return known[1] if known else self._facts_of(name)

    @contextlib.contextmanager
    def adding(self, about: Manifest) -> Iterator[None]:
        """Add a checkpoint, committed in the body, to the listing without reading the folder again."""
        name = checkpoint.name(about.number, about.step)
        with self._changing() as changes:
            yield
            changes.added.append(name)
        # The checkpoint is durable; if the folder cannot be listed, the next reader gets the error.
        with self._guard, contextlib.suppress(CannotRead):
            self._facts[name] = stamp(self.folder / name / manifest.NAME), policy.facts_of(about)
            # List it here, in the background: the next reader is the training.
            leaders = self._look().leaders
            for goal, leader in leaders.items():
                leaders[goal] = policy.update_leader(leader, goal, about.metrics, about.number)

    def take_in(self, stage: Stage, about: Manifest) -> Checkpoint:
        """Commit a complete stage to this run, in place of a damaged checkpoint of that name."""
        trash = self._moved_away(stage.target) if os.path.lexists(stage.target) else None
        disk.flush_folder(stage.path)
        with self.adding(about):
            found = stage.publish(about)
        if trash:
            with self._guard:
                self._kept = None
            # The next start removes what stays of it.
            with contextlib.suppress(OSError):
                checkpoint.remove(trash)
        return found

    def remove_pulls(self, but: Path | None = None) -> None:
        """Remove what killed pulls have left, except for one."""
        for path in self.folder.glob(".pull-*"):
            if path != but and checkpoint.PULL.fullmatch(path.name):
                # Other files in it keep it there.
                with contextlib.suppress(OSError):
                    checkpoint.remove(path)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[Changes]:
        with self._guard:
            listing = self._look().parsed()
        changes, started = Changes([], []), time.perf_counter()
        try:
            yield changes
        finally:
            with self._guard:
                listing.follow(changes, time.perf_counter() - started)
                for name in changes.removed:
                    self._facts.pop(name, None)
                # A listing made in the meantime has seen the folder half changed.
                if self._kept is not listing:
                    self._kept = None

    def prune(self, keep: Keep | None, protect: Iterable[int | None], goal: Goal | None = None) -> None:
        """Delete all checkpoints except those that `keep` keeps and the protected ones.

        To be called when the newest one is durable: until then an older one may be the last intact one.
        """
        if keep is None:
            return
        # For most rules the names are enough, and reading manifests takes time.
        facts_of = self._known if keep.every or (goal and keep.best > 1) else _named
        with self._guard:
            names = self._look().parsed().names
            facts = [facts_of(name) for name in names.values()]
        for number, problem in self.remove(policy.to_prune(facts, keep, goal, protect)).items():
            warn(f"checkpoint {number} in {self.path} could not be pruned: {problem}")

    def remove(self, going: Iterable[int]) -> dict[int, str]:
        """Delete checkpoints unconditionally; return which could not be deleted, and why."""
        problems: dict[int, str] = {}
        with self._guard:
            names = self._look().parsed().names
            there = {number: names[number] for number in going if number in names}
        if not there:
            return problems
        with self._changing() as changes:
            for number, name in there.items():
                try:
                    self._remove(self.folder / name)
                except OSError as exc:
                    problems[number] = exc.strerror or str(exc)
                # A checkpoint that was removed in part has already lost its name.
                if not os.path.lexists(self.folder / name):
                    changes.removed.append(name)
        return problems

    def _remove(self, path: Path) -> None:
        # It was a folder when it was listed; the target of a link is not ours to delete.
        if path.is_symlink():
            raise OSError("it is a symbolic link")
        if others := checkpoint.unknown(path):
            raise OSError(f"it holds {', '.join(others)}, which resumable did not write")
        # Another user's folder could be renamed, and then not removed.
        if not os.access(path, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        # Rename it first: a crash in between must not leave half a checkpoint under a checkpoint's name.
        checkpoint.remove(self._moved_away(path))

    def _moved_away(self, path: Path) -> Path:
        trash = path.with_name(f".trash-{path.name.split('-')[0]}-{os.urandom(4).hex()}")
        os.rename(path, trash)
        disk.flush_folder(self.folder)
        return trash

    def _remove_debris(self) -> None:
        with self._guard:
            left = [self.folder / name for name in self._look().debris]
        left += [self.path / name for name in os.listdir(self.path) if _LINK_DEBRIS.fullmatch(name)]
        for path in sorted(left):
            try:
                if path.is_dir() and not path.is_symlink():
                    checkpoint.remove(path)
                else:
                    os.unlink(path)
            except OSError as exc:
                warn(f"what a killed save left in {path} could not be removed: {exc}")


_LINK_DEBRIS = re.compile(r"\.(?:newest|best|run\.json|history\.jsonl|probe)-[0-9a-f]{8}")


def _those_last(last: Container[int], numbers: Iterable[int]) -> Iterator[int]:
    kept = []
    for number in numbers:
        if number in last:
            kept.append(number)
        else:
            yield number
    yield from kept


def is_number(which: object) -> TypeGuard[int | str]:
    """Return whether this is a save number, as a number or as text."""
    if isinstance(which, str):
        return which.isdecimal()
    return isinstance(which, int) and not isinstance(which, bool)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError as exc:
        raise CannotRead(
            f"{path} cannot be read: {exc.strerror}.",
            fix="mend the cause (the disk, permissions) and start again.",
        ) from exc


def _meant(path: Path) -> Path | None:
    """Return the run that a wrong path may mean: below it, above it, or beside it with a similar name."""
    around = (above for above in Path(os.path.realpath(path)).parents if _is_run(above))
    similar = difflib.get_close_matches(path.name, _runs_in(path.parent), cutoff=0.5)
    near = (path.parent / name for name in similar if name != path.name)
    return next(chain((path / name for name in _runs_in(path)), around, near), None)


def _runs_in(folder: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(entry.name for entry in folder.iterdir() if _is_run(entry))
    return []


def _is_run(path: Path) -> bool:
    return os.path.lexists(path / "run.json")


def _named(name: str) -> Facts:
    number, _, step = name.split("-")
    return Facts(int(number), int(step))


def _opened(path: Path) -> Checkpoint:
    # It was a folder when it was listed.
    if os.path.islink(path):
        raise disk.damaged(path, "it is a symbolic link")
    found = checkpoint.open_checkpoint(path)
    name = checkpoint.name(found.about.number, found.about.step)
    if path.name != name:
        raise disk.damaged(path, f"{manifest.NAME} is the one of {name}")
    return found
