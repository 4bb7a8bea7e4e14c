"""The boxes of sharded tensors that this process writes, in files of its own."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor

from ..errors import CannotStore, Unsupported
from ..files import codec, large_files, sharded_tensor
from ..files.codec import Encoded
from ..files.sharded_tensor import is_sharded
from ..files.strict_json import Json
from ..files.tensor_file import DTYPES
from . import box_writers
from .box_writers import Sharded
from .boxes import Box, held, holders
from .part import Trees

Deal = Callable[[str, Callable[[], Json], Callable[[list[Json]], list[Json]]], Json]
"""Lets rank 0 decide from what each process has, and returns its answer to this one."""

Owners = Mapping[str, Mapping[str, Tensor]]
"""By tree and name in the file: the parameter that a tensor belongs to."""


class Stage(NamedTuple):
    """What this process has that not all have: its stage of a pipeline."""

    name: str
    """The same for the processes that have the same models; empty if all have."""
    ranks: Mapping[str, Sequence[int]]
    """By part: the processes that have it."""
    built: Mapping[str, Json]
    """The settings of the parts that no process before this one has."""


class Disk(NamedTuple):
    """The disk of this process, where not all see the same one."""

    number: int
    ranks_of_all: Sequence[Sequence[int]]
    """The processes that see each disk."""

    @property
    def ranks(self) -> Sequence[int]:
        """The processes that see this one."""
        return self.ranks_of_all[self.number]


class _Planned(NamedTuple):
    of: weakref.ref[Tensor]
    boxes: list[Box]
    is_mine: list[bool]


class Sharding:
    """Who writes what of the tensors that are sharded over the processes.

    The processes agree once on the parameters. The state of an optimizer follows its parameter; any other
    tensor is written by the first process of its mesh that holds a box of it.
    """

    def __init__(self, rank: int | None) -> None:
        self._rank = rank
        self._planned: dict[int, _Planned] = {}
        self._led: dict[Any, bool] = {}
        """By mesh: whether no other mesh on this disk holds the same tensors and comes before it."""
        self._disk: Disk | None = None
        self.disks: Sequence[int] = (0,)
        """The disks that hold a whole checkpoint together; on the first process of one of them."""
        self._mine: dict[str, tuple[Any, dict[str, list[tuple[str, Box]]]]] = {}
        """By tree: what its boxes depend on, and those that this process writes, with their names."""
        self.data_rank: tuple[int, int] | None = None
        """Which of how many shares of the data this process trains on; None if the model does not tell."""
        self.data_ranks: tuple[int, ...] = ()
        """The shares of all processes, on rank 0; empty where each has one of its own."""
        self.built: Mapping[str, Json] = {}
        """The settings of the parts that only other processes have, on rank 0."""
        self.share = 1.0
        """How much of the sharded parameters this process writes."""

    def meet(
        self,
        named: Mapping[str, Tensor],
        stage: Stage,
        data_rank: tuple[int, int] | None,
        deal: Deal,
        disk: Disk | None = None,
    ) -> None:
        """Agree with the other processes on who writes the boxes of these parameters and buffers.

        `data_rank`: which of how many shares of the data this process trains on, if that is known.
        `disk`: None if all see the same one.
        """
        self._disk = disk
        keys = {name: _key(tensor) for name, tensor in named.items() if is_sharded(tensor)}
        for name in named.keys() - keys.keys():
            if ranks := stage.ranks.get(name.partition("/")[0]):
                keys[name] = _key_of_ranks(tuple(ranks))
        divided: dict[str, Any] = {name: tensor for name, tensor in named.items() if name in keys}
        boxes: dict[str, list[Box]] = {}

        def own() -> Json:
            boxes.update({name: _some(held(name, tensor)) for name, tensor in divided.items()})
            rows = [
                [name, [*tensor.shape], tensor.element_size(), box_writers.table(boxes[name]), keys[name]]
                for name, tensor in divided.items()
            ]
            peers = _peers(one for one in divided.values() if is_sharded(one))
            number = disk.number if disk else 0
            return [rows, data_rank and [*data_rank], peers, stage.name, dict(stage.built), number]

        answer, known, data_ranks, self.built, self.disks = deal("who writes what", own, decided)
        self.data_rank, self.data_ranks = known and (*known,), (*data_ranks,)
        mine = 0
        for (name, tensor), (is_mine, leads) in zip(divided.items(), answer, strict=True):
            self._planned[id(tensor)] = _Planned(weakref.ref(tensor), boxes[name], is_mine)
            mine += sum(math.prod(b.shape) for b, is_it in zip(boxes[name], is_mine, strict=True) if is_it)
            if is_sharded(tensor):
                self._led[tensor.device_mesh] = leads
        self.share = mine / max(1, sum(tensor.numel() for tensor in divided.values()))

    def split(
        self, trees: Trees, owners: Owners, of_stages: Mapping[str, Mapping[str, bool]], *, leads: bool
    ) -> tuple[Trees, dict[str, Encoded]]:
        """Return the trees without what is divided, and the files of the boxes that this process writes.

        If a model is divided, all of its tensors are in that folder, which other tools read as a whole.
        `of_stages`: by tree, the tensors of stages, and whether this is the first process on its disk that
        has them. `leads`: whether it is the first of all on its disk.
        """
        rest, groups = dict(trees), dict[str, Encoded]()
        for stem, tree in trees.items():
            staged = of_stages.get(stem, {})
            names = {name for name, tensor in tree.tensors.items() if name in staged or is_sharded(tensor)}
            if not names:
                continue
            if stem == "rank":
                raise CannotStore(
                    f"{min(names)} is sharded over the processes, and in what each process saves for itself.",
                    fix="pass it in extra={...}, not in state.vars or Ranks(per_rank=...).",
                )
            if self._rank is None:
                tensors = {name: sharded_tensor.local(tensor) for name, tensor in tree.tensors.items()}
                rest[stem] = replace(tree, tensors=tensors)
                continue
            plain = {name: tensor for name, tensor in tree.tensors.items() if name not in names}
            whole = plain if stem == "model" else {}
            own = self._boxes(stem, tree, owners.get(stem, {}), staged)
            groups |= self._files(stem, tree, own, whole if leads else {})
            kept = {name: tensor for name, tensor in plain.items() if name not in whole}
            aliases = {name: first for name, first in tree.aliases.items() if first in kept}
            rest[stem] = replace(tree, tensors=kept, aliases=aliases, key=(*tree.key, "plain"))
        return rest, groups

    def _files(
        self, stem: str, tree: Encoded, own: Mapping[str, list[tuple[str, Box]]], whole: Mapping[str, Tensor]
    ) -> dict[str, Encoded]:
        assert self._rank is not None
        files = {}
        for is_frozen in (False, True) if tree.frozen else (False,):
            tensors: dict[str, Tensor] = {}
            begins: dict[str, tuple[int, ...]] = {}
            for name, tensor in whole.items():
                if (name in tree.frozen) is is_frozen:
                    tensors[name], begins[name] = tensor, _stored_at((0,) * tensor.dim(), tensor)
            for name, boxes in own.items():
                if (name in tree.frozen) is not is_frozen:
                    continue
                local = sharded_tensor.local(tree.tensors[name])
                for stored, box in boxes:
                    tensors[stored], begins[stored] = box.of_local(local), _stored_at(box.begin, local)
            if tensors:
                path = codec.shard_path(stem, self._rank, is_frozen=is_frozen, has_frozen=bool(tree.frozen))
                files[path] = Encoded({}, tensors, {}, (*tree.key, is_frozen), begins=begins)
        return files

    def _boxes(
        self, stem: str, tree: Encoded, owners: Mapping[str, Tensor], leads: Mapping[str, bool]
    ) -> dict[str, list[tuple[str, Box]]]:
        key, found = self._mine.get(stem, (None, {}))
        # Where each box lies takes a while to find out, and stays the same.
        if key != tree.key:
            found = {}
            for name, tensor in tree.tensors.items():
                if not is_sharded(tensor) and name not in leads:
                    continue
                if mine := self._mine_of(name, tensor, owners.get(name), leads.get(name, False)):
                    found[name] = [*zip(_names(name, len(mine), tree), mine, strict=True)]
            self._mine[stem] = tree.key, found
        return found

    def _mine_of(self, name: str, tensor: Any, owner: Tensor | None, leads: bool) -> list[Box]:
        boxes = held(name, tensor)
        if not is_sharded(tensor) and not tensor.numel():
            return boxes if leads else []
        planned = self._planned.get(id(owner)) if owner is not None else None
        if planned and planned.of() is not owner:
            # Another object has the identity of one that is gone.
            planned = None
        if planned and owner is tensor and planned.boxes != boxes:
            raise Unsupported(
                f"{name} is sharded in another way than at RunState.load.",
                fix="shard the model before RunState.load. Nothing was written.",
            )
        if planned and planned.boxes == boxes and owner is not None and owner.shape == tensor.shape:
            return [box for box, is_mine in zip(boxes, planned.is_mine, strict=True) if is_mine]
        if not is_sharded(tensor):
            return boxes if leads else []
        if not self._led.get(tensor.device_mesh, True):
            return []
        first = holders(name, tensor, self._disk and self._disk.ranks)
        if self._disk and self._rank == self._disk.ranks[0]:
            self._refuse_others(name, tensor, self._disk)
        return [box for box in boxes if first[box.begin, box.shape] == self._rank]

    def _refuse_others(self, name: str, tensor: Any, disk: Disk) -> None:
        """Raise Unsupported for a tensor that is not whole on the disks that hold one checkpoint together."""
        ranks = {rank for number in self.disks for rank in disk.ranks_of_all[number]}
        if sum(math.prod(shape) for _, shape in holders(name, tensor, ranks)) < tensor.numel():
            raise Unsupported(
                f"{name} is sharded over more nodes than the model, and they share no disk: no copy of the "
                "checkpoint would have all of it.",
                fix="shard it over the mesh of the model, or put the run on a disk that all processes share. "
                "Nothing was written.",
            )


def _stored_at(begin: tuple[int, ...], tensor: Tensor) -> tuple[int, ...]:
    # A dtype that the format lacks is stored as bytes, with one more dimension.
    return begin if tensor.dtype in DTYPES else (*begin, 0)


def _some(boxes: Iterable[Box]) -> list[Box]:
    return [box for box in boxes if math.prod(box.shape)]


def _names(name: str, count: int, tree: Encoded) -> Iterator[str]:
    """Yield a name in the file for each of several boxes of one tensor: only strided shards have several."""
    yield name
    number = 0
    for _ in range(1, count):
        number += 1
        while f"{name}~{number}" in tree.tensors:
            number += 1
        yield f"{name}~{number}"


def _key(tensor: Any) -> list[Any]:
    """Return what tells the processes of a tensor's mesh from those of another: the first, and a digest."""
    return _key_of(tensor.device_mesh)


