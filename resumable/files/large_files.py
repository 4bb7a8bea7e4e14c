"""Large files: hashed on the way, written as the disk likes it, read by several threads."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import math
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Literal, NamedTuple

import xxhash

from ..errors import SaveFailed
from . import disk
from .pin import Hasher

if sys.platform != "win32":
    import fcntl

BLOCK = 16 << 20
"""A longer file is hashed in blocks of so many bytes, so that several threads can share the work."""

_PIECE = 1 << 20  # what stays in a processor's cache from the read to the hash
_PREALLOCATE = 1 << 20
_WORTH_A_LINK = 1 << 20  # what is damaged in a file is damaged in all checkpoints that share it

Way = Literal["uncached", "paced", "direct", "plain"]
"""How large files are written.

"uncached": what is on the disk is dropped from the page cache, which holds other people's data, at once.
"paced": each block is handed to the disk at once. "direct": past the page cache. "plain": all at the end.
"""


def digest(data: Any) -> str:
    """Return the xxh3-128 of a buffer; of one longer than a block, that of its blocks' digests."""
    view = memoryview(data)
    return fold([xxhash.xxh3_128_digest(view[at : at + BLOCK]) for at in _blocks(view.nbytes)])


def fold(digests: Sequence[bytes]) -> str:
    """Return the digest of a file from those of its blocks."""
    return (digests[0] if len(digests) == 1 else xxhash.xxh3_128_digest(b"".join(digests))).hex()


def _blocks(size: int) -> range:
    return range(0, max(size, 1), BLOCK)


def _in_threads(job: Callable[[int], bytes], size: int, threads: int) -> list[bytes]:
    """Return what `job` returns for each block; the first error ends the others' work too."""
    blocks = _blocks(size)
    if threads == 1 or len(blocks) == 1:
        return [job(at) for at in blocks]
    failed = threading.Event()

    def unless_failed(at: int) -> bytes:
        if failed.is_set():
            return b""
        try:
            return job(at)
        except BaseException:
            failed.set()
            raise

    # (where nothing large is read or written, it takes longer to import than all else does)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(min(threads, len(blocks))) as pool:
        return list(pool.map(unless_failed, blocks))


class Content:
    """What is to become a file: bytes in memory, perhaps not all of them there yet.

    `ready(end)` returns when the first `end` bytes are. `before` is what the last save made of
    the same file: where nothing has changed since, there is nothing to write. What is only a share
    of a file of `size` bytes, from `begin` on, consists of whole blocks of it.
    """

    def __init__(
        self,
        data: Any,
        ready: Callable[[int], object] | None = None,
        before: Written | None = None,
        *,
        begin: int = 0,
        size: int | None = None,
    ) -> None:
        self.data = memoryview(data)
        self.begin = begin
        self.size = self.data.nbytes if size is None else size
        self._ready = ready
        self._before = before
        if self.is_share() and not self._is_of_whole_blocks():
            # Its digests would be those of other blocks than the ones that are read one day.
            raise ValueError(f"{self.data.nbytes} bytes from {begin} on are no whole blocks of {self.size}")

    def is_share(self) -> bool:
        """Whether there is more to the file than this."""
        return (self.begin, self.data.nbytes) != (0, self.size)

    def _is_of_whole_blocks(self) -> bool:
        begin, end = self.begin, self.begin + self.data.nbytes
        ends_well = end == self.size or (end < self.size and end % BLOCK == 0)
        return 0 <= begin < end and begin % BLOCK == 0 and ends_well

    def block(self, at: int) -> memoryview:
        """Return the bytes of a block, when they are there."""
        part = self.data[at : at + BLOCK]
        if self._ready:
            self._ready(at + part.nbytes)
        return part

    def whole(self) -> memoryview:
        """Return all bytes, when they are there."""
        if self._ready:
            self._ready(self.data.nbytes)
        return self.data

    def unchanged(self) -> Written | None:
        """Return what the last save wrote, if this is the same to the last bit."""
        before = self._before
        if before is None or before.size != self.size or before.size < _WORTH_A_LINK:
            return None
        # What has changed at all has mostly changed at its beginning.
        if self._digest(0) != before.blocks[0]:
            return None
        return before if _in_threads(self._digest, before.size, _WRITERS) == before.blocks else None

    def _digest(self, at: int) -> bytes:
        return xxhash.xxh3_128_digest(self.block(at))


class Written(NamedTuple):
    """A file as it was written."""

    path: Path
    size: int
    blocks: list[bytes]
    identity: tuple[int, ...] = ()
    """What tells that nobody has touched the file since."""

    @property
    def digest(self) -> str:
        """The digest of the whole."""
        return fold(self.blocks)


