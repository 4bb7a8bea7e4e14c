"""Load in a fresh process, where the weights are there and the optimizer's moments are not yet."""

from __future__ import annotations

import ctypes
import os
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from . import files
from .apart import Apart
from .contenders import Resumable, quiet
from .limits import Chunks, spread
from .rounds import Figures, Values, in_turns, rotated
from .training import bytes_of, gpt, gpt_parts, tensors_of

WAYS = {
    "read: 1 thread": (1, False),
    "read: 2 threads": (2, False),
    "read: 1 thread, huge pages": (1, True),
    "read: 2 threads, huge pages": (2, True),
}
"""Threads, and whether the kernel is asked for huge pages: the page faults are in all of them."""
_MADV_HUGEPAGE = 14
_libc = ctypes.CDLL(None, use_errno=True)


def measure(megabytes: float, rounds: int, folder: Path, errors: dict[str, dict[str, str]]) -> Values:
    """Save once; load in processes of their own, each of which reads the same bytes as fast as it can."""
    folder.mkdir(parents=True)
    with Apart(_save, megabytes, folder) as apart:
        size = int(apart.receive())
    job = partial(_turn, megabytes, size, folder)
    taken = in_turns("load in a fresh process", {"resumable": job}, rounds, 600.0, errors)
    return taken.get("resumable", {})


def _turn(megabytes: float, size: int, folder: Path, number: int) -> Figures:
    # The first to ask for huge pages waits for the kernel to make room; the next finds them there.
    with Apart(_load, megabytes, size, folder, rotated(list(WAYS), number)) as apart:
        return dict(apart.receive())


def _save(connection: Connection, megabytes: float, folder: Path) -> None:
    training = gpt(megabytes, "cpu")
    contender = Resumable(training.parts, folder / "run", "cpu")
    contender.save()()
    contender.close()
    size = bytes_of(training.parts)
    torch.empty(size, dtype=torch.uint8).random_().numpy().tofile(folder / "raw")
    connection.send(size)


def _load(connection: Connection, megabytes: float, size: int, folder: Path, ways: list[str]) -> None:
    from resumable import RunState

    parts = gpt_parts(megabytes, "cpu")
    there = sum(tensor.nbytes for tensor in tensors_of({"model": parts["model"]}))
    files.warm(folder)
    start = time.perf_counter()
    with quiet():
        state = RunState.load(folder / "run", keep=None, **parts)
    figures = {"load": time.perf_counter() - start}
    state.close()
    # After it: memory that is freed here would be given to it, with its pages.
    memory = torch.ones(there, dtype=torch.uint8)
    for name in ways:
        figures[name] = _read(folder / "raw", memory, size - there, *WAYS[name])
    connection.send(figures)


def _read(path: Path, there: torch.Tensor, fresh: int, threads: int, is_huge: bool) -> float:
    """Return the seconds of reading into memory that is there, and the rest into memory that is not yet."""
    start = time.perf_counter()
    memory = torch.empty(fresh, dtype=torch.uint8)
    if is_huge:
        _ask_for_huge_pages(memory)
    chunks = [*_chunks(there, 0), *_chunks(memory, there.nbytes)]
    descriptor = os.open(path, os.O_RDONLY)

    def read(offset: int, chunk: memoryview) -> None:
        os.preadv(descriptor, [chunk], offset)

    spread(read, chunks, threads)
    os.close(descriptor)
    return time.perf_counter() - start


def _chunks(memory: torch.Tensor, offset: int) -> Chunks:
    view = memoryview(memory.numpy())
    return [
        (offset + start, view[start : start + files.CHUNK]) for start in range(0, memory.nbytes, files.CHUNK)
    ]


def _ask_for_huge_pages(memory: torch.Tensor) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    first = -(-memory.data_ptr() // page) * page
    length = (memory.data_ptr() + memory.nbytes - first) // page * page
    _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _MADV_HUGEPAGE)