@lru_cache(maxsize=64)
def _key_of(mesh: Any) -> list[Any]:
    return _key_of_ranks(tuple(mesh.mesh.flatten().tolist()))


@lru_cache(maxsize=64)
def _key_of_ranks(ranks: tuple[int, ...]) -> list[Any]:
    # Not all of them: of all processes together that would grow with the square of their number.
    return [ranks[0], large_files.digest(repr([*ranks]).encode())[:16], len(ranks)]


def decided(told: list[Json]) -> list[Json]:
    """Return, for each process and each of its tensors, which boxes it writes, and whether its mesh leads."""
    shapes: dict[str, tuple[tuple[int, ...], int]] = {}
    tables: dict[str, list[Any]] = {}
    leading: dict[tuple[str, int], Json] = {}
    disks = [disk for *_, disk in told]
    for rank, (rows, *_) in enumerate(told):
        for name, shape, width, table, mesh in rows:
            if shapes.setdefault(name, (tuple(shape), width)) != (tuple(shape), width):
                raise Unsupported(
                    f"{name} has the shape {shape} on rank {rank}, and {list(shapes[name][0])} on another.",
                    fix="build the same model in every process before it is sharded.",
                )
            if name not in tables:
                tables[name] = [[] for _ in told]
            tables[name][rank] = table
            leading[name, disks[rank]] = min(leading.get((name, disks[rank]), mesh), mesh)
    sharded = {name: Sharded(*shapes[name], tables[name]) for name in tables}
    chosen = box_writers.choose(sharded, disks)
    sets = box_writers.sets(sharded, disks)
    data = _shares([(share, peers, stage) for _, share, peers, stage, *_ in told])
    built = {path: value for *_, settings, _ in told for path, value in settings.items()}
    of_all = [] if None in data or [*range(len(told))] == [one[0] for one in data if one] else data
    return [
        [
            [[chosen[name][rank], leading[name, disks[rank]] == mesh] for name, _, _, _, mesh in rows],
            data[rank],
            [] if rank else [one[0] for one in of_all if one],
            {} if rank else built,
            next(some for some in sets if disks[rank] in some) if rank == disks.index(disks[rank]) else [],
        ]
        for rank, (rows, *_) in enumerate(told)
    ]


