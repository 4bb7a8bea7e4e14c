"""Host memory for the image: of the exact size, touched before it is needed, and known to the GPU."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..files.threads import allow_captures

_cuda: Any = torch.cuda
_PIECE = 16 << 20
_REGISTERED = 32 << 20  # the driver holds locks meanwhile that the training's launches need
_PORTABLE = 1  # for all GPUs of this process; copies from the others would otherwise take a detour


class HostMemory:
    """A block of host memory that begins at a page.

    torch's own pinned memory is rounded up to a power of two, which may be twice what is needed.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        if sys.platform == "win32":
            self._map = mmap.mmap(-1, max(size, 1))
        else:
            self._map = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # A kernel without huge pages refuses. Past the page cache a disk writes them twice as fast as
            # small ones, for a third of the CPU time.
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_HUGEPAGE)
        if hasattr(mmap, "MADV_DONTFORK"):
            # Otherwise each write after a loader has forked its workers would copy a page, which they keep.
            self._map.madvise(mmap.MADV_DONTFORK)
            _maps.add(self._map)
            _keep_in_children()
        self.bytes = memoryview(self._map)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self._unregister: weakref.finalize[..., HostMemory] | None = None
        self._is_known = False
        self.is_refused = False
        """Whether the driver refused to register it."""

    def touch(self) -> None:
        """Let the kernel give the pages now: on first use that takes many times as long as a copy."""
        for at in range(0, self.size, _PIECE):
            # At the end of the script it is not needed any more.
            if threading.main_thread().is_alive():
                self.tensor[at : at + _PIECE].zero_()

    def register(self, gpu: torch.device | None) -> None:
        """Let GPUs copy to it directly; if the driver refuses, they copy through memory of its own."""
        if gpu is None or self._is_known:
            return
        self._is_known = True
        # In a thread of its own: an error would stay behind in this one, for its next kernel to raise.
        registering = threading.Thread(target=self._register, args=(gpu,))
        registering.start()
        registering.join()

    def _register(self, gpu: torch.device) -> None:
        allow_captures()
        places: list[int] = []
        self._unregister = weakref.finalize(self, _unregister, os.getpid(), gpu, places)
        self._unregister.atexit = False
        with torch.cuda.device(gpu):
            for begin, end in registered_apart(self.tensor):
                if int(_cuda.cudart().cudaHostRegister(begin, end - begin, _PORTABLE)):
                    self.is_refused = True
                    break
                places.append(begin)

    def free(self) -> None:
        """Give the memory back as soon as it is no longer referenced."""
        if self._unregister:
            self._unregister()
        del self.bytes, self.tensor


def registered_apart(memory: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield the addresses of some memory in parts, each of which is registered as a whole.

    A copy from or to two parts at once is an error.
    """
    begin = memory.data_ptr()
    last = begin + memory.nbytes
    while begin < last:
        end = min(last, (begin // _REGISTERED + 1) * _REGISTERED)
        yield begin, end
        begin = end


def _unregister(process: int, gpu: torch.device, places: Iterable[int]) -> None:
    # A forked child has neither the memory nor the driver.
    if process == os.getpid():
        # This may be any thread: one whose device was never set would create a context on the first GPU.
        with torch.cuda.device(gpu):
            for place in places:
                _cuda.cudart().cudaHostUnregister(place)


def gpu_of(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """Return the GPU that holds the first tensor that is on one.

    >>> gpu_of([torch.zeros(2)]) is None
    True
    """
    return next((tensor.device for tensor in tensors if tensor.is_cuda), None)


_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_kept_by_child: list[mmap.mmap] = []


@functools.cache
def _keep_in_children() -> None:
    # A child has no such memory; what it puts at that address would be unmapped with the object.
    os.register_at_fork(after_in_child=lambda: _kept_by_child.extend(_maps))
