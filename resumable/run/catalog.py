"""The checkpoints folder of a run: which checkpoints there are, and what their manifests say."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import CannotRead, CheckpointDamaged, CheckpointNotFound, warn
from ..files import disk
from . import checkpoint, manifest, policy
from .checkpoint import Checkpoint, Stage
from .listing import Changes, Listing, Stamp, number_of, stamp
from .manifest import Best, Goal, Manifest
from .policy import Facts, Keep


class Catalog:
    """The checkpoints of a run; names, metrics and the best one are cached while nothing changes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # A save in the background and the script may both list the run.
        self._guard = threading.RLock()
        self._kept: Listing | None = None
        # Not the manifests: those of a large model are megabytes.
        self._facts: dict[str, tuple[Stamp | None, Facts]] = {}

    def __len__(self) -> int:
        with self._guard:
            return len(self._look().parsed().numbers)

    def numbers(self) -> list[int]:
        """Return the save numbers, oldest first, without opening a checkpoint."""
        with self._guard:
            return [*self._look().parsed().numbers]

    def names(self) -> dict[int, str]:
        """Return the names of the checkpoints' folders by save number, oldest first."""
        with self._guard:
            return {**self._look().parsed().names}

    def highest(self) -> int | None:
        """Return the highest save number, None without a checkpoint."""
        with self._guard:
            newest = self._look().newest()
        return None if newest is None else number_of(newest)

    def path_of(self, number: int) -> Path | None:
        """Return the folder of a checkpoint, if it exists."""
        with self._guard:
            name = self._look().name_of(number)
        return None if name is None else self.folder / name

    def debris(self) -> list[Path]:
        """Return what killed saves and prunes have left behind."""
        with self._guard:
            return [self.folder / name for name in self._look().debris]

    def _look(self) -> Listing:
        kept = self._kept
        if kept and kept.is_sure and stamp(self.folder) == kept.stamp:
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

    def open(self, number: int) -> Checkpoint:
        """Return one checkpoint by its save number."""
        path = self.path_of(number)
        if path is None:
            there = ", ".join(map(str, self.numbers())) or "none"
            raise CheckpointNotFound(
                f"there is no checkpoint {number} in {self.folder.parent}; there are: {there}.",
                fix="name one of these, or resume='auto' for the newest intact one.",
                command="name one of these, or newest for the newest intact one.",
            )
        return _opened(path)

    def intact(self) -> Iterator[Checkpoint]:
        """Yield the checkpoints whose manifests are intact, newest first."""
        for path in self.newest_first():
            with contextlib.suppress(CheckpointDamaged):
                yield _opened(path)

    def newest_first(self) -> Iterator[Path]:
        """Yield the folders of the checkpoints, newest first."""
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

    def take_in(self, stage: Stage, about: Manifest) -> Checkpoint:
        """Commit a complete stage, in place of a damaged checkpoint of that name."""
        trash = _moved_away(stage.target) if os.path.lexists(stage.target) else None
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

    def prune(self, keep: Keep, protect: Iterable[int | None], goal: Goal | None) -> None:
        """Delete all checkpoints except those that `keep` keeps and the protected ones."""
        # For most rules the names are enough, and reading manifests takes time.
        facts_of = self._known if keep.every or (goal and keep.best > 1) else _named
        with self._guard:
            names = self._look().parsed().names
            facts = [facts_of(name) for name in names.values()]
        for number, problem in self.remove(policy.to_prune(facts, keep, goal, protect)).items():
            warn(f"checkpoint {number} in {self.folder.parent} could not be pruned: {problem}")

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
                    _remove(self.folder / name)
                except OSError as exc:
                    problems[number] = exc.strerror or str(exc)
                # A checkpoint that was removed in part has already lost its name.
                if not os.path.lexists(self.folder / name):
                    changes.removed.append(name)
        return problems


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


def _remove(path: Path) -> None:
    # It was a folder when it was listed; the target of a link is not ours to delete.
    if path.is_symlink():
        raise OSError("it is a symbolic link")
    if others := checkpoint.unknown(path):
        raise OSError(f"it holds {', '.join(others)}, which resumable did not write")
    # Another user's folder could be renamed, and then not removed.
    if not os.access(path, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    # Rename it first: a crash in between must not leave half a checkpoint under a checkpoint's name.
    checkpoint.remove(_moved_away(path))


def _moved_away(path: Path) -> Path:
    trash = path.with_name(f".trash-{path.name.split('-')[0]}-{os.urandom(4).hex()}")
    os.rename(path, trash)
    disk.flush_folder(path.parent)
    return trash
