"""Each element of a sharded tensor is written once, by a process that holds it."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from resumable import Unsupported
from resumable.parts import box_writers, boxes
from resumable.parts.box_writers import Sharded, Table


class Replicate:
    """As torch's."""


class Shard:
    """As torch's."""

    def __init__(self, dim: int) -> None:
        self.dim = dim


def random_one(dice: random.Random, mesh: tuple[int, ...]) -> Sharded:
    shape = [1 + dice.randrange(12) for _ in range(dice.randrange(4))]
    choices = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    placements = [dice.choice(choices) for _ in mesh]
    tables = [
        box_writers.table(boxes.boxes(boxes._runs(shape, mesh, coordinate, placements)))
        for coordinate in itertools.product(*map(range, mesh))
    ]
    return Sharded(tuple(shape), dice.choice([2, 4, 12]), tables)


def written(one: Sharded, chosen: list[list[bool]]) -> tuple[np.ndarray, list[int]]:
    """Return how often each element is written, and how many bytes each process writes."""
    counts, loads = np.zeros(one.shape, dtype=np.int64), []
    dims = len(one.shape)
    for mine, writes in zip(one.tables, chosen, strict=True):
        rows = [row for row, is_mine in zip(mine, writes, strict=True) if is_mine]
        for row in rows:
            counts[tuple(slice(a, a + n) for a, n in zip(row[:dims], row[dims:], strict=True))] += 1
        loads.append(sum(math.prod(row[dims:]) for row in rows) * one.width)
    return counts, loads


@pytest.mark.parametrize("seed", range(20))
def test_each_element_is_written_once_and_the_work_is_shared(seed: int) -> None:
    dice = random.Random(seed)
    mesh = dice.choice([(1,), (4,), (2, 3), (2, 2, 2), (7,)])
    tensors = {f"t{number}": random_one(dice, mesh) for number in range(1 + dice.randrange(20))}
    count = math.prod(mesh)
    chosen = box_writers.choose(tensors, [0] * count)
    assert [*chosen] == [*tensors]

    total = np.zeros(count, dtype=np.int64)
    for name, one in tensors.items():
        counts, loads = written(one, chosen[name])
        assert (counts == 1).all()
        total += loads


def test_replicas_share_the_writing() -> None:
    whole = {f"t{number}": Sharded((100,), 4, [[[0, 100]]] * 4) for number in range(40)}
    chosen = box_writers.choose(whole, [0] * 4)
    loads = np.sum([written(one, chosen[name])[1] for name, one in whole.items()], axis=0)

    assert loads.tolist() == [4000] * 4


def test_all_processes_come_to_the_same_choice() -> None:
    tensors = {f"t{number}": random_one(random.Random(number), (2, 3)) for number in range(20)}
    backwards = dict(reversed([*tensors.items()]))

    assert box_writers.choose(tensors, [0] * 6) == box_writers.choose(backwards, [0] * 6)


@pytest.mark.parametrize(
    ("tables", "problem"),
    [
        ([[[0, 4]], [[4, 3]]], "leave a gap"),
        ([[[0, 4]], []], "leave a gap"),
        ([[[0, 4]], [[3, 5]]], "overlap"),
        ([[[0, 4], [0, 2]], [[6, 2]]], "overlap"),
        ([[[0, 4]], [[4, 5]]], "lie outside"),
        ([[[-1, 5]], [[4, 4]]], "lie outside"),
        ([[[0, 4]], [[4, 4]], [[8, 0]]], "lie outside"),
    ],
)
def test_parts_that_are_not_the_whole_are_refused(tables: list[Table], problem: str) -> None:
    with pytest.raises(Unsupported, match=rf"weight \(\[8\]\) that the processes hold {problem}"):
        box_writers.choose({"weight": Sharded((8,), 4, tables)}, [0] * len(tables))


def test_boxes_that_overlap_in_a_corner_are_refused() -> None:
    tables = [[[0, 0, 2, 2]], [[1, 1, 2, 2]], [[2, 0, 1, 1]]]
    with pytest.raises(Unsupported, match="overlap"):
        box_writers.choose({"weight": Sharded((3, 3), 4, tables)}, [0] * 3)


def test_a_tensor_that_is_cut_in_too_many_places_is_refused() -> None:
    rows = [[2 * n, 2 * n, 1, 1] for n in range(2100)] + [[0, 0, 5000, 5000]]
    with pytest.raises(Unsupported, match="too many places"):
        box_writers.choose({"weight": Sharded((5000, 5000), 4, [rows])}, [0])


def test_scalars_are_written_by_one_and_empty_tensors_by_nobody() -> None:
    nothing, scalar = Sharded((0, 3), 4, [[], []]), Sharded((), 4, [[[]], [[]]])

    chosen = box_writers.choose({"nothing": nothing, "scalar": scalar}, [0, 0])
    assert chosen == {"nothing": [[], []], "scalar": [[True], [False]]}
