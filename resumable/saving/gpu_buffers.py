"""Memory on a GPU for the copies of saves, and the stream on which they are made."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .gpu_packing import Plan, ToPack

_cuda: Any = torch.cuda
_MARGIN = 0.8  # memory that is free may be in pieces too small for a tensor


@functools.cache
def side_stream(device: torch.device) -> Any:
    """Return the stream on which the copies of all saves are made."""
    # torch deals out the same 32 streams in turn: a new one for each save would soon be one of the user's.
    # Of high priority: the small kernel between two copies would wait behind kernels that fill the GPU.
    return _cuda.Stream(device, priority=-1)


class Buffers:
    """Memory for the small copies of all saves from one device.

    Allocated once: a save that allocates while the training is at its peak could fail.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: Tensor | None = None
        self._samples: Tensor | None = None
        self._plan: Plan | None = None
        self._peak = self._most = 0
        self._is_full = False

    def plan(self, to_pack: ToPack) -> Plan | None:
        """Return the places on the device of what a save packs, or None if there is no room."""
        plan = self._plan
        if plan is None or not plan.is_for(to_pack):
            # Not kept here while new memory is allocated: it has slices of the old one.
            plan = None
            self._plan = plan = Plan.planned(to_pack, self.memory)
        return plan

    def forget_plan(self) -> None:
        """Let go of the memory on the host that was last packed for."""
        self._plan = None

    def memory(self, size: int) -> Tensor | None:
        """Return at least `size` bytes on the device, or None if there is no room."""
        if self._memory is None or self._memory.numel() < size:
            # The plan has slices of it.
            self._plan = self._memory = None
            # Whatever a clone found: without this little memory, all would be copied at once.
            self._memory = self._allocated([size], torch.uint8)
        return self._memory

    def samples(self, size: int) -> Tensor:
        """Return `size` bytes of host memory."""
        if self._samples is None or self._samples.numel() < size:
            pinned = torch.cuda.is_available()
            self._samples = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        return self._samples[:size]

    def made(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Return a new tensor on the device, or None if there is no room."""
        made = None if self._is_full else self._allocated(shape, dtype)
        # Try no further: each failure empties the allocator's cache, and the device waits for that.
        self._is_full = made is None
        return made

    def _allocated(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        try:
            # In a pool of its own: a part of one of the training's free blocks could be what makes the next
            # step's largest allocation fail.
            with torch.cuda.stream(side_stream(self._device)):
                return torch.empty(shape, dtype=dtype, device=self._device)
        except torch.OutOfMemoryError:
            return None

    def room(self) -> int:
        """Return how many bytes are free even when the training is at its peak."""
        if self._is_full:
            return 0
        try:
            free, _ = torch.cuda.mem_get_info(self._device)
            reserved = torch.cuda.memory_reserved(self._device)
            # The script may reset the statistics. They count the clones of earlier saves too: whether the
            # training was at its peak while these were there is not known.
            self._peak = max(self._peak, torch.cuda.max_memory_allocated(self._device))
        except RuntimeError:
            # An allocator other than torch's has no statistics.
            return 0
        return min(int(_MARGIN * (free + reserved - self._peak)), free + self._most)

    def clone(self, source: Tensor, shape: Sequence[int]) -> Tensor | None:
        """Return a contiguous copy on the device, or None if there is no room."""
        clone = self.made(shape, source.dtype)
        return None if clone is None else clone.copy_(source)

    def note_clones(self, size: int) -> None:
        """Note how many bytes of clones a save has made: the allocator keeps that memory for the next one."""
        self._most = max(self._most, size)