def _peers(sharded: Iterable[Any]) -> list[Any]:
    """Return the mesh that splits the work on one share of the data, if tensors are sharded by themselves."""
    split = [one for one in sharded if any(type(kind).__name__ != "Replicate" for kind in one.placements)]
    return max(map(_key, split), key=itemgetter(2), default=[])


def _shares(found: Sequence[tuple[Any, list[Any], str]]) -> list[tuple[int, int] | None]:
    """Return the share of the data of each process: what is known, or which of its stage it is.

    The processes of one stage that are each other's peers have one share.
    """
    shares: list[tuple[int, int] | None] = [None for _ in found]
    for stage in {stage for *_, stage in found}:
        there = [rank for rank, one in enumerate(found) if one[2] == stage]
        groups = sorted({tuple(found[rank][1]) for rank in there if not found[rank][0] and found[rank][1]})
        for number, rank in enumerate(there):
            share, peers, _ = found[rank]
            if share:
                shares[rank] = share[0], share[1]
            elif peers:
                shares[rank] = groups.index(tuple(peers)), len(groups)
            elif stage:
                shares[rank] = number, len(there)
    has_stages, counts = any(stage for *_, stage in found), {share[1] for share in shares if share}
    return [None for _ in found] if has_stages and len(counts) > 1 else shares
