"""The files of a checkpoint, written by several threads from one queue of blocks."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sys
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import xxhash

from ..errors import SaveFailed
from . import disk, large_files, threads
from .large_files import Content, Way, Written

_WRITERS = 1 if sys.platform == "win32" else 2  # more slow the training down more than they speed up the disk


def write(folder: Path, files: Mapping[str, Content], way: Way = "paced") -> dict[str, Written]:
    """Write files into a folder, or link the unchanged ones of the last save, flushed.

    A file of which a content is only a share must have been made by `large_files.create`.
    """
    queue = _Queue([_File(folder / name, content, way) for name, content in files.items()])
    queue.empty()
    return {name: file.written for name, file in zip(files, queue.files, strict=True)}


class _Queue:
    """The blocks that are still to be written, in the order in which they arrive in memory."""

    def __init__(self, files: list[_File]) -> None:
        self.files = files
        # The last block of a file, which may be a small one, is there only when all are.
        blocks = [(file, at) for file in files for at in file.blocks]
        self._blocks = deque(sorted(blocks, key=lambda block: block[1] == block[0].blocks[-1]))

    def empty(self) -> None:
        """Write all blocks, in this thread and in others; the first error stops them all."""
        # Small files take longer to be flushed than to be written, and are flushed one after the other.
        others = min(_WRITERS - 1, len(self._blocks) - len(self.files))
        try:
            threads.in_threads(self._put, self, 1 + others)
        finally:
            with contextlib.ExitStack() as closing:
                for file in self.files:
                    closing.callback(file.abandon)

    def __iter__(self) -> _Queue:
        return self

    def __next__(self) -> tuple[_File, int]:
        try:
            return self._blocks.popleft()
        except IndexError:
            raise StopIteration from None

    def _put(self, block: tuple[_File, int]) -> None:
        file, at = block
        self._blocks.extend((file, other) for other in file.put(at))


class _File:
    """One file; while all of its blocks are those of the last save, nothing is written."""

    def __init__(self, path: Path, content: Content, way: Way) -> None:
        size = content.data.nbytes
        self.path = path
        self.blocks = large_files.blocks(size)
        self.written: Written
        self._content = content
        self._way = way
        self._is_direct = way == "direct" and large_files.begins_a_page(content.data)
        self._whole = size // mmap.PAGESIZE * mmap.PAGESIZE if self._is_direct else size
        """What is written block by block; O_DIRECT takes whole pages only."""
        self._before = content.before
        self._same: list[int] = []
        """The blocks that are those of the last save."""
        self._digests: dict[int, bytes] = {}
        self._left = len(self.blocks)
        self._guard = threading.Lock()
        self._fd: int | None = None
        self._error: BaseException | None = None
        self._context = contextlib.ExitStack()

    def put(self, at: int) -> list[int]:
        """Write a block, unless the file is that of the last save so far; return those to be put again."""
        try:
            if not self._before:
                # A full disk is reported before the work.
                self._create()
            block = self._content.block(at)
            self._digests[at] = digest = xxhash.xxh3_128_digest(block)
            with self._guard:
                if self._is_unchanged(at, digest):
                    return []
                again, self._same, self._before = self._same, [], None
            self._write(self._create(), at, block)
        except OSError as exc:
            exc.filename = str(self.path)
            raise
        return again

    def _is_unchanged(self, at: int, digest: bytes) -> bool:
        before = self._before
        if not before or digest != before.blocks[at // large_files.BLOCK]:
            return False
        if len(self._same) == len(self.blocks) - 1:
            return self._link(before)
        self._same.append(at)
        return True

    def _link(self, before: Written) -> bool:
        # If that file is gone or was touched, or hard links are not supported, write the content.
        with contextlib.suppress(OSError):
            if large_files.identity(os.stat(before.path)) == before.identity:
                os.link(before.path, self.path)
                self.written = before._replace(path=self.path, way=None)
                return True
        return False

    def _create(self) -> int:
        with self._guard:
            if self._error:
                raise self._error
            if self._fd is None:
                try:
                    self._fd = self._created()
                except BaseException as exc:
                    # Another thread would find the file there.
                    self._error = exc
                    raise
            return self._fd

    def _created(self) -> int:
        is_share = self._content.is_share
        fd = self._context.enter_context((disk.joined if is_share else disk.created)(self.path))
        if is_share:
            self._refuse_another_size(fd)
        else:
            large_files.preallocate(fd, self._content.size)
        if self._is_direct:
            self._go_direct(fd)
        return fd

    def _refuse_another_size(self, fd: int) -> None:
        if (found := os.fstat(fd).st_size) != self._content.size:
            raise SaveFailed(
                f"{self.path} has {found:,} bytes, but this process has a share of {self._content.size:,}: "
                "its model or its optimizer is not that of the others.",
                fix="make the same model and the same optimizer in every process. "
                "The checkpoints before it are untouched.",
            )

    def _go_direct(self, fd: int) -> None:
        try:
            large_files.set_direct(fd, True)
        except OSError as exc:
            self._is_direct = False
            self._fall_back(exc, self._way)

    def _fall_back(self, exc: OSError, way: Way) -> None:
        """Write through the page cache from now on, if it is this way that the disk has refused."""
        # If that was not the cause, it fails again.
        if way not in ("direct", "uncached") or exc.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise exc
        self._way = "paced"

    def _write(self, fd: int, at: int, block: memoryview) -> None:
        block, place, way = block[: max(0, self._whole - at)], self._content.begin + at, self._way
        try:
            large_files.write_block(fd, block, place, way)
        except OSError as exc:
            with self._guard:
                self._fall_back(exc, way)
                self._end_direct(fd)
            large_files.write_block(fd, block, place, self._way)
        with self._guard:
            self._left -= 1
            is_last = not self._left
        if is_last:
            self._finish(fd)

    def _end_direct(self, fd: int) -> None:
        if self._is_direct:
            self._is_direct = False
            large_files.set_direct(fd, False)

    def _finish(self, fd: int) -> None:
        self._end_direct(fd)
        content = self._content
        large_files.write_block(fd, content.data[self._whole :], content.begin + self._whole, "plain")
        seen = () if content.is_share else large_files.identity(os.fstat(fd))
        # A share too: a flush by another process does not cover what is written after it.
        self._context.close()
        digests = [self._digests[at] for at in self.blocks]
        self.written = Written(self.path, content.size, digests, seen, self._way)

    def abandon(self) -> None:
        """Close the file if it was not written to its end, without a flush."""
        self._context.__exit__(_Abandoned, _Abandoned(), None)


class _Abandoned(Exception):
    """Other files could not be written."""
