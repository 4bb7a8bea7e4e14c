"""Huge pages for new tensors, where the kernel has them ready."""

from __future__ import annotations

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
_RESERVE = 2  # others may take some meanwhile
_WORTH_A_CALL = 4 << 20  # bytes of a tensor that have at least one huge page among them, mostly more


def ask(tensors: Sequence[Tensor]) -> None:
    """Ask for huge pages for tensors in host memory that nothing has been written to yet.

    A page fault for each 4 KiB takes longer than to read them from the page cache. So does a kernel that
    has to move others' memory first to make huge pages: it is asked only if enough of them are free.
    """
    large = [one for one in tensors if one.is_cpu and one.nbytes >= _WORTH_A_CALL]
    if large and sys.platform == "linux" and _free() >= _RESERVE * sum([one.nbytes for one in large]):
        for one in large:
            begin = one.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
            # Refused by a kernel that has none; the tensor is there without.
            _libc().madvise(begin, one.data_ptr() + one.nbytes - begin, mmap.MADV_HUGEPAGE)


def _free() -> int:
    """Return how many bytes of free huge pages the kernel has; 0 where it does not tell."""
    with contextlib.suppress(OSError, ValueError):
        huge = int(_KERNEL.read_text())
        # For each zone of memory: its free blocks of one page, of two, of four.
        blocks = [
            (int(count), mmap.PAGESIZE << order)
            for zone in _FREE.read_text().splitlines()
            for order, count in enumerate(zone.split()[4:])
        ]
        return sum([count * size for count, size in blocks if size >= huge])
    return 0


@functools.cache
def _libc() -> Any:
    found = ctypes.CDLL(None)
    found.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found
