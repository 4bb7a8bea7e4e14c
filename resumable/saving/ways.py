"""The way in which large files are written: the one that was fastest in the saves before, on this disk."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..files.large_files import BLOCK, WAYS, Way, Written
from ..files.strict_json import Json
from .save_cost import median


class Wrote(NamedTuple):
    """What a save wrote in one way, and the seconds until that was durable; None if the disk refused."""

    way: Way
    disk: str
    size: int
    seconds: float | None

    @property
    def speed(self) -> float:
        """Bytes a second."""
        return self.size / self.seconds if self.seconds else 0.0


class Ways:
    """Chooses how each save is written, and learns from how long it took.

    Args:
        folder: A folder on the disk that is written to.
        now: The clock.
    """

    def __init__(self, folder: Path, now: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._now = now
        self._seen: deque[Wrote] = deque(maxlen=_REMEMBERED)
        self._began: float | None = None
        self.small: Way = "paced"
        """How saves are written that are too small to learn from."""

    def recall(self, found: Iterable[Json]) -> None:
        """Take in what earlier processes have noted, without what makes no sense."""
        self._seen.extend(filter(None, map(_parsed, found)))

    def choose(self, size: int, why: str) -> Way:
        """Return how to write about `size` bytes, in a save made for this reason."""
        now, began = self._now(), self._began
        self._began = now
        if size < _WORTH_LEARNING:
            return self.small
        disk = _disk(self._folder)
        seen = [one for one in self._seen if one.disk == disk and _class(one.size) == _class(size)]
        # Even a slow one has to end before the next save, and those at a training's end are waited for.
        is_in_training = why == "called" or why.startswith("every ")
        has_time = began is not None and now - began > _TIMES_LONGER * ((seen and seen[-1].seconds) or 0)
        return chosen(seen, may_try=is_in_training and has_time)

    def note(self, way: Way, files: Iterable[Written], seconds: float) -> Mapping[str, Json] | None:
        """Learn from a save, and return what a later process can `recall`; None if it is too small."""
        written = [file for file in files if file.way and len(file.blocks) > 1]
        # Of a shared file this process has written only some of the blocks.
        size = sum(min(file.size, len(file.blocks) * BLOCK) for file in written)
        if size < _WORTH_LEARNING:
            return None
        is_refused = any(file.way != way for file in written)
        found = Wrote(way, _disk(self._folder), size, None if is_refused else round(seconds, 4))
        self._seen.append(found)
        return found._asdict()


def chosen(seen: Sequence[Wrote], *, may_try: bool) -> Way:
    """Return the way for the next save, given those before of about its size.

    >>> slow, fast = Wrote("direct", "sda", 100, 2.0), Wrote("uncached", "sda", 100, 1.0)
    >>> chosen([slow, fast], may_try=False)
    'uncached'
    """
    speeds = {way: _speed(seen, way) for way in WAYS if any(one.way == way for one in seen)}
    able = [way for way in WAYS if speeds.get(way) != 0]
    fastest = max(speeds.values(), default=0.0)
    # The first takes the least time from the training, and disks are noisy.
    equal = [way for way in able if way in speeds and speeds[way] * _NOISE >= fastest]
    favourite = [*equal, *able, "paced"][0]
    last = [one.way for one in seen[-_BETWEEN_TRIES:]]
    if not may_try or last != [favourite] * _BETWEEN_TRIES:
        return favourite
    recent = {one.way for one in seen[-_TRIED_AGAIN:]}
    due = [way for way in able if way not in recent and speeds.get(way, fastest) >= _MUCH_SLOWER * fastest]
    return [*due, favourite][0]


def _speed(seen: Iterable[Wrote], way: Way) -> float:
    return median([one.speed for one in seen if one.way == way][-_RECENT:])


def _class(size: int) -> int:
    return size.bit_length() // 2


def _disk(folder: Path) -> str:
    """Return a name for the disk of a folder, as this machine sees it; an empty one if it cannot be asked."""
    with contextlib.suppress(OSError):
        number = os.statvfs(folder).f_fsid if hasattr(os, "statvfs") else 0
        return f"{platform.node()} {number or os.stat(folder).st_dev:x}"
    return ""


def _parsed(found: Json) -> Wrote | None:
    if not isinstance(found, dict) or found.keys() != {*Wrote._fields}:
        return None
    one = Wrote(**found)
    if one.way not in WAYS or type(one.disk) is not str or type(one.size) is not int:
        return None
    is_time = one.seconds is None or (type(one.seconds) is float and 0 < one.seconds < 1 << 32)
    return one if is_time and 0 < one.size < 1 << 63 and one.speed < _FASTEST else None


_WORTH_LEARNING = 64 << 20
"""What is smaller is written in some milliseconds, which tell more of what else the disk had to do."""
_REMEMBERED = 256
_FASTEST = 1 << 40
"""Bytes a second that no disk reaches."""
_RECENT = 5
_NOISE = 1.1
_BETWEEN_TRIES = 3
_TRIED_AGAIN = 64
_MUCH_SLOWER = 0.5
_TIMES_LONGER = 4
