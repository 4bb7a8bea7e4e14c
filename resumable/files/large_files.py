"""Large files: hashed by several threads while they are written."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import xxhash

from ..errors import SaveFailed
from . import disk

if sys.platform != "win32":
    import fcntl

BLOCK = 16 << 20
"""Longer files are hashed in blocks of this many bytes, so that several threads can share the work."""

_PREALLOCATE = 1 << 20
_WORTH_A_LINK = 1 << 20  # damage to a linked file damages every checkpoint that shares it

Way = Literal["direct", "uncached", "paced", "plain"]
"""How large files are written.

"direct": O_DIRECT. "uncached": written data is dropped from the page cache at once, which leaves it to other
programs' data. "paced": the flush of each block begins at once. "plain": all is flushed at the end.
"""

WAYS: tuple[Way, ...] = (
    ("direct", "uncached", "paced", "plain") if sys.platform == "linux" else ("paced", "plain")
)
"""Those that this system may have; the first takes the least time from the processors."""


def digest(data: Any) -> str:
    """Return the xxh3-128 of a buffer, or of its blocks' digests if it is longer than a block."""
    view = memoryview(data)
    if view.nbytes <= BLOCK:
        return xxhash.xxh3_128_digest(view).hex()
    return fold([xxhash.xxh3_128_digest(view[at : at + BLOCK]) for at in _blocks(view.nbytes)])


def fold(digests: Sequence[bytes]) -> str:
    """Return the digest of a file from those of its blocks."""
    return (digests[0] if len(digests) == 1 else xxhash.xxh3_128_digest(b"".join(digests))).hex()


def _blocks(size: int) -> range:
    return range(0, size, BLOCK)


def in_threads(job: Callable[[int], bytes], size: int, threads: int) -> list[bytes]:
    """Return the result of `job` for each block; the first error stops the other threads."""
    if size <= BLOCK:
        return [job(0)]
    blocks = _blocks(size)
    if threads == 1:
        return list(map(job, blocks))
    failed = threading.Event()

    def unless_failed(at: int) -> bytes:
        if failed.is_set():
            return b""
        try:
            return job(at)
        except BaseException:
            failed.set()
            raise

    # Imported late: it takes longer than everything else where no large file is read or written.
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(min(threads, len(blocks))) as pool:
        return list(pool.map(unless_failed, blocks))


class Content:
    """The bytes of a file to be written, which may still be arriving in memory.

    `ready(end)` returns when the first `end` bytes are there. `before` is the same file in the last save: if
    nothing has changed since, nothing is written. A share of a file of `size` bytes, from `begin` on, has
    whole blocks only.
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
        self.is_share = (begin, self.data.nbytes) != (0, self.size)
        """Whether this is only a part of the file."""
        if self.is_share and not self._is_of_whole_blocks():
            # Its digests would not be those of the blocks that a load reads.
            raise ValueError(f"{self.data.nbytes} bytes from {begin} on are no whole blocks of {self.size}")

    def _is_of_whole_blocks(self) -> bool:
        begin, end = self.begin, self.begin + self.data.nbytes
        ends_well = end == self.size or (end < self.size and end % BLOCK == 0)
        return 0 <= begin < end and begin % BLOCK == 0 and ends_well

    def block(self, at: int) -> memoryview:
        """Return the bytes of a block, once they are there."""
        part = self.data[at : at + BLOCK]
        if self._ready:
            self._ready(at + part.nbytes)
        return part

    def whole(self) -> memoryview:
        """Return all bytes, once they are there."""
        if self._ready:
            self._ready(self.data.nbytes)
        return self.data

    def unchanged(self) -> Written | None:
        """Return the file of the last save, if this has exactly the same bytes."""
        before = self._before
        if before is None or before.size != self.size or before.size < _WORTH_A_LINK:
            return None
        # A file that has changed has mostly changed in its first block.
        if self._digest(0) != before.blocks[0]:
            return None
        return before if in_threads(self._digest, before.size, _WRITERS) == before.blocks else None

    def _digest(self, at: int) -> bytes:
        return xxhash.xxh3_128_digest(self.block(at))


class Written(NamedTuple):
    """A file as it was written."""

    path: Path
    size: int
    blocks: list[bytes]
    identity: tuple[int, ...] = ()
    """Changes whenever the file is written to or replaced."""
    way: Way | None = None
    """How it was written; None if it is a link to an older one."""

    @property
    def digest(self) -> str:
        """The digest of the whole."""
        return fold(self.blocks)


def put(path: Path, content: Content, way: Way = "paced") -> Written:
    """Create the file, flushed: written, or as a hard link to the last save's if nothing has changed."""
    before = content.unchanged()
    if before:
        # If that file is gone or was touched, or hard links are not supported, write the content.
        with contextlib.suppress(OSError):
            if identity(os.stat(before.path)) == before.identity:
                os.link(before.path, path)
                return before._replace(path=path, way=None)
    return write(path, content, way)