def put(path: Path, content: Content, way: Way = "paced") -> Written:
    """Create the file, flushed: written, or as a hard link to the last save's if nothing has changed."""
    before = content.unchanged()
    if before:
        # Where that one is gone or was touched, or there are no hard links, there still is the content.
        with contextlib.suppress(OSError):
            if identity(os.stat(before.path)) == before.identity:
                os.link(before.path, path)
                return before._replace(path=path)
    return write(path, content, way)


def write(path: Path, content: Content, way: Way = "paced") -> Written:
    """Create the file, write the content, and flush."""
    if content.is_share():
        raise ValueError(f"others write to {path} too: create() it, and write_share()")
    with disk.created(path) as fd:
        _preallocate(fd, content.size)
        digests = _write(fd, content, way)
        seen = identity(os.fstat(fd))
    return Written(path, content.size, digests, seen)


def create(path: Path, size: int) -> None:
    """Create a file for several processes to write, each its share."""
    with disk.created(path) as fd:
        _preallocate(fd, size)
        os.ftruncate(fd, size)


def receive(path: Path, size: int, read: Callable[[int, int], Any], piece: int, threads: int) -> str:
    """Create a file from what `read(begin, end)` returns, piece by piece, flushed; return its digest."""
    with disk.created(path) as fd:
        _preallocate(fd, size)

        def job(at: int) -> bytes:
            hasher = xxhash.xxh3_128()
            end = min(at + BLOCK, size)
            for begin in range(at, end, piece):
                found = memoryview(read(begin, min(begin + piece, end)))
                _write_at(fd, found, begin)
                hasher.update(found)
            return hasher.digest()

        return fold(_in_threads(job, size, threads))


def write_share(path: Path, content: Content, way: Way = "paced") -> list[bytes]:
    """Write a share of a file that was created for several, flush, and return its blocks' digests."""
    # (a flush by another process says nothing about what is written after it)
    with disk.joined(path) as fd:
        if (found := os.fstat(fd).st_size) != content.size:
            raise SaveFailed(
                f"{path} has {found:,} bytes, but this process has a share of {content.size:,}: "
                "its model or its optimizer is not that of the others.",
                fix="make the same model and the same optimizer in every process. "
                "The checkpoints before it are untouched.",
            )
        return _write(fd, content, way)


def _write(fd: int, content: Content, way: Way) -> list[bytes]:
    if way == "direct" and _begins_a_page(content.data):
        return _write_directly(fd, content)
    return _write_blocks(fd, content, way)


def identity(found: os.stat_result) -> tuple[int, ...]:
    """Return what tells that a file has been replaced or written to."""
    return found.st_ino, found.st_size, found.st_mtime_ns


def _preallocate(fd: int, size: int) -> None:
    if size < _PREALLOCATE or not hasattr(os, "posix_fallocate"):
        return
    try:
        # A full disk says so before the work, and the flush need not move the file's end.
        os.posix_fallocate(fd, 0, size)
    except OSError as exc:
        if exc.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def _write_blocks(fd: int, content: Content, way: Way) -> list[bytes]:
    def job(at: int) -> bytes:
        block = content.block(at)
        found = xxhash.xxh3_128_digest(block)
        place = content.begin + at
        _write_at(fd, block, place, _pwrite_uncached if way == "uncached" else _pwrite)
        if way == "paced":
            # Left to itself the kernel begins only at the flush, and the disk has idled until then.
            _begin_flush(fd, place, block.nbytes)
        return found

    return _in_threads(job, content.data.nbytes, _WRITERS)


def _begins_a_page(data: memoryview) -> bool:
    # Past the page cache a disk takes nothing else; a `bytes` object never does.
    is_one = data.nbytes >= mmap.PAGESIZE and not data.readonly
    return is_one and ctypes.addressof(ctypes.c_char.from_buffer(data)) % mmap.PAGESIZE == 0


def _write_directly(fd: int, content: Content) -> list[bytes]:
    whole = content.data.nbytes // mmap.PAGESIZE * mmap.PAGESIZE

    def job(at: int) -> bytes:
        block = content.block(at)
        found = xxhash.xxh3_128_digest(block)
        _write_at(fd, block[: max(0, whole - at)], content.begin + at)
        return found

    _set_direct(fd, True)
    digests = _in_threads(job, content.data.nbytes, _WRITERS)
    _set_direct(fd, False)
    _write_at(fd, content.data[whole:], content.begin + whole)
    return digests


def _write_at(
    fd: int, rest: memoryview, at: int, write: Callable[[int, memoryview, int], int] | None = None
) -> None:
    while rest.nbytes:
        count = (write or _pwrite)(fd, rest, at)
        rest, at = rest[count:], at + count


def _pwrite_uncached(fd: int, data: memoryview, at: int) -> int:
    return os.pwritev(fd, [data], at, _RWF_DONTCACHE)


