"""Host memory for the image: of the exact size, touched before it is needed, and known to the GPU."""

from __future__ import annotations

import functools
import mmap
import os
import sys
import weakref
from typing import Any

import torch

_cuda: Any = torch.cuda
_PIECE = 16 << 20


class HostMemory:
    """So many bytes, beginning at a page.

    torch's own pinned memory is rounded up to a power of two, which may be twice what is needed.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        if sys.platform == "win32":
            self._map = mmap.mmap(-1, max(size, 1))
        else:
            self._map = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_DONTFORK"):
            # Else each write after a loader has forked its workers would copy a page, which they keep.
            self._map.madvise(mmap.MADV_DONTFORK)
            _maps.add(self._map)
            _keep_in_children()
        self.bytes = memoryview(self._map)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self._is_registered = False

    def touch(self) -> None:
        """Let the kernel give the pages now: on first use that takes many times as long as a copy."""
        for at in range(0, self.size, _PIECE):
            self.tensor[at : at + _PIECE].zero_()
        self._register()

    def _register(self) -> None:
        if torch.cuda.is_available() and _cuda.is_initialized():
            code = _cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), self.size, 0)
            self._is_registered = int(code) == 0

    def free(self) -> None:
        """Give the memory back, as soon as nobody looks at it."""
        if self._is_registered:
            _cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
            self._is_registered = False
        del self.bytes, self.tensor


_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_kept_by_child: list[mmap.mmap] = []


@functools.cache
def _keep_in_children() -> None:
    # A child has no such memory; what it puts at that address would be unmapped with the object.
    os.register_at_fork(after_in_child=lambda: _kept_by_child.extend(_maps))
