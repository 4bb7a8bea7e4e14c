"""Large files: their blocks, the hashes of them, and the ways to write them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import xxhash

from . import disk
from .threads import in_threads

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
    return fold([xxhash.xxh3_128_digest(view[at : at + BLOCK]) for at in blocks(view.nbytes)])


def fold(digests: Sequence[bytes]) -> str:
    """Return the digest of a file from those of its blocks."""
    return (digests[0] if len(digests) == 1 else xxhash.xxh3_128_digest(b"".join(digests))).hex()


def blocks(size: int) -> range:
    """Return where the blocks of a file begin; an empty file has one, too."""
    return range(0, max(size, 1), BLOCK)


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

    @property
    def before(self) -> Written | None:
        """The file of the last save, if this may be a link to it."""
        before = self._before
        # A share has no identity, and the digests of its own blocks only.
        is_whole = before and before.identity and not self.is_share
        is_alike = before and before.size == self.size and before.size >= _WORTH_A_LINK
        return before if is_whole and is_alike else None


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


def create(path: Path, size: int) -> None:
    """Create a file for several processes to write, each its share."""
    with disk.created(path) as fd:
        preallocate(fd, size)
        os.ftruncate(fd, size)


def receive(path: Path, size: int, read: Callable[[int, int], Any], piece: int, threads: int) -> str:
    """Create a file from what `read(begin, end)` returns, piece by piece, flushed; return its digest."""
    begins, digests = blocks(size), dict[int, bytes]()
    with disk.created(path) as fd:
        preallocate(fd, size)

        def job(at: int) -> None:
            hasher = xxhash.xxh3_128()
            end = min(at + BLOCK, size)
            for begin in range(at, end, piece):
                found = memoryview(read(begin, min(begin + piece, end)))
                _write_at(fd, found, begin)
                hasher.update(found)
            digests[at] = hasher.digest()

        in_threads(job, begins, min(threads, len(begins)))
    return fold([digests[at] for at in begins])


def identity(found: os.stat_result) -> tuple[int, ...]:
    """Return a value that changes when a file is replaced or written to."""
    return found.st_ino, found.st_size, found.st_mtime_ns


def preallocate(fd: int, size: int) -> None:
    """Reserve room for a file, if the disk can."""
    if size < _PREALLOCATE or not hasattr(os, "posix_fallocate"):
        return
    try:
        # A full disk is reported before the work, and the flush need not move the file's end.
        os.posix_fallocate(fd, 0, size)
    except OSError as exc:
        if exc.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def begins_a_page(data: memoryview) -> bool:
    """Return whether bytes can be written with O_DIRECT."""
    # It needs page-aligned memory, which a `bytes` object never is.
    is_one = data.nbytes >= mmap.PAGESIZE and not data.readonly
    return is_one and ctypes.addressof(ctypes.c_char.from_buffer(data)) % mmap.PAGESIZE == 0


def write_block(fd: int, block: memoryview, at: int, way: Way) -> None:
    """Write all bytes of a block; the file is flushed later."""
    _write_at(fd, block, at, _pwrite_uncached if way == "uncached" else _pwrite)
    if way == "paced":
        # By default the kernel begins at the flush, and the disk idles until then.
        _begin_flush(fd, at, block.nbytes)


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
else:
    _pwrite = os.pwrite


def set_direct(fd: int, is_on: bool) -> None:
    """Switch O_DIRECT on or off for an open file."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if is_on else flags & ~os.O_DIRECT)


def _begin_flush(fd: int, at: int, size: int) -> None:
    if hasattr(os, "posix_fadvise"):
        # Linux starts writing data that is marked as not needed; it drops none of it before it is written.
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, at, size, os.POSIX_FADV_DONTNEED)
