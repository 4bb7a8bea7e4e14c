"""A cached listing of the checkpoints folder, used only while it is known to be valid."""

from __future__ import annotations

import bisect
import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..files.threads import no_garbage_collection
from . import checkpoint
from .manifest import Best, Goal


class Stamp(NamedTuple):
    """Changes whenever a folder or a file changes."""

    device: int
    inode: int
    links: int
    size: int
    modified: int
    changed: int


class Changes(NamedTuple):
    """The names that this process has added to a folder and removed from it."""

    added: list[str]
    removed: list[str]


class Listing:
    """The content of the checkpoints folder, used only while it is known to be valid."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        started, now = time.perf_counter(), time.time_ns()
        # Before the names: a change while they are read must show.
        self.stamp = stamp(folder)
        self.folders, others = _scan(folder)
        # One text and one pattern: a call for each of thousands of names takes longer than reading them.
        self._text = f"/{'/'.join(self.folders)}/"
        self.debris: list[str] = _DEBRIS.findall(f"{self._text}/{'/'.join(others)}/")
        # A folder that has just changed can change again without a new mtime. Most file systems also count
        # the folders in a folder.
        self.is_counted = self.stamp is not None and self.stamp.links == 2 + len(self.folders)
        self.is_sure = self.is_counted or self.stamp is None or now - self.stamp.changed > _COARSEST_TIME
        self.seconds = time.perf_counter() - started
        self.seconds_blind = 0.0
        self.numbers: list[int] = []
        self.names: dict[int, str] = {}
        self.leaders: dict[Goal | None, Best | None] = {}
        self._newest: str | None = None

    def newest(self) -> str | None:
        """Return the name with the highest save number."""
        if not self.numbers and not self._newest:
            top = max(self.folders, default="")
            # While all numbers have six digits, names sort like numbers.
            is_plain = checkpoint.NAME.fullmatch(top) and not _WIDE.search(self._text)
            self._newest = top if is_plain else None
        if self._newest:
            return self._newest
        return self.names[self.numbers[-1]] if self.parsed().numbers else None

    def name_of(self, number: int) -> str | None:
        """Return the name of a checkpoint, if it exists."""
        newest = self.newest()
        # Most often it is asked for the newest: then the others need not be parsed.
        return newest if newest and number_of(newest) == number else self.parsed().names.get(number)

    def parsed(self) -> Listing:
        """Return this, with its `numbers` and `names`, oldest first."""
        if self._text:
            started = time.perf_counter()
            with no_garbage_collection():
                names = sorted(_OURS.findall(self._text))
                numbers = [int(name.partition("-")[0]) for name in names]
                self.names = dict(zip(numbers, names, strict=True))
                if _WIDE.search(self._text):
                    self.names = dict(sorted(self.names.items()))
            self.numbers = [*self.names]
            self._text, self.folders, self._newest = "", [], None
            self.seconds += time.perf_counter() - started
        return self

    def follow(self, changes: Changes, seconds: float) -> None:
        """Apply the changes of this process; changes by others in these `seconds` were not seen."""
        before, self.stamp = self.stamp, stamp(self.folder)
        for name in changes.removed:
            self._forget(number_of(name))
        for name in changes.added:
            number = number_of(name)
            self.is_sure &= not self.numbers or number > self.numbers[-1]
            self.numbers.append(number)
            self.names[number] = name
        self.seconds_blind += seconds
        self.is_sure &= (
            self.is_counted
            and before is not None
            and self.stamp is not None
            and self.stamp[:2] == before[:2]
            and self.stamp.links - before.links == len(changes.added) - len(changes.removed)
            and self.seconds_blind < _PATIENCE * self.seconds
        )

    def _forget(self, number: int) -> None:
        if self.names.pop(number, None):
            del self.numbers[bisect.bisect_left(self.numbers, number)]
        self.leaders = {g: best for g, best in self.leaders.items() if not best or best.number != number}


# The coarsest file systems count time in steps of two seconds.
_COARSEST_TIME = 3_000_000_000
# A rename by hand in the middle of a save does not show: list the folder again when saves have taken
# this many times as long as a listing.
_PATIENCE = 200

_OURS = re.compile(rf"(?<=/){checkpoint.NAME.pattern.replace('(', '(?:')}(?=/)")
_DEBRIS = re.compile(rf"/({checkpoint.DEBRIS.pattern})(?=/)")
_WIDE = re.compile("/[0-9]{7}")


def _scan(folder: Path) -> tuple[list[str], list[str]]:
    folders: list[str] = []
    others: list[str] = []
    with contextlib.suppress(FileNotFoundError), _open_folder(folder) as place, os.scandir(place) as entries:
        for entry in entries:
            # Not through a link: its target belongs to another run, and pruning would delete it.
            (folders if entry.is_dir(follow_symlinks=False) else others).append(entry.name)
    return folders, others


@contextlib.contextmanager
def _open_folder(folder: Path) -> Iterator[int | Path]:
    if os.scandir not in os.supports_fd:
        yield folder
        return
    # Without a descriptor, each of thousands of entries gets the path of the folder before its name.
    fd = os.open(folder, os.O_RDONLY)
    try:
        yield fd
    finally:
        # Nothing was written through it, so nothing can be lost.
        with contextlib.suppress(OSError):
            os.close(fd)


def number_of(name: str) -> int:
    """Return the save number in a checkpoint's name."""
    return int(name.partition("-")[0])


def stamp(path: Path) -> Stamp | None:
    """Return the stamp of a folder or a file; None if it does not exist."""
    with contextlib.suppress(OSError):
        found = os.stat(path)
        return Stamp(
            found.st_dev, found.st_ino, found.st_nlink, found.st_size, found.st_mtime_ns, found.st_ctime_ns
        )
    return None
