"""The checkpoints folder of a run: which checkpoints there are, and what their manifests say."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import CannotRead, CheckpointDamaged, CheckpointNotFound, warn
from ..files import disk
from . import checkpoint, manifest, policy
from .checkpoint import Checkpoint, Stage
from .manifest import Best, Goal, Manifest
from .policy import Facts, Keep

_Stamp = tuple[int, ...] | None


class Catalog:
    """The checkpoints of a run; their metrics are cached while their manifests stay as they are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Not the manifests: those of a large model are megabytes.
        self._facts: dict[str, tuple[_Stamp, Facts]] = {}

    def __len__(self) -> int:
        return len(self.names())

    def numbers(self) -> list[int]:
        """Return the save numbers, oldest first, without opening a checkpoint."""
        return [*self.names()]

    def names(self) -> dict[int, str]:
        """Return the names of the checkpoints' folders by save number, oldest first."""
        folders, _ = self._scan()
        return dict(sorted((number_of(name), name) for name in folders if checkpoint.NAME.fullmatch(name)))

    def highest(self) -> int | None:
        """Return the highest save number, None without a checkpoint."""
        return max(self.names(), default=None)

    def path_of(self, number: int) -> Path | None:
        """Return the folder of a checkpoint, if it exists."""
        name = self.names().get(number)
        return None if name is None else self.folder / name

    def debris(self) -> list[Path]:
        """Return what killed saves and prunes have left behind."""
        found = (name for some in self._scan() for name in some)
        return [self.folder / name for name in found if checkpoint.DEBRIS.fullmatch(name)]

    def _scan(self) -> tuple[list[str], list[str]]:
        """Return the names of the folders, and those of everything else."""
        folders, others = list[str](), list[str]()
        try:
            with contextlib.suppress(FileNotFoundError), os.scandir(self.folder) as entries:
                for entry in entries:
                    # Not through a link: its target belongs to another run, and pruning would delete it.
                    (folders if entry.is_dir(follow_symlinks=False) else others).append(entry.name)
        except OSError as exc:
            raise CannotRead(
                f"{self.folder} cannot be read: {exc.strerror}.",
                fix="mend the cause (the disk, permissions) and start again.",
            ) from exc
        return folders, others

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
        yield from (self.folder / name for name in reversed(self.names().values()))

    def best(self, goal: Goal | None) -> Best | None:
        """Return the best of the intact checkpoints; only new ones are opened."""
        names = self.names().items()
        return policy.best_of(goal, ((number, self._facts_of(name).metrics) for number, name in names))

    def _facts_of(self, name: str) -> Facts:
        seen = _stamp(self.folder / name / manifest.NAME)
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

    def added(self, about: Manifest) -> None:
        """Know what a new checkpoint's manifest says, without opening it."""
        name = checkpoint.name(about.number, about.step)
        self._facts[name] = _stamp(self.folder / name / manifest.NAME), policy.facts_of(about)

    def take_in(self, stage: Stage, about: Manifest) -> Checkpoint:
        """Commit a complete stage, in place of a damaged checkpoint of that name."""
        trash = _moved_away(stage.target) if os.path.lexists(stage.target) else None
        disk.flush_folder(stage.path)
        found = stage.publish(about)
        if trash:
            # The next start removes what stays of it.
            with contextlib.suppress(OSError):
                checkpoint.remove(trash)
        return found

    def prune(self, keep: Keep, protect: Iterable[int | None], goal: Goal | None) -> None:
        """Delete all checkpoints except those that `keep` keeps and the protected ones."""
        # For most rules the names are enough, and reading manifests takes time.
        facts_of = self._known if keep.every or (goal and keep.best > 1) else _named
        facts = [facts_of(name) for name in self.names().values()]
        for number, problem in self.remove(policy.to_prune(facts, keep, goal, protect)).items():
            warn(f"checkpoint {number} in {self.folder.parent} could not be pruned: {problem}")

    def remove(self, going: Iterable[int]) -> dict[int, str]:
        """Delete checkpoints unconditionally; return which could not be deleted, and why."""
        problems, names = dict[int, str](), self.names()
        for number in going:
            if number in names:
                try:
                    _remove(self.folder / names[number])
                except OSError as exc:
                    problems[number] = exc.strerror or str(exc)
                self._facts.pop(names[number], None)
        return problems


def number_of(name: str) -> int:
    """Return the save number in a checkpoint's name."""
    return int(name.partition("-")[0])


def _stamp(path: Path) -> _Stamp:
    """Return what changes whenever a file changes; None if it does not exist."""
    with contextlib.suppress(OSError):
        found = os.stat(path)
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
    return None


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