def write(path: Path, content: Content, way: Way = "paced") -> Written:
    """Create the file, write the content, and flush."""
    if content.is_share:
        raise ValueError(f"others write to {path} too: create() it, and write_share()")
    with disk.created(path) as fd:
        _preallocate(fd, content.size)
        digests, way = _write_blocks(fd, content, way)
        seen = identity(os.fstat(fd))
    return Written(path, content.size, digests, seen, way)


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

        return fold(in_threads(job, size, threads))


def write_share(path: Path, content: Content, way: Way = "paced") -> Written:
    """Write a share of a file that was created for several, flush, and return it with its own blocks."""
    # Each process flushes: a flush by another does not cover what is written after it.
    with disk.joined(path) as fd:
        if (found := os.fstat(fd).st_size) != content.size:
            raise SaveFailed(
                f"{path} has {found:,} bytes, but this process has a share of {content.size:,}: "
                "its model or its optimizer is not that of the others.",
                fix="make the same model and the same optimizer in every process. "
                "The checkpoints before it are untouched.",
            )
        digests, way = _write_blocks(fd, content, way)
    return Written(path, content.size, digests, way=way)


def identity(found: os.stat_result) -> tuple[int, ...]:
    """Return a value that changes when a file is replaced or written to."""
    return found.st_ino, found.st_size, found.st_mtime_ns


def _preallocate(fd: int, size: int) -> None:
    if size < _PREALLOCATE or not hasattr(os, "posix_fallocate"):
        return
    try:
        # A full disk is reported before the work, and the flush need not move the file's end.
        os.posix_fallocate(fd, 0, size)
    except OSError as exc:
        if exc.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def _write_blocks(fd: int, content: Content, way: Way) -> tuple[list[bytes], Way]:
    """Write all blocks; return their digests, and the way that was possible."""
    try:
        if way == "direct" and _begins_a_page(content.data):
            return _write_directly(fd, content), way
        return _write_cached(fd, content, way), way
    except OSError as exc:
        # Not every disk can be written past the page cache. If that was not the cause, it fails again.
        if way not in ("direct", "uncached") or exc.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    return _write_cached(fd, content, "paced"), "paced"


def _write_cached(fd: int, content: Content, way: Way) -> list[bytes]:
    def job(at: int) -> bytes:
        block = content.block(at)
        found = xxhash.xxh3_128_digest(block)
        place = content.begin + at
        _write_at(fd, block, place, _pwrite_uncached if way == "uncached" else _pwrite)
        if way == "paced":
            # By default the kernel begins at the flush, and the disk idles until then.
            _begin_flush(fd, place, block.nbytes)
        return found

    return in_threads(job, content.data.nbytes, _WRITERS)


def _begins_a_page(data: memoryview) -> bool:
    # O_DIRECT needs page-aligned memory, which a `bytes` object never is.
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
    try:
        digests = in_threads(job, content.data.nbytes, _WRITERS)
    finally:
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


_RWF_DONTCACHE = 0x80  # Linux since 6.14, some file systems


if sys.platform == "win32":

    def _pwrite(fd: int, data: memoryview, at: int) -> int:
        os.lseek(fd, at, os.SEEK_SET)
        return os.write(fd, data)

    _WRITERS = 1
else:
    _pwrite = os.pwrite
    _WRITERS = 2  # more slow the training down more than they speed up the disk


def _set_direct(fd: int, is_on: bool) -> None:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if is_on else flags & ~os.O_DIRECT)


def _begin_flush(fd: int, at: int, size: int) -> None:
    if hasattr(os, "posix_fadvise"):
        # Linux starts writing data that is marked as not needed; it drops none of it before it is written.
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, at, size, os.POSIX_FADV_DONTNEED)
