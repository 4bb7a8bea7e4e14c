"""Files that are verified by their hashes while several threads read them."""

from __future__ import annotations

import bisect
import contextlib
import errno
import os
import sys
import threading
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import xxhash

from ..errors import ResumableError
from . import disk, large_files, threads
from .pin import Hasher

_PIECE = 1 << 20  # stays in the processor's cache between the read and the hash
_MOST_IN_A_ROW = 512  # Linux takes 1024 at once
_WORTH_A_THREAD = 1 << 20  # a thread takes longer to start than to read less


class Lane:
    """A buffer of one thread, for bytes that have no memory of their own to be read into."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray())

    def room(self, size: int) -> memoryview:
        """Return memory to read into, of at most `size` bytes."""
        if self._memory.nbytes < min(size, _PIECE):
            self._memory = memoryview(bytearray(min(size, _PIECE)))
        return self._memory[:size]


class Target(NamedTuple):
    """The destination of a range of a file: host memory, or a function that takes it piece by piece."""

    begin: int
    end: int
    memory: memoryview | None
    take: Callable[[Lane, int, memoryview], None] | None = None


class Scan(NamedTuple):
    """A file to be read and verified, and where its bytes go; those without a target are only verified."""

    name: str
    size: int
    targets: Sequence[Target] = ()
    also: Hasher | None = None
    """Gets all bytes of the file in order, from one thread."""
    told: Callable[[int], object] | None = None
    """Is called with the number of bytes of each read, by any thread."""

    def blocks(self) -> range:
        """Return where the blocks of the file begin."""
        return range(0, max(self.size, 1), large_files.BLOCK)

    def blocks_of_targets(self) -> list[int]:
        """Return where the blocks that have bytes of a target begin."""
        block = large_files.BLOCK
        found = {
            at for one in self.targets for at in range(one.begin // block * block, max(one.end, 1), block)
        }
        return sorted(found & {*self.blocks()})

    def size_of_blocks(self) -> int:
        """Return the number of bytes in the blocks of the targets."""
        return sum([min(large_files.BLOCK, self.size - at) for at in self.blocks_of_targets()])


def scan(
    folder: Path,
    name: str,
    size: int,
    expected: str,
    targets: Sequence[Target] = (),
    lane: Callable[[], Lane] = Lane,
    also: Hasher | None = None,
) -> list[bytes]:
    """Read a file, verified in the memory that it is read into; return its blocks' digests."""
    return scan_files(folder, [(Scan(name, size, targets, also), expected)], lane)[0]


def scan_files(
    folder: Path, files: Sequence[tuple[Scan, str]], lane: Callable[[], Lane] = Lane
) -> list[list[bytes]]:
    """Read files together, each verified by its digest; return the digests of their blocks."""
    found = _digests(folder, [(one, one.blocks()) for one, _ in files], lane)
    digests = [[found[number, at] for at in one.blocks()] for number, (one, _) in enumerate(files)]
    for (one, expected), own in zip(files, digests, strict=True):
        if (actual := large_files.fold(own)) != expected:
            raise disk.damaged(folder, f"{one.name} has the digest {actual}, its manifest says {expected}")
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
    scan_files_again(folder, [(Scan(name, size, targets), digests)], lane)


