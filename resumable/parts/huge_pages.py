"""Huge pages for new tensors, where the kernel has them ready."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import mmap
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

_KERNEL = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_FREE = Path("/proc/buddyinfo")
_WORTH_A_LOOK = 4 << 20
_RESERVE = 2  # others may take some meanwhile
_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)


def ask(tensors: Sequence[Tensor]) -> None:
    """Ask for huge pages for tensors in host memory that nothing has been written to yet.

    A page fault for each 4 KiB takes longer than reading them from the page cache. To make huge pages by
    moving other memory takes longer still, so the kernel is asked only if enough of them are free.
    """
    large = [one for one in tensors if one.is_cpu and one.nbytes >= _WORTH_A_LOOK]
    if not (large and sys.platform == "linux" and _ADVICE and (size := _size())):
        return
    # One that is twice as large as a page has a whole page in it, wherever it begins.
    large = [one for one in large if one.nbytes >= 2 * size]
    if large and _free(size) >= _RESERVE * sum([one.nbytes for one in large]):
        for one in large:
            begin = one.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
            # Refused by a kernel that has none; the tensor is there without.
            _libc().madvise(begin, one.data_ptr() + one.nbytes - begin, _ADVICE)


def _size() -> int:
    """Return the size of a huge page; 0 if there are none."""
    with contextlib.suppress(OSError, ValueError):
        return int(_KERNEL.read_text())
    return 0


def _free(size: int) -> int:
    """Return how many bytes of free huge pages each node of the memory has; 0 where it is not told."""
    nodes: dict[str, int] = collections.defaultdict(int)
    with contextlib.suppress(OSError, ValueError):
        for line in _FREE.read_text().splitlines():
            # "Node 0, zone Normal", and the free blocks of one page, of two, of four, and so on.
            _, node, _, zone, *counts = line.split()
            # The kernel keeps most of the others (DMA32, say) for those that can use no more.
            if zone in ("Normal", "Movable"):
                blocks = [(int(count), mmap.PAGESIZE << order) for order, count in enumerate(counts)]
                nodes[node] += sum([count * block for count, block in blocks if block >= size])
    # Which of them a process gets depends on where it runs, and on what it may use.
    return min(nodes.values(), default=0)


@functools.cache
def _libc() -> Any:
    found = ctypes.CDLL(None)
    found.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found
