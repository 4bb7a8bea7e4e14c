"""Small tensors, and samples of large ones, side by side on a GPU; where each lies is planned once."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_ALIGNMENT = 16  # what the widest dtype, complex128, needs
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_COPIED_AS_THEY_ARE = {torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8}


class Packed(NamedTuple):
    """What a save packs: small tensors, with their views on the host, and samples of large ones."""

    views: Sequence[Tensor]
    sources: Sequence[Tensor]
    samples: Sequence[Tensor]
    staging: int
    """How many bytes are needed besides, to put large tensors in order."""


class Packing:
    """The place on the device of each tensor and each sample, for all saves that pack the same kinds."""

    def __init__(self, packed: Packed, plan: _Plan, memory: Tensor) -> None:
        self._views, self._kinds = [*packed.views], _kinds(packed)
        self.tick = memory[:1]
        """A place to write to, for a kernel that has nothing to do."""
        self.rows = [(row.view, memory[at : at + row.size]) for row, at in plan.rows]
        """The memory of each row on the host, and that on the device."""
        first, last = plan.samples
        self.samples, self.staging = memory[first:last], memory[last : last + packed.staging]
        self.sample_places = [0] * len(packed.samples)
        """Where each of the samples begins among them."""
        self._sample_groups: list[tuple[Tensor, list[int]]] = []
        for numbers, begin in plan.groups:
            at = begin
            for number in numbers:
                self.sample_places[number] = at - first
                at += packed.samples[number].nbytes
            dtype = _as_copied(packed.samples[numbers[0]]).dtype
            self._sample_groups.append((memory[begin:at].view(dtype), numbers))
        self._groups = _grouped(packed.sources, [row for row, _ in plan.rows], [one for _, one in self.rows])

    @classmethod
    def planned(cls, packed: Packed, memory_of: Callable[[int], Tensor | None]) -> Packing | None:
        """Plan the places, in memory of this size if there is room for it."""
        plan = _plan(packed)
        memory = memory_of(plan.size)
        return None if memory is None else cls(packed, plan, memory)

    def is_for(self, packed: Packed) -> bool:
        """Whether the places are those of what is packed now."""
        return (
            len(packed.views) == len(self._views)
            and all(map(operator.is_, packed.views, self._views))
            and self._kinds == _kinds(packed)
        )

    def fill(self, packed: Packed) -> None:
        """Copy all into their places, in few calls."""
        for places, numbers in self._groups:
            torch._foreach_copy_(places, [_as_copied(packed.sources[number]) for number in numbers])
        for place, numbers in self._sample_groups:
            torch.cat([_as_copied(packed.samples[number]) for number in numbers], out=place)


class _Plan(NamedTuple):
    """Where in the memory what begins."""

    rows: Sequence[tuple[_Row, int]]
    groups: Sequence[tuple[list[int], int]]
    """The numbers of samples of one dtype, and where they begin."""
    samples: tuple[int, int]
    """Where the first group begins, and the last one ends."""
    size: int


def _plan(packed: Packed) -> _Plan:
    rows, groups = _rows(packed.views), _by_dtype(packed.samples)
    sizes = [sum(packed.samples[number].nbytes for number in numbers) for numbers in groups]
    begins = [*_laid_out([1, *(row.size for row in rows), *sizes, packed.staging])]
    of_rows, of_groups = begins[1 : 1 + len(rows)], begins[1 + len(rows) : -1]
    pairs = [*zip(groups, of_groups, strict=False)]
    return _Plan([*zip(rows, of_rows, strict=True)], pairs, (of_groups[0], of_groups[-1]), begins[-1])


class _Row(NamedTuple):
    """Tensors whose places on the host lie next to each other."""

    view: Tensor
    """Their bytes on the host."""
    offsets: Sequence[int]
    """Where each begins."""
    size: int


def _rows(views: Sequence[Tensor]) -> list[_Row]:
    runs: list[list[Tensor]] = []
    end = 0
    for view in views:
        if view.data_ptr() != end:
            runs.append([])
        runs[-1].append(view)
        end = view.data_ptr() + view.nbytes
    return [_row(run) for run in runs]


def _row(run: Sequence[Tensor]) -> _Row:
    begin = run[0].data_ptr()
    offsets = [view.data_ptr() - begin for view in run]
    size = offsets[-1] + run[-1].nbytes
    return _Row(run[0].view(-1).view(torch.uint8).as_strided([size], [1]), offsets, size)


def _grouped(
    sources: Sequence[Tensor], rows: Iterable[_Row], memories: Iterable[Tensor]
) -> list[tuple[list[Tensor], list[int]]]:
    """Return the places of the tensors, and their numbers, by what one call can copy."""
    groups: dict[tuple[torch.dtype, bool], tuple[list[Tensor], list[int]]] = {}
    number = 0
    for row, memory in zip(rows, memories, strict=True):
        for offset in row.offsets:
            source = _as_copied(sources[number])
            lies_well = source.is_contiguous()
            place = memory[offset : offset + source.nbytes].view(source.dtype)
            strides = source.stride() if lies_well else _strides(source.shape)
            places, numbers = groups.setdefault((source.dtype, lies_well), ([], []))
            places.append(place.as_strided(source.shape, strides))
            numbers.append(number)
            number += 1
    return [*groups.values()]


def _by_dtype(samples: Sequence[Tensor]) -> list[list[int]]:
    found: dict[torch.dtype, list[int]] = {}
    for number, sample in enumerate(samples):
        found.setdefault(sample.dtype, []).append(number)
    return [*found.values()]


def _as_copied(tensor: Tensor) -> Tensor:
    """Return a tensor, or its bits if torch might not copy it together with others."""
    if tensor.dtype in _COPIED_AS_THEY_ARE:
        return tensor
    return tensor.detach().view(_BITS[tensor.element_size()])


def _kinds(packed: Packed) -> tuple[object, ...]:
    return (
        [(source.dtype, source.is_contiguous()) for source in packed.sources],
        [(sample.dtype, sample.nbytes) for sample in packed.samples],
        packed.staging,
    )


def _laid_out(sizes: Iterable[int]) -> Iterable[int]:
    """Return where each of the pieces begins, and the end of all."""
    return itertools.accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0)


def _strides(shape: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous tensor."""
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]
