"""The raw limit: the best of several ways to write, read and copy the same bytes, in the same process."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from .files import CHUNK, flush, warm

RWF_DONTCACHE = 0x80
SYNC_FILE_RANGE_WRITE = 2
Chunks = list[tuple[int, memoryview]]
"""Pieces of the bytes, and where in the file each belongs."""
_sync_file_range = ctypes.CDLL(None, use_errno=True).sync_file_range


class Limits:
    """So many bytes, and a file for them; each way is a function that returns its seconds.

    Of a state that leaves no room for a second one, `memory` bytes are written again and again: far more
    than the processor's cache holds, so that they are read from memory each time.
    """

    def __init__(self, size: int, folder: Path, device: str, memory: int | None = None) -> None:
        folder.mkdir(parents=True)
        self.path, self.size, self.device = folder / "raw", size, device
        self._padded = _padded(size)
        # Whole chunks, page-aligned, as O_DIRECT asks; touched, as a buffer that is used again is.
        self._map = mmap.mmap(-1, min(self._padded, _padded(memory or size)))
        self._bytes = memoryview(self._map)
        self._tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self._tensor.random_()
        self._there: torch.Tensor | None = None
        self._is_registered = False
        self.ways: dict[str, Callable[[], float]] = {
            "write: buffered": partial(self._write, _buffered),
            "write: paced": partial(self._write, _paced),
            "write: uncached": partial(self._write, _uncached),
            "write: uncached, 2 threads": partial(self._write, partial(_uncached, threads=2)),
            "write: O_DIRECT": partial(self._write, _direct, os.O_DIRECT),
            "write: O_DIRECT, 2 threads": partial(self._write, partial(_direct, threads=2), os.O_DIRECT),
            "write: O_DIRECT, 4 threads": partial(self._write, partial(_direct, threads=4), os.O_DIRECT),
            "read: 1 thread": partial(self._read, 1),
            "read: 2 threads": partial(self._read, 2),
            "read: 4 threads": partial(self._read, 4),
            "copy: in memory": self._copy,
        }
        if device == "cuda":
            self.ways["copy: from the GPU"] = partial(self._copy_over, to_device=False)
            self.ways["copy: to the GPU"] = partial(self._copy_over, to_device=True)

    def _write(self, way: Callable[[int, Chunks], None], flags: int = 0) -> float:
        self.path.unlink(missing_ok=True)
        os.sync()
        start = time.perf_counter()
        descriptor = os.open(self.path, os.O_CREAT | os.O_WRONLY | flags)
        try:
            os.posix_fallocate(descriptor, 0, self._padded)
            way(descriptor, self._chunks())
            os.ftruncate(descriptor, self.size)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        flush(self.path)
        return time.perf_counter() - start

    def _read(self, threads: int) -> float:
        if not self.path.exists():
            self._write(_buffered)
        warm(self.path)
        start = time.perf_counter()
        descriptor = os.open(self.path, os.O_RDONLY)

        def read(offset: int, chunk: memoryview) -> None:
            os.preadv(descriptor, [chunk], offset)

        spread(read, self._chunks(), threads)
        os.close(descriptor)
        return time.perf_counter() - start

    def _chunks(self) -> Chunks:
        length = len(self._bytes)
        return [
            (offset, self._bytes[offset % length : offset % length + CHUNK])
            for offset in range(0, self._padded, CHUNK)
        ]

    def _copy(self) -> float:
        return _copied(torch.zeros_like(self._tensor), self._tensor)

    def _copy_over(self, to_device: bool) -> float:
        # Into memory that the driver has registered once, as a library that keeps its memory does.
        if not self._is_registered:
            code = torch.cuda.cudart().cudaHostRegister(self._tensor.data_ptr(), len(self._bytes), 1)
            if int(code):
                raise RuntimeError(f"cudaHostRegister: {code}")
            self._is_registered = True
        if self._there is None:
            self._there = torch.zeros_like(self._tensor, device=self.device)
        torch.cuda.synchronize()
        return _copied(self._there, self._tensor) if to_device else _copied(self._tensor, self._there)

    def close(self) -> None:
        """Remove the file, and let go of the device."""
        self.path.unlink(missing_ok=True)
        if self._is_registered:
            torch.cuda.cudart().cudaHostUnregister(self._tensor.data_ptr())
            self._is_registered = False
        self._there = None


def _copied(target: torch.Tensor, source: torch.Tensor) -> float:
    start = time.perf_counter()
    target.copy_(source, non_blocking=True)
    if target.is_cuda or source.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def spread(job: Callable[[int, memoryview], None], chunks: Chunks, threads: int) -> None:
    """Do a job with every chunk, by so many threads."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda chunk: job(*chunk), chunks))


def _padded(size: int) -> int:
    return -(-size // CHUNK) * CHUNK


def _buffered(descriptor: int, chunks: Chunks) -> None:
    for offset, chunk in chunks:
        os.pwrite(descriptor, chunk, offset)


def _paced(descriptor: int, chunks: Chunks) -> None:
    for offset, chunk in chunks:
        os.pwrite(descriptor, chunk, offset)
        position, length = ctypes.c_int64(offset), ctypes.c_int64(CHUNK)
        _sync_file_range(descriptor, position, length, SYNC_FILE_RANGE_WRITE)


def _uncached(descriptor: int, chunks: Chunks, threads: int = 1) -> None:
    def write(offset: int, chunk: memoryview) -> None:
        os.pwritev(descriptor, [chunk], offset, RWF_DONTCACHE)

    spread(write, chunks, threads)


def _direct(descriptor: int, chunks: Chunks, threads: int = 1) -> None:
    def write(offset: int, chunk: memoryview) -> None:
        os.pwrite(descriptor, chunk, offset)

    spread(write, chunks, threads)