def scan_files_again(
    folder: Path, files: Sequence[tuple[Scan, Sequence[bytes]]], lane: Callable[[], Lane] = Lane
) -> None:
    """Read the targets' ranges of files that were verified before, and verify their blocks again."""
    found = _digests(folder, [(one, one.blocks_of_targets()) for one, _ in files], lane)
    for (number, at), digest in found.items():
        one, digests = files[number]
        if digest != digests[at // large_files.BLOCK]:
            raise disk.damaged(folder, f"{one.name} has changed since it was verified, a moment ago")


def _digests(
    folder: Path, wanted: Sequence[tuple[Scan, Sequence[int]]], lane: Callable[[], Lane]
) -> dict[tuple[int, int], bytes]:
    """Read some blocks of files; return the digest of each by the number of its file and its place there."""
    found = {}
    scans = [one for one, _ in wanted]
    with contextlib.ExitStack() as stack:
        lanes = _Lanes(lane)
        opened = [stack.enter_context(disk.opened(folder, one.name, one.size)) for one in scans]
        readers = [_Reader(file.fileno(), one, lanes) for file, one in zip(opened, scans, strict=True)]

        def read(job: tuple[int, int]) -> None:
            number, at = job
            try:
                found[job] = readers[number].block(at)
            except ResumableError:
                raise
            except OSError as exc:
                # The contexts around it would name the file that was opened last.
                raise disk.unread(folder, scans[number].name, exc) from exc

        jobs = [(number, at) for number, (_, blocks) in enumerate(wanted) for at in blocks]
        if any(one.also for one in scans):
            threads.in_threads(read, jobs, 1)
        else:
            # Short blocks come last, so that all threads end at about the same time.
            jobs.sort(key=lambda job: job[1] + large_files.BLOCK > scans[job[0]].size)
            size = sum([min(large_files.BLOCK, scans[number].size - at) for number, at in jobs])
            threads.in_threads(read, jobs, min(_READERS, len(jobs), 1 + size // _WORTH_A_THREAD))
    return found


class _Lanes(threading.local):
    """The lane of each thread, made when it first needs one."""

    def __init__(self, make: Callable[[], Lane]) -> None:
        self._make = make
        self._own: Lane | None = None

    def own(self) -> Lane:
        if self._own is None:
            self._own = self._make()
        return self._own


class _Reader:
    def __init__(self, fd: int, scan: Scan, lanes: _Lanes) -> None:
        self._fd = fd
        self._also, self._told = scan.also, scan.told
        self._size = scan.size
        self._targets = scan.targets
        self._ends = [target.end for target in scan.targets]
        self._lanes = lanes

    def block(self, at: int) -> bytes:
        hasher = xxhash.xxh3_128()
        end = min(at + large_files.BLOCK, self._size)
        number = bisect.bisect_right(self._ends, at)
        while at < end:
            target = self._targets[number] if number < len(self._targets) else None
            if target is None or at < target.begin:
                at = self._piece(hasher, at, min(end, target.begin) if target else end, None)
            elif target.memory is None or target.take:
                at = self._piece(hasher, at, min(end, target.end), target)
            else:
                at = self._row(hasher, number, at, min(end, at + _PIECE))
            while number < len(self._ends) and self._ends[number] <= at:
                number += 1
        return hasher.digest()

    def _row(self, hasher: xxhash.xxh3_128, number: int, at: int, end: int) -> int:
        """Read targets that follow each other with one call: each call takes turns with other threads."""
        begin, row = at, list[memoryview]()
        while at < end and number < len(self._targets) and len(row) < _MOST_IN_A_ROW:
            target = self._targets[number]
            if target.begin > at or target.memory is None or target.take:
                break
            row.append(target.memory[at - target.begin : min(end, target.end) - target.begin])
            at += row[-1].nbytes
            number += 1
        _read_row(self._fd, row, begin)
        for piece in row:
            self._note(hasher, piece)
        return at

    def _piece(self, hasher: xxhash.xxh3_128, at: int, end: int, target: Target | None) -> int:
        if target and target.memory is not None:
            piece = target.memory[at - target.begin : min(end, at + _PIECE) - target.begin]
        else:
            piece = self._lanes.own().room(end - at)
        _read_at(self._fd, piece, at)
        self._note(hasher, piece)
        if target and target.take:
            target.take(self._lanes.own(), at - target.begin, piece)
        return at + piece.nbytes

    def _note(self, hasher: xxhash.xxh3_128, piece: memoryview) -> None:
        hasher.update(piece)
        if self._also:
            self._also.update(piece)
        if self._told:
            self._told(piece.nbytes)


def _read_row(fd: int, row: list[memoryview], at: int) -> None:
    count = _preadv(fd, row, at)
    for piece in row:
        if count < piece.nbytes:
            _read_at(fd, piece[count:], at + count)
        count, at = max(0, count - piece.nbytes), at + piece.nbytes


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
    if size > _PIECE:
        # A manifest can claim any size, for which there may be no memory; `scan` looks at small files.
        with disk.opened(folder, name, size):
            pass
    buffer = memoryview(bytearray(size))
    scan(folder, name, size, expected, [Target(0, size, buffer)], also=also)
    return buffer
