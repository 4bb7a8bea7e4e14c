"""Host memory for the image: of the exact size, touched before it is needed, and known to the GPU."""

from __future__ import annotations

import functools
import mmap
import os
import sys
import threading
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
        self._unregister: weakref.finalize[..., HostMemory] | None = None

    def touch(self) -> None:
        """Let the kernel give the pages now: on first use that takes many times as long as a copy."""
        for at in range(0, self.size, _PIECE):
            # At the end of the script nobody needs it any more.
            if threading.main_thread().is_alive():
                self.tensor[at : at + _PIECE].zero_()

    def register(self, gpu: int | None) -> None:
        """Let GPUs copy to it without a detour; where that is refused, they take the detour."""
        if gpu is None:
            return
        # In a thread of its own: an error would stay behind in this one, for its next kernel to raise.
        registering = threading.Thread(target=self._register, args=(gpu,))
        registering.start()
        registering.join()

    def _register(self, gpu: int) -> None:
        with torch.cuda.device(gpu):
            code = _cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), self.size, 0)
        if int(code) == 0:
            self._unregister = weakref.finalize(
                self, _cuda.cudart().cudaHostUnregister, self.tensor.data_ptr()
            )
            self._unregister.atexit = False

    def free(self) -> None:
        """Give the memory back, as soon as nobody looks at it."""
        if self._unregister:
            self._unregister()
        del self.bytes, self.tensor


def current_gpu() -> int | None:
    """Return the GPU that this thread works with, if it works with one already."""
    if torch.cuda.is_available() and _cuda.is_initialized():
        return int(torch.cuda.current_device())
    return None


_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_kept_by_child: list[mmap.mmap] = []


@functools.cache
def _keep_in_children() -> None:
    # A child has no such memory; what it puts at that address would be unmapped with the object.
    os.register_at_fork(after_in_child=lambda: _kept_by_child.extend(_maps))
