"""The boxes that each process is said to hold are those that torch gives it."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import gloo
import pytest
import torch
from sharded_training import CAN_SHARD, WHY_NOT
from torch import Tensor, nn

from resumable import Unsupported
from resumable.files import sharded_tensor
from resumable.parts.boxes import Box, held
from tests.support.counted import Tally

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without processes")

MESHES = {2: [(2,)], 3: [(3,)], 4: [(4,), (2, 2)], 6: [(6,), (2, 3), (3, 2), (1, 3, 2)]}


def _numbered(*shape: int) -> Tensor:
    return torch.arange(math.prod(shape)).view(shape)


def _wrong(sharded: Any, whole: Tensor) -> bool:
    """Whether the local tensor differs from what its boxes say, or has numbers that are in none."""
    local = sharded.to_local()
    found = torch.full_like(local, -1)
    for box in held("tensor", sharded):
        box.of_local(found).copy_(box.of_whole(whole))
    return not torch.equal(found, local)


def _placement(dice: random.Random, dims: int, is_last: bool) -> Any:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    kind = dice.choice(["replicate", "shard", "shard", "shard", "strided"])
    if kind == "replicate" or not dims:
        return Replicate()
    dim = dice.randrange(dims)
    # Strided shards that others split again are not made by `distribute_tensor`.
    return (
        _StridedShard(dim, split_factor=dice.randrange(2, 5)) if kind == "strided" and is_last else Shard(dim)
    )


def _try_many(rank: int, size: int, seeds: range) -> tuple[list[str], Counter[str]]:
    """Return what is wrong in random placements of random shapes, and how many of each kind there were."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    meshes = [init_device_mesh("cpu", shape) for shape in MESHES[size]]
    bad, kinds = [], Counter[str]()
    for seed in seeds:
        dice = random.Random(seed)
        mesh = dice.choice(meshes)
        shape = [dice.choice([0, 1, 2, 3, 5, 7, 8, 12, 13]) for _ in range(dice.randrange(4))]
        count = mesh.mesh.dim()
        placements = [_placement(dice, len(shape), number == count - 1) for number in range(count)]
        whole = _numbered(*shape)
        # Without a source each process takes its own part, which works for uneven ones too.
        sharded = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        kinds[" ".join(type(one).__name__ for one in placements)] += 1
        if _wrong(sharded, whole):
            bad.append(f"{seed}: {shape} on {tuple(mesh.mesh.shape)} as {placements}")
    return bad, kinds


@pytest.mark.skipif(not CAN_SHARD, reason=WHY_NOT)
@pytest.mark.parametrize("size", MESHES)
@pytest.mark.heavy
def test_random_placements_are_described_as_torch_makes_them(size: int, tmp_path: Path, tally: Tally) -> None:
    seeds = range(1000 * size, 1000 * size + 150)
    ended = gloo.run(size, _try_many, size, seeds, folder=tmp_path)
    for one in ended:
        assert one.error is None, one.printed
    tally("placements of sharded tensors", len(seeds), [line for one in ended for line in one.value[0]])
    assert len(ended[0].value[1]) >= 3, "placements of one kind only"


def _fully_sharded(rank: int, rows: int) -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    wrong = False
    for style in (ColwiseParallel(), RowwiseParallel()):
        layer = nn.Linear(rows, rows + 1, bias=False)
        whole = _numbered(rows + 1, rows).float()
        with torch.no_grad():
            layer.weight.copy_(whole)
        parallelize_module(layer, mesh["tp"], style)
        fully_shard(layer, mesh=mesh["dp"])
        with torch.no_grad():
            wrong |= _wrong(layer.weight, whole)
    return wrong


@pytest.mark.quick(6)
@pytest.mark.skipif(not CAN_SHARD, reason=WHY_NOT)
@pytest.mark.parametrize("rows", [1, 7, 10, 13, 16])
def test_fsdp_over_tensor_parallelism_is_described_as_torch_makes_it(rows: int, tmp_path: Path) -> None:
    ended = gloo.run(4, _fully_sharded, rows, folder=tmp_path)

    assert [(one.error, one.value) for one in ended] == [(None, False)] * 4


def test_common_parts_of_boxes_are_those_of_their_numbers() -> None:
    dice = random.Random(0)
    whole = _numbered(5, 6, 4)

    def some() -> Box:
        begin = [dice.randrange(size) for size in whole.shape]
        shape = [1 + dice.randrange(size - first) for size, first in zip(whole.shape, begin, strict=True)]
        return Box(tuple(begin), tuple(shape), (0, 0, 0))

    for _ in range(500):
        one, other = some(), some()
        local = one.of_whole(whole)
        expected = {*local.flatten().tolist()} & {*other.of_whole(whole).flatten().tolist()}
        common = one.common(other)
        assert ({*common.of_local(local).flatten().tolist()} if common else set()) == expected
        if common:
            assert torch.equal(common.of_local(local), common.of_whole(whole))


class _Mesh:
    mesh = torch.arange(2)

    def get_coordinate(self) -> list[int]:
        return [0]


class _Sharded:
    """What torch says of a tensor of ten numbers in two processes, and what is here."""

    device_mesh, shape = _Mesh(), (10,)

    def __init__(self, placement: Any, here: int) -> None:
        self.placements = (placement,)
        self._here = here

    def to_local(self) -> Tensor:
        return torch.zeros(self._here)


def test_what_cannot_be_described_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.tensor import Partial, Shard

    monkeypatch.setattr(sharded_tensor, "is_sharded", lambda one: isinstance(one, _Sharded))
    monkeypatch.setattr(sharded_tensor, "local", lambda one: one.to_local())
    assert held("weight", _Sharded(Shard(0), 5)) == [Box((0,), (5,), (0,))]
    with pytest.raises(Unsupported, match=r"weight has \[6\] of \[10\] in this process.* says \[5\]"):
        held("weight", _Sharded(Shard(0), 6))
    with pytest.raises(Unsupported, match="weight is placed as Partial") as refused:
        held("weight", _Sharded(Partial(), 10))

    assert "redistribute" in refused.value.fix