_RWF_DONTCACHE = 0x80  # (Linux since 6.14, some file systems)


if sys.platform == "win32":

    def _pwrite(fd: int, data: memoryview, at: int) -> int:
        os.lseek(fd, at, os.SEEK_SET)
        return os.write(fd, data)

    _WRITERS = 1
else:
    _pwrite = os.pwrite
    _WRITERS = 2  # more of them slow a training down more than they hasten the disk


def _set_direct(fd: int, is_on: bool) -> None:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if is_on else flags & ~os.O_DIRECT)


def _begin_flush(fd: int, at: int, size: int) -> None:
    if hasattr(os, "posix_fadvise"):
        # Linux begins to write what it is told will not be needed; nothing is dropped before that is done.
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, at, size, os.POSIX_FADV_DONTNEED)


_WAYS: tuple[Way, ...] = (
    ("uncached", "paced", "direct", "plain") if sys.platform == "linux" else ("paced", "plain")
)


def fastest_way(folder: Path, scratch: memoryview, is_wanted: Callable[[], bool] = lambda: True) -> Way:
    """Return how this disk takes large files fastest; `scratch` (page-aligned) is written to try it.

    When it is not wanted any more, what is known by then has to do.
    """
    taken: dict[Way, float] = {}
    for way in _WAYS * 2:
        if not is_wanted():
            break
        probe = folder / f".probe-{os.urandom(4).hex()}"
        try:
            start = time.perf_counter()
            write(probe, Content(scratch), way)
            seconds = time.perf_counter() - start
        except OSError:
            # (not every disk can be written past the page cache)
            continue
        finally:
            with contextlib.suppress(OSError):
                os.unlink(probe)
        # The first way that is not clearly slower than another: a disk is never quite quiet.
        taken[way] = min(seconds, taken.get(way, math.inf))
    quickest = min(taken.values(), default=0.0)
    return next((way for way, seconds in taken.items() if seconds <= 1.15 * quickest), "paced")


class Lane:
    """Memory through which one thread reads what has none of its own to go to."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(_PIECE))

    def room(self) -> memoryview:
        """Return memory to read a piece into."""
        return self._memory


class Target(NamedTuple):
    """Where a range of a file belongs: in host memory, or behind a function that takes it piece by piece."""

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

    What no target wants is verified all the same. `also` is fed the bytes in their order, by one thread.
    """
    with _of_size(folder, name, size) as fd:
        scanned = _Scan(fd, size, targets, lane, also)
        digests = _in_threads(scanned.block, size, 1 if also else _READERS)
    if (actual := fold(digests)) != expected:
        raise disk.damaged(folder, f"{name} has the digest {actual}, its manifest says {expected}")
    return digests


def read_start(folder: Path, name: str, size: int, count: int) -> memoryview:
    """Return the first `count` bytes of a file of `size`, not verified."""
    with _of_size(folder, name, size) as fd:
        start = memoryview(bytearray(min(count, size)))
        _read_at(fd, start, 0)
    return start


def scan_again(
    folder: Path,
    name: str,
    size: int,
    digests: Sequence[bytes],
    targets: Sequence[Target],
    lane: Callable[[], Lane] = Lane,
) -> None:
    """Read what the targets want of a file whose blocks were verified before, and verify those again."""
    wanted = {
        at for target in targets for at in range(target.begin // BLOCK * BLOCK, max(target.end, 1), BLOCK)
    }
    with _of_size(folder, name, size) as fd:
        scanned = _Scan(fd, size, targets, lane)

        def job(at: int) -> bytes:
            return scanned.block(at) if at in wanted else digests[at // BLOCK]

        if _in_threads(job, size, _READERS) != list(digests):
            raise disk.damaged(folder, f"{name} has changed since it was verified, a moment ago")


@contextlib.contextmanager
def _of_size(folder: Path, name: str, size: int) -> Iterator[int]:
    with disk.opened(folder, name) as file:
        found = os.fstat(file.fileno()).st_size
        if found != size:
            raise disk.damaged(folder, f"{name} has {found:,} bytes, its manifest says {size:,}")
        yield file.fileno()


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
        end = min(at + BLOCK, self._size)
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


def read_range(fd: int, begin: int, end: int) -> memoryview:
    """Return some bytes of a file, not verified, in memory of their own."""
    buffer = memoryview(bytearray(end - begin))
    _read_at(fd, buffer, begin)
    return buffer


def read(folder: Path, name: str, size: int, expected: str, also: Hasher | None = None) -> memoryview:
    """Return the bytes of a file, verified in the private memory that the caller goes on to use."""
    # The file is looked at first: a manifest can claim any size.
    with _of_size(folder, name, size):
        buffer = memoryview(bytearray(size))
    scan(folder, name, size, expected, [Target(0, size, buffer)], also=also)
    return buffer
