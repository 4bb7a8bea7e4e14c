"""Chooses the process that writes each box of sharded tensors: one of those that hold it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import Unsupported
from .boxes import Box

Table = list[list[int]]
"""The boxes of a tensor that one process holds: of each, where it begins and its shape."""

_MOST_CELLS = 1 << 24


def table(boxes: Sequence[Box]) -> Table:
    """Return the boxes as numbers, for the other processes.

    >>> table([Box((4, 0), (2, 3), (0, 0))])
    [[4, 0, 2, 3]]
    """
    return [[*box.begin, *box.shape] for box in boxes]


class Sharded(NamedTuple):
    """A sharded tensor: its shape, the bytes that each element stands for, and the table of each process."""

    shape: tuple[int, ...]
    width: int
    tables: Sequence[Table]


def choose(tensors: Mapping[str, Sharded], disks: Sequence[int]) -> dict[str, list[list[bool]]]:
    """Return, for each process and each box in its table, whether it writes that box.

    `disks` has the disk of each process. Each element is written once on each disk where a process holds it,
    and all write about the same amount. Unsupported where the boxes leave a gap, overlap or lie outside.

    >>> halves = Sharded((4,), 8, [[[0, 2]], [[2, 2]], [[0, 2]]])
    >>> choose({"weight": halves}, [0, 0, 0]), choose({"weight": halves}, [0, 0, 1])
    ({'weight': [[True], [True], [False]]}, {'weight': [[True], [True], [True]]})
    """
    count, disk_of = len(disks), np.array(disks, dtype=np.int64)
    loads = np.zeros(count, dtype=np.int64)
    chosen: dict[str, list[list[bool]]] = {}
    # The largest first: the small ones then even out what is left.
    for name, one in sorted(tensors.items(), key=lambda item: (-_size(item[1]), item[0])):
        rows = [row for mine in one.tables for row in mine]
        holders = np.repeat(np.arange(count), [len(mine) for mine in one.tables])
        boxes, numbers = _distinct(rows, 2 * len(one.shape))
        _refuse_no_cover(name, one.shape, boxes)
        # By box and disk, then by load: the first of each is the one that has the least to do.
        places = numbers * (disk_of.max(initial=0) + 1) + disk_of[holders]
        order = np.lexsort((holders, loads[holders], places))
        chosen_rows = order[np.diff(places[order], prepend=-1) != 0]
        writes = np.zeros(len(rows), dtype=bool)
        writes[chosen_rows] = True
        sizes = boxes[:, len(one.shape) :].prod(axis=1) * one.width
        np.add.at(loads, holders[chosen_rows], sizes[numbers[chosen_rows]])
        taken = iter(writes.tolist())
        chosen[name] = [[*itertools.islice(taken, len(mine))] for mine in one.tables]
    return {name: chosen[name] for name in tensors}


def sets(tensors: Mapping[str, Sharded], disks: Sequence[int]) -> list[list[int]]:
    """Return the disks in sets, each of which holds all boxes; one that adds none to a set is in the next.

    >>> halves = Sharded((4,), 8, [[[0, 2]], [[2, 2]], [[0, 2]], [[2, 2]]])
    >>> sets({"weight": halves}, [0, 1, 2, 3]), sets({"weight": halves}, [0, 0, 1, 1])
    ([[0, 1], [2, 3]], [[0], [1]])
    """
    left = sorted({*disks})
    there = _boxes_by_disk(tensors, disks) if len(left) > 1 else {}
    count = 1 + max((int(boxes.max(initial=-1)) for boxes in there.values()), default=-1)
    if not count:
        return [left]
    found: list[list[int]] = []
    while left:
        is_held = np.zeros(count, dtype=bool)
        some: list[int] = []
        rest: list[int] = []
        for number in left:
            takes = not is_held[there[number]].all()
            is_held[there[number]] = True
            (some if takes else rest).append(number)
        if found and not is_held.all():
            # What is left holds only a part: it is at home with those that have the rest.
            found[-1] += left
            break
        found.append(some)
        left = rest
    return found


def _boxes_by_disk(tensors: Mapping[str, Sharded], disks: Sequence[int]) -> dict[int, Any]:
    """Return the numbers of the boxes on each disk, counted over all tensors."""
    found: dict[int, list[Any]] = {number: [np.zeros(0, dtype=np.int64)] for number in disks}
    before = 0
    for one in tensors.values():
        rows = [row for mine in one.tables for row in mine]
        boxes, numbers = _distinct(rows, 2 * len(one.shape))
        of_row = np.repeat(np.array(disks), [len(mine) for mine in one.tables])
        for number in found:
            found[number].append(before + numbers[of_row == number])
        before += len(boxes)
    return {number: np.concatenate(some) for number, some in found.items()}


def _size(one: Sharded) -> int:
    return math.prod(one.shape) * one.width


def _distinct(rows: Table, columns: int) -> tuple[Any, Any]:
    """Return the distinct boxes, and the number of each row's box among them."""
    given = np.array(rows, dtype=np.int64).reshape(len(rows), columns)
    if not columns:
        return given[:1], np.zeros(len(rows), dtype=np.int64)
    found, numbers = np.unique(given, axis=0, return_inverse=True)
    return found, numbers.reshape(-1)


def _refuse_no_cover(name: str, shape: Sequence[int], boxes: Any) -> None:
    if problem := cover_problem(shape, boxes):
        raise Unsupported(
            f"the parts of {name} ({list(shape)}) that the processes hold {problem}.",
            fix="shard it with torch's own fully_shard, parallelize_module or distribute_tensor, in the same "
            "way in every process.",
        )


def cover_problem(shape: Sequence[int], boxes: Any) -> str:
    """Return what is wrong with boxes that should hold each element of a tensor once; "" if nothing is."""
    begin, sizes = boxes[:, : len(shape)], boxes[:, len(shape) :]
    end = begin + sizes
    if (begin < 0).any() or (sizes <= 0).any() or (end > np.array(shape, dtype=np.int64)).any():
        return "lie outside of it"
    if (volume := int(sizes.prod(axis=1).sum())) < math.prod(shape):
        return "leave a gap"
    sides = [np.unique(np.concatenate([begin[:, dim], end[:, dim]])) for dim in range(len(shape))]
    if math.prod(map(len, sides)) > _MOST_CELLS:
        # Meshes cut all of a tensor at the same indices.
        return "cut it in too many places"
    return "overlap" if volume > math.prod(shape) or not _are_apart(sides, begin, end) else ""


def _are_apart(sides: Sequence[Any], begin: Any, end: Any) -> bool:
    """Whether no two boxes overlap, given the indices in each dimension where any begins or ends."""
    dims = len(sides)
    # Each box adds one at its first corner, and takes it away behind its last one.
    counts = np.zeros([len(side) for side in sides], dtype=np.int64)
    for corner in itertools.product((False, True), repeat=dims):
        ends = [end[:, dim] if is_end else begin[:, dim] for dim, is_end in enumerate(corner)]
        places = tuple(np.searchsorted(side, at) for side, at in zip(sides, ends, strict=True))
        np.add.at(counts, places, (-1) ** sum(corner))
    for dim in range(dims):
        counts = counts.cumsum(axis=dim)
    return bool((counts <= 1).all())
