"""Files that are verified by their hashes while several threads read them."""

from __future__ import annotations

import bisect
import errno
import os
import sys
import threading
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import xxhash

from . import disk, large_files
from .pin import Hasher

_PIECE = 1 << 20  # stays in the processor's cache between the read and the hash


class Lane:
    """A buffer of one thread, for bytes that have no memory of their own to be read into."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(_PIECE))

    def room(self) -> memoryview:
        """Return memory to read a piece into."""
        return self._memory


class Target(NamedTuple):
    """The destination of a range of a file: host memory, or a function that takes it piece by piece."""

    begin: int
    end: int
    memory: memoryview | None
    take: Callable[[Lane, int, memoryview], None] | None = None


def scan(
    folder: Path,
    name: str,
    size: int,
    expected: str,
    targets: Sequence[Target] = (),
    lane: Callable[[], Lane] = Lane,
    also: Hasher | None = None,
) -> list[bytes]:
    """Read a file, verified in the memory that it is read into; return its blocks' digests.

    Bytes without a target are verified too. `also` gets all bytes in order, from one thread.
    """
    with disk.opened(folder, name, size) as file:
        scanned = _Scan(file.fileno(), size, targets, lane, also)
        digests = large_files.in_threads(scanned.block, size, 1 if also else _READERS)
    if (actual := large_files.fold(digests)) != expected:
        raise disk.damaged(folder, f"{name} has the digest {actual}, its manifest says {expected}")
    return digests


def read_start(folder: Path, name: str, size: int, count: int) -> memoryview:
    """Return the first `count` bytes of a file of `size`, not verified."""
    with disk.opened(folder, name, size) as file:
        return read_range(file.fileno(), 0, min(count, size))


def read_range(fd: int, begin: int, end: int) -> memoryview:
    """Return some bytes of a file, not verified, in memory of their own."""
    buffer = memoryview(bytearray(end - begin))
    _read_at(fd, buffer, begin)
    return buffer


def scan_again(
    folder: Path,
    name: str,
    size: int,
    digests: Sequence[bytes],
    targets: Sequence[Target],
    lane: Callable[[], Lane] = Lane,
) -> None:
    """Read the targets' ranges of a file that was verified before, and verify their blocks again."""
    block = large_files.BLOCK
    wanted = {
        at for target in targets for at in range(target.begin // block * block, max(target.end, 1), block)
    }
    with disk.opened(folder, name, size) as file:
        scanned = _Scan(file.fileno(), size, targets, lane)

        def job(at: int) -> bytes:
            return scanned.block(at) if at in wanted else digests[at // block]

        if large_files.in_threads(job, size, _READERS) != list(digests):
            raise disk.damaged(folder, f"{name} has changed since it was verified, a moment ago")


class _Scan:
    def __init__(
        self,
        fd: int,
        size: int,
        targets: Sequence[Target],
        lane: Callable[[], Lane],
        also: Hasher | None = None,
    ) -> None:
        self._fd = fd
        self._also = also
        self._size = size
        self._targets = targets
        self._ends = [target.end for target in targets]
        self._make_lane = lane
        self._lanes = threading.local()

    def _lane(self) -> Lane:
        if not hasattr(self._lanes, "own"):
            self._lanes.own = self._make_lane()
        own: Lane = self._lanes.own
        return own

    def block(self, at: int) -> bytes:
        hasher = xxhash.xxh3_128()
        end = min(at + large_files.BLOCK, self._size)
        number = bisect.bisect_right(self._ends, at)
        while at < end:
            target = self._targets[number] if number < len(self._targets) else None
            if target is None or at < target.begin:
                at = self._piece(hasher, at, min(end, target.begin) if target else end, None)
            else:
                at = self._piece(hasher, at, min(end, target.end), target)
                number += at == target.end
        return hasher.digest()

    def _piece(self, hasher: xxhash.xxh3_128, at: int, end: int, target: Target | None) -> int:
        if target and target.memory is not None:
            piece = target.memory[at - target.begin : min(end, at + _PIECE) - target.begin]
        else:
            piece = self._lane().room()[: end - at]
        _read_at(self._fd, piece, at)
        hasher.update(piece)
        if self._also:
            self._also.update(piece)
        if target and target.take:
            target.take(self._lane(), at - target.begin, piece)
        return at + piece.nbytes


def _read_at(fd: int, rest: memoryview, at: int) -> None:
    while rest.nbytes:
        count = _preadv(fd, [rest], at)
        if not count:
            raise OSError(errno.EIO, f"the file ended {rest.nbytes:,} bytes early")
        rest, at = rest[count:], at + count


if sys.platform == "win32":

    def _preadv(fd: int, buffers: list[memoryview], at: int) -> int:
        os.lseek(fd, at, os.SEEK_SET)
        with FileIO(fd, closefd=False) as file:
            return file.readinto(buffers[0]) or 0

    _READERS = 1
else:
    _preadv = os.preadv
    _READERS = min(8, os.cpu_count() or 1)


def read(folder: Path, name: str, size: int, expected: str, also: Hasher | None = None) -> memoryview:
    """Return the bytes of a file, verified in private memory that the caller may keep."""
    with disk.opened(folder, name, size):
        # First the size of the file: a manifest can claim any.
        buffer = memoryview(bytearray(size))
    scan(folder, name, size, expected, [Target(0, size, buffer)], also=also)
    return buffer
