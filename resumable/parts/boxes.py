"""The boxes of a sharded tensor that this process holds, from what torch says of its placement."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from ..errors import Unsupported
from ..files import sharded_tensor

Run = tuple[int, int]
"""Indices of one dimension that follow each other: the first one, and how many."""

Runs = tuple[tuple[Run, ...], ...]
"""The runs of each dimension."""


class Box(NamedTuple):
    """A part of a tensor that is a range of indices in each dimension."""

    begin: tuple[int, ...]
    shape: tuple[int, ...]
    at: tuple[int, ...]
    """Where it begins in the local tensor of the process that holds it."""

    def of_whole(self, whole: Tensor) -> Tensor:
        """Return it as a view of the whole tensor."""
        return _range(whole, self.begin, self.shape)

    def of_local(self, local: Tensor) -> Tensor:
        """Return it as a view of the local tensor."""
        return local if self.shape == local.shape else _range(local, self.at, self.shape)

    def common(self, other: Box) -> Box | None:
        """Return what another box of the same tensor has too, if anything.

        >>> Box((0,), (4,), (0,)).common(Box((3,), (5,), (0,)))
        Box(begin=(3,), shape=(1,), at=(3,))
        """
        begin = tuple(map(max, self.begin, other.begin))
        ends = [
            min(mine + size, theirs + count)
            for mine, size, theirs, count in zip(*self[:2], *other[:2], strict=True)
        ]
        shape = tuple(end - first for end, first in zip(ends, begin, strict=True))
        if any(size <= 0 for size in shape):
            return None
        at = (place + first - mine for place, first, mine in zip(self.at, begin, self.begin, strict=True))
        return Box(begin, shape, tuple(at))


def _range(tensor: Tensor, begin: Sequence[int], shape: Sequence[int]) -> Tensor:
    for dim, (first, size) in enumerate(zip(begin, shape, strict=True)):
        tensor = tensor.narrow(dim, first, size)
    return tensor


def held(name: str, tensor: Any) -> list[Box]:
    """Return the boxes of a tensor, sharded or whole, that this process holds.

    >>> held("weight", torch.zeros(3, 2))
    [Box(begin=(0, 0), shape=(3, 2), at=(0, 0))]
    """
    shape = tuple(tensor.shape)
    if not sharded_tensor.is_sharded(tensor):
        return [Box((0,) * len(shape), shape, (0,) * len(shape))]
    mesh = tensor.device_mesh
    if (coordinate := _coordinate(mesh)) is None:
        return []
    runs = _placed(name, tensor, coordinate)
    local = tuple(sharded_tensor.local(tensor).shape)
    expected = tuple(sum(count for _, count in row) for row in runs)
    # Of nothing torch has many shapes.
    if expected != local and math.prod(expected) + math.prod(local):
        raise Unsupported(
            f"{name} has {list(local)} of {list(shape)} in this process, where its placement "
            f"{tensor.placements} says {list(expected)}.",
            fix="shard it with torch's own fully_shard, parallelize_module or distribute_tensor.",
        )
    return [*_boxes(runs)]


def holders(
    name: str, tensor: Any, among: Collection[int] | None = None
) -> dict[tuple[tuple[int, ...], tuple[int, ...]], int]:
    """Return the first rank of its mesh, or `among` some, that holds each box of a sharded tensor.

    The boxes go by where they begin and by their shape.
    """
    mesh = tensor.device_mesh.mesh
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    for coordinate, rank in zip(
        itertools.product(*map(range, mesh.shape)), mesh.flatten().tolist(), strict=True
    ):
        if among is not None and rank not in among:
            continue
        for box in _boxes(_placed(name, tensor, coordinate)):
            found.setdefault((box.begin, box.shape), rank)
    return found


def _placed(name: str, tensor: Any, coordinate: tuple[int, ...]) -> Runs:
    try:
        return _known_runs(tensor.shape, _sides(tensor.device_mesh), coordinate, tensor.placements)
    except TypeError as exc:
        raise Unsupported(
            f"{name} is placed as {exc} over the processes, which cannot be saved.",
            fix="redistribute it to Shard or Replicate placements before it is given to RunState.",
        ) from exc


@lru_cache(maxsize=64)
def _sides(mesh: Any) -> tuple[int, ...]:
    return tuple(mesh.mesh.shape)


@lru_cache(maxsize=64)
def _coordinate(mesh: Any) -> tuple[int, ...] | None:
    found = mesh.get_coordinate()
    return None if found is None else tuple(found)


# A model has many parameters of few shapes, and its optimizer more tensors of the same.
@lru_cache(maxsize=1024)
def _known_runs(
    shape: tuple[int, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Any, ...]
) -> Runs:
    return tuple(map(tuple, _runs(shape, mesh, coordinate, placements)))


@lru_cache(maxsize=1024)
def _boxes(runs: Runs) -> tuple[Box, ...]:
    return tuple(boxes(runs))


def boxes(runs: Sequence[Sequence[Run]]) -> list[Box]:
    """Return the boxes of a process that holds these runs of each dimension, one after the other."""
    placed = []
    for row in runs:
        starts = itertools.accumulate((count for _, count in row), initial=0)
        placed.append([(first, count, at) for (first, count), at in zip(row, starts, strict=False)])
    found = []
    for sides in itertools.product(*placed):
        begin, shape, at = zip(*sides, strict=True) if sides else ((), (), ())
        found.append(Box(begin, shape, at))
    return found


def _runs(
    shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> list[list[Run]]:
    """Return, for each dimension, the indices that the process at a coordinate of the mesh holds."""
    splitting: dict[int, list[int]] = {}
    for number, placement in enumerate(placements):
        # By name: the class of strided shards is a private one in some versions of torch.
        kind = type(placement).__name__
        if kind in ("Shard", "_StridedShard"):
            splitting.setdefault(placement.dim % len(shape), []).append(number)
        elif kind != "Replicate":
            raise TypeError(repr(placement))
    found = []
    for dim, size in enumerate(shape):
        runs: list[Run] = [(0, size)] if size else []
        for number, factor in _in_order(splitting.get(dim, []), mesh, placements):
            parts = [_chunk(runs, factor, part) for part in range(factor)]
            runs = [run for part in parts for run in _chunk(part, mesh[number], coordinate[number])]
        found.append(_joined(runs))
    return found


def _in_order(
    numbers: Sequence[int], mesh: Sequence[int], placements: Sequence[Any]
) -> list[tuple[int, int]]:
    """Return the dimensions of the mesh that split one dimension, in the order in which they do.

    Each has the number of parts that it splits one by one. FSDP over tensor parallelism splits what the
    latter has split before: then the factor of its strided shard is the product of those counts.
    """
    if not numbers:
        return []
    first, *rest = numbers
    factor = int(getattr(placements[first], "split_factor", 1))
    if rest and factor > 1 and factor == math.prod(mesh[number] for number in rest):
        return [*_in_order(rest, mesh, placements), (first, 1)]
    return [(first, factor), *_in_order(rest, mesh, placements)]


def _chunk(runs: Sequence[Run], count: int, number: int) -> list[Run]:
    """Return one of so many parts, as `torch.chunk` makes them."""
    total = sum(length for _, length in runs)
    size = -(-total // count)
    begin, end = min(number * size, total), min((number + 1) * size, total)
    found, at = [], 0
    for first, length in runs:
        low, high = max(begin, at), min(end, at + length)
        if low < high:
            found.append((first + low - at, high - low))
        at += length
    return found


def _joined(runs: Sequence[Run]) -> list[Run]:
    found: list[Run] = []
    for first, length in runs:
        if found and sum(found[-1]) == first:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((first, length))
    return found
