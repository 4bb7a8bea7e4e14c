"""One file of the image: the bytes of it that this process saves, and where its tensors lie in them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..files import codec, fingerprint
from ..files.codec import Encoded
from ..files.tensor_file import Layout, Slot
from ..processes.write_shares import Range
from .host_memory import HostMemory

_SMALL = 64 << 10
_WORTH_A_ROW = 8
_IN_ROWS = {torch.float32, torch.float64, torch.bfloat16, torch.float16}
"""torch.cat copies numbers of these dtypes in half the time of a copy of each tensor."""


class Share(NamedTuple):
    """The bytes of a file that this process saves: all of them, or some from `begin` on."""

    layout: Layout
    """The tensors in those bytes, counted from the first of them."""
    begin: int
    size: int
    """The size of the whole file."""
    parts: Mapping[int, tuple[int, int]]
    """For each slot that holds only a part of its tensor: the first element and the end."""


def _share(layout: Layout, begin: int, end: int) -> Share:
    if (begin, end) == (0, layout.size):
        return Share(layout, 0, layout.size, {})
    slots: list[Slot] = []
    parts = {}
    for slot in layout.slots:
        first, last = max(slot.begin, begin), min(slot.end, end)
        if first > last or (first == last and slot.begin < slot.end):
            continue
        shape = slot.shape
        if (first, last) != (slot.begin, slot.end):
            # A block begins between two elements: both lie at multiples of the widest one.
            width = slot.dtype.itemsize
            parts[len(slots)] = ((first - slot.begin) // width, (last - slot.begin) // width)
            shape = ((last - first) // width,)
        slots.append(Slot(slot.name, slot.dtype, shape, first - begin, last - begin))
    return Share(Layout(layout.header[begin:end], tuple(slots), end - begin), begin, layout.size, parts)


def _rows(slots: Sequence[Slot], are_small: Sequence[bool]) -> list[range]:
    """Return the runs of small tensors that lie side by side like the parts of one tensor."""

    def kind(number: int) -> tuple[Any, ...] | None:
        slot = slots[number]
        is_part = are_small[number] and slot.shape and slot.dtype in _IN_ROWS
        return (slot.dtype, slot.shape[1:]) if is_part else None

    found = []
    for of_part, run in itertools.groupby(range(len(slots)), kind):
        numbers = [*run]
        if of_part and len(numbers) >= _WORTH_A_ROW:
            found.append(range(numbers[0], numbers[-1] + 1))
    return found


class ImageFile:
    """A file of every save, which keeps its place in the image while its layout stays the same."""

    def __init__(self, path: str, group: Encoded, whole: Layout, mine: Range) -> None:
        self.path = path
        self.is_frozen = codec.is_frozen(path)
        """Whether its tensors are not trained, and rarely change."""
        self.share = _share(whole, *mine)
        self.layout = self.share.layout
        self.views: list[Tensor] = []
        self._whole, self._mine = whole, mine
        self._names = [slot.name for slot in self.layout.slots]
        small = [
            0 < tensor.nbytes < _SMALL and tensor.is_cpu and tensor.dtype != torch.bool
            for tensor in [group.tensors[name] for name in self._names]
        ]
        for number in self.share.parts:
            small[number] = False
        # One by one, ten thousand would keep the training waiting.
        self._rows = _rows(self.layout.slots, small)
        in_rows = {number for row in self._rows for number in row}
        self._together = [n for n, is_small in enumerate(small) if is_small and n not in in_rows]
        self._whole_rows: list[Tensor] = []
        self._views_together: list[Tensor] = []
        self.apart = [number for number, is_small in enumerate(small) if not is_small]
        """The slots whose tensors are copied one by one."""
        self._memory: memoryview | None = None
        self._fingerprint: Any = None

    def is_planned(self, whole: Layout, mine: Range) -> bool:
        """Return whether it has its place in the image, for this layout and these bytes."""
        return self._memory is not None and self._whole is whole and self._mine == mine

    def place(self, memory: HostMemory, begin: int) -> None:
        """Give it a place in the image, with its header."""
        end = begin + self.layout.size
        self._memory, self._fingerprint = memory.bytes[begin:end], None
        self._memory[: len(self.layout.header)] = self.layout.header
        here, slots = memory.tensor[begin:end], self.layout.slots
        self.views = self.layout.views(here)
        self._views_together = [self.views[number] for number in self._together]
        self._whole_rows = [
            here[slots[row[0]].begin : slots[row[-1]].end]
            .view(slots[row[0]].dtype)
            .view(-1, *slots[row[0]].shape[1:])
            for row in self._rows
        ]

    def bytes(self) -> memoryview:
        """Return its place in the image."""
        assert self._memory is not None
        return self._memory

    def release(self) -> None:
        """Give up its place in the image."""
        self._memory, self.views, self._fingerprint = None, [], None
        self._views_together, self._whole_rows = [], []

    def _is_unchanged(self, sources: Sequence[Tensor]) -> bool:
        """Return whether the tensors are the same as at the last call, whose copies are still here."""
        before, self._fingerprint = self._fingerprint, fingerprint.of(sources)
        return before is not None and fingerprint.is_same(before, self._fingerprint)

    def forget(self) -> None:
        """Treat the tensors as changed at the next call: the copies here may not be complete."""
        self._fingerprint = None

    def begin(self, group: Encoded) -> list[Tensor]:
        """Copy the small tensors in host memory, in few calls, and return the live tensor of each slot.

        Return none if they are frozen in host memory, and the same as those whose copies are still here.
        """
        sources = [*map(group.tensors.__getitem__, self._names)]
        # On a device the training would have to wait for the comparison.
        if self.is_frozen and all(one.is_cpu for one in sources) and self._is_unchanged(sources):
            return []
        for row, whole in zip(self._rows, self._whole_rows, strict=True):
            torch.cat(sources[row[0] : row[-1] + 1], out=whole)
        if self._together:
            torch._foreach_copy_(self._views_together, [sources[number] for number in self._together])
        return sources
