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
# The usual dtypes, of which no save has to make views: torch copies many tensors of one in few calls.
_COPIED_AS_THEY_ARE = {torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8}


class ToPack(NamedTuple):
    """What a save packs: small tensors, with their views on the host, and samples of large ones."""

    views: Sequence[Tensor]
    sources: Sequence[Tensor]
    samples: Sequence[Tensor]
    staging: int
    """How many bytes are needed besides, to put large tensors in order."""


class Plan:
    """The place on the device of each tensor and each sample, for all saves that pack the same kinds."""

    def __init__(self, to_pack: ToPack, offsets: _Offsets, memory: Tensor) -> None:
        self._views, self._kinds = [*to_pack.views], _kinds(to_pack)
        self.tick = memory[:1]
        """A place to write to, for a kernel that has nothing to do."""
        self.rows = [(row.view, memory[at : at + row.size]) for row, at in offsets.rows]
        """The memory of each row on the host, and that on the device."""
        first, last = offsets.samples
        self.samples, self.staging = memory[first:last], memory[last : last + to_pack.staging]
        self.sample_places = [0] * len(to_pack.samples)
        """Where each of the samples begins among them."""
        self._sample_groups: list[tuple[Tensor, list[int]]] = []
        for numbers, begin in offsets.groups:
            at = begin
            for number in numbers:
                self.sample_places[number] = at - first
                at += to_pack.samples[number].nbytes
            dtype = _as_copied(to_pack.samples[numbers[0]]).dtype
            self._sample_groups.append((memory[begin:at].view(dtype), numbers))
        self._groups = _grouped(
            to_pack.sources, [row for row, _ in offsets.rows], [one for _, one in self.rows]
        )

    @classmethod
    def planned(cls, to_pack: ToPack, memory_of: Callable[[int], Tensor | None]) -> Plan | None:
        """Plan the places, in memory of this size if there is room for it."""
        offsets = _offsets(to_pack)
        memory = memory_of(offsets.size)
        return None if memory is None else cls(to_pack, offsets, memory)

    def is_for(self, to_pack: ToPack) -> bool:
        """Whether the places are those of what is to be packed now."""
        # A view is the same object only while the shape of its tensor is the same.
        return (
            len(to_pack.views) == len(self._views)
            and all(map(operator.is_, to_pack.views, self._views))
            and self._kinds == _kinds(to_pack)
        )

    def fill(self, to_pack: ToPack) -> None:
        """Copy all into their places, in few calls."""
        for places, numbers in self._groups:
            torch._foreach_copy_(places, [_as_copied(to_pack.sources[number]) for number in numbers])
        for place, numbers in self._sample_groups:
            torch.cat([_as_copied(to_pack.samples[number]) for number in numbers], out=place)


class _Offsets(NamedTuple):
    """The offsets in the memory of the device."""

    rows: Sequence[tuple[_Row, int]]
    groups: Sequence[tuple[list[int], int]]
    """The numbers of samples of one dtype, and where they begin."""
    samples: tuple[int, int]
    """Where the first group begins, and the last one ends."""
    size: int


def _offsets(to_pack: ToPack) -> _Offsets:
    rows, groups = _rows(to_pack.views), _by_dtype(to_pack.samples)
    sizes = [sum(to_pack.samples[number].nbytes for number in numbers) for numbers in groups]
    begins = [*_laid_out([1, *(row.size for row in rows), *sizes, to_pack.staging])]
    of_rows, of_groups = begins[1 : 1 + len(rows)], begins[1 + len(rows) : -1]
    pairs = [*zip(groups, of_groups, strict=False)]
    return _Offsets([*zip(rows, of_rows, strict=True)], pairs, (of_groups[0], of_groups[-1]), begins[-1])


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
        begin = view.data_ptr()
        # The next file may begin right behind the last one, but not at a multiple of its own numbers' size.
        if begin != end or (begin - runs[-1][0].data_ptr()) % view.element_size():
            runs.append([])
        runs[-1].append(view)
        end = begin + view.nbytes
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


def _kinds(to_pack: ToPack) -> tuple[object, ...]:
    return (
        [(source.dtype, source.is_contiguous()) for source in to_pack.sources],
        [(sample.dtype, sample.nbytes) for sample in to_pack.samples],
        to_pack.staging,
    )


def _laid_out(sizes: Iterable[int]) -> Iterable[int]:
    """Return where each of the pieces begins, and the end of all."""
    return itertools.accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0)


def _strides(shape: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous tensor."""
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]
