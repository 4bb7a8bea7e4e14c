"""The memory of a modeled device: given out again as soon as CUDA's rules allow it."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

_SIZE = 64 << 20
_ALIGNMENT = 64
_GARBAGE = 0x5A


class _Block:
    def __init__(self, size: int, stream: Any) -> None:
        self.size = size
        self.stream = stream
        self.users: set[Any] = set()
        """Other streams that work with it."""
        self.uses: list[Any] = []
        """How far those had to come when it was let go."""

    def can_be_used(self, size: int, stream: Any) -> bool:
        is_over = all(mark is None or mark.is_over for mark in self.uses)
        return self.size == size and self.stream is stream and is_over


class Memory:
    """A device's memory, and an allocator that gives each stream its own blocks again at once."""

    def __init__(self) -> None:
        room = np.empty(_SIZE + _ALIGNMENT, dtype=np.uint8)
        # Products of matrices depend on how these are aligned.
        self._bytes = room[-room.ctypes.data % _ALIGNMENT :][:_SIZE]
        self._whole = torch.from_numpy(self._bytes)
        self._begin: int = self._bytes.ctypes.data
        self._used: dict[int, _Block] = {}
        self._free: list[tuple[int, _Block]] = []
        self._end = 0
        self.limit = _SIZE
        """How many bytes the device has."""
        self.allocated = self.reserved = self.peak = 0

    def info(self) -> tuple[int, int]:
        """Return how many bytes are free, and how many there are."""
        return self.limit - self.reserved, self.limit

    def leave(self, room: int) -> None:
        """Let nobody have more than so many bytes besides those in use."""
        self.limit = self.reserved + room

    def holds(self, place: int) -> bool:
        """Whether an address is in this memory."""
        return self._begin <= place < self._begin + _SIZE

    def empty_like(self, like: Tensor, stream: Any = None) -> Tensor:
        """Return a tensor of the same shape and strides, whose content is anything."""
        span = 1 + sum((count - 1) * step for count, step in zip(like.shape, like.stride(), strict=True))
        begin, size = self._place(max(1, span) * like.element_size(), stream)
        block = self._bytes[begin : begin + size]
        # The storage keeps the block; who has only an alias does not.
        weakref.finalize(block, self._let_go, begin).atexit = False
        made = torch.empty(0, dtype=like.dtype)
        made.set_(torch.from_numpy(block).untyped_storage(), 0, like.shape, like.stride())  # type: ignore[call-overload]
        return made

    def _place(self, size: int, stream: Any) -> tuple[int, int]:
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        for number in reversed(range(len(self._free))):
            begin, block = self._free[number]
            if block.can_be_used(size, stream):
                del self._free[number]
                break
        else:
            if self.reserved + size > self.limit:
                raise torch.OutOfMemoryError("the model of a device has no room")
            begin, self._end = self._end, self._end + size
            assert self._end <= _SIZE, "the model of a device is too small for this test"
            self._bytes[begin : self._end] = _GARBAGE
            self.reserved += size
        self._used[begin] = _Block(size, stream)
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        return begin, size

    def _let_go(self, begin: int) -> None:
        block = self._used.pop(begin)
        self.allocated -= block.size
        block.uses = [user.record_event().mark for user in block.users]
        self._free.append((begin, block))

    def forget_free(self) -> None:
        """Give what is free back to the driver; it is not given out again here."""
        self.reserved -= sum(block.size for _, block in self._free)
        self._free.clear()

    def note_use(self, tensor: Tensor, stream: Any) -> None:
        """Note that a stream works with a tensor, which may be let go before that is done."""
        block = self._used.get(tensor.untyped_storage().data_ptr() - self._begin)
        if block and block.stream is not stream:
            block.users.add(stream)

    def alias(self, tensor: Tensor) -> Tensor:
        """Return a tensor with the same memory, which does not keep it."""
        whole = self._whole.view(tensor.dtype)
        begin = (tensor.data_ptr() - self._begin) // tensor.element_size() if tensor.numel() else 0
        return whole.as_strided(tensor.shape, tensor.stride(), begin)


class HostMemory(Memory):
    """Host memory that the devices' copy engines read and write themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.registered: dict[int, int] = {}
        """The memory of others that the driver was told of: from where to where."""

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a contiguous tensor of the host is in such memory."""
        first = tensor.data_ptr()
        last = first + max(1, tensor.nbytes) - 1
        touched = [(begin, end) for begin, end in self.registered.items() if begin <= last and first < end]
        if len(touched) > 1:
            raise RuntimeError("CUDA error: invalid argument")
        return self.holds(first) or any(begin <= first and last < end for begin, end in touched)
