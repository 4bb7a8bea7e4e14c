"""Reads boxes of sharded tensors: from the files of any processes, into those that this one holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import CheckpointDamaged
from ..files import disk, file_reader, large_files, safetensors_header, sharded_tensor, tensor_file
from ..files.file_reader import Target
from ..files.tensor_file import Slot
from ..run.checkpoint import Checkpoint
from . import box_writers
from .boxes import Box, held
from .device_lanes import on_lanes, send

_AT_A_TIME = 256 << 20
"""The bytes of host memory that pieces take which cannot be read where they belong."""


class Stored(NamedTuple):
    """A box in a file."""

    name: str
    """That of its tensor."""
    slot: Slot
    box: Box


class BoxFile(NamedTuple):
    """A file of boxes, each block of which can be verified by itself."""

    folder: Any
    path: str
    size: int
    digests: Sequence[bytes]
    header: memoryview
    stored: Sequence[Stored]


def opened(found: Checkpoint, path: str, known: Collection[str]) -> BoxFile:
    """Return a file of boxes of `known` tensors; ValueError if it is none. Its header is verified later."""
    try:
        return _opened(found, path, known)
    except CheckpointDamaged:
        raise
    except ValueError as exc:
        raise ValueError(f"{path}: {exc}") from exc


def _opened(found: Checkpoint, path: str, known: Collection[str]) -> BoxFile:
    record = found.about.files[path]
    digests = [bytes.fromhex(one) for one in record.blocks]
    if len(digests) != max(1, -(-record.size // large_files.BLOCK)):
        raise ValueError(f"manifest.json has {len(digests)} hashes for the blocks of {path}")
    if large_files.fold(digests) != record.xxh3_128:
        raise ValueError(f"manifest.json has other hashes for {path} and for its blocks")
    header = found.read_header(path)
    slots = tensor_file.read_header(header, record.size)
    begins = safetensors_header.begins_of(header, slots)
    stored = []
    for slot in slots:
        # Of several boxes of a tensor all but the first have a number behind their name.
        name = slot.name if slot.name in known else slot.name.rpartition("~")[0]
        stored.append(Stored(name, slot, _box(begins[slot.name], slot.shape)))
    return BoxFile(found.path, path, record.size, digests, header, stored)


def cut(
    found: Checkpoint, path: str, digests: Sequence[bytes], header: memoryview, slots: Iterable[Slot]
) -> BoxFile:
    """Return some whole tensors of a file as boxes."""
    stored = [Stored(slot.name, slot, _box((0,) * len(slot.shape), slot.shape)) for slot in slots]
    return BoxFile(found.path, path, found.about.files[path].size, digests, header, stored)


def _box(begin: Sequence[int], shape: Sequence[int]) -> Box:
    return Box(tuple(begin), tuple(shape), (0,) * len(shape))


class Wanted:
    """A tensor to be read: its boxes in this process, and what was found of them."""

    def __init__(self, name: str, tensor: Tensor, *, is_live: bool) -> None:
        self.name = name
        self.tensor = tensor
        self.is_live = is_live
        """Whether it has its old values until everything is verified."""
        self.boxes = held(name, tensor)
        self.local = sharded_tensor.local(tensor).detach()
        self.kept: list[tuple[Box, Tensor]] = []
        """What was read already, and waits for its place in the local tensor."""
        self._found: list[list[Box]] = [[] for _ in self.boxes]
        self._stored: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        self._lacks = sum(math.prod(box.shape) for box in self.boxes)

    def is_covered(self) -> bool:
        """Whether as many elements were found as it has."""
        return self._lacks <= 0

    def pieces(self, stored: Stored) -> Iterator[Piece]:
        """Yield what a box in a file has of it, unless another file has the same box."""
        if stored.slot.dtype != self.tensor.dtype or len(stored.slot.shape) != self.tensor.dim():
            raise ValueError(f"{self.name} is {stored.slot.dtype}[{list(stored.slot.shape)}] in its file")
        if stored.box[:2] in self._stored:
            # Each disk of the processes that saved has what they need.
            return
        self._stored.add(stored.box[:2])
        for mine, found in zip(self.boxes, self._found, strict=True):
            if (common := stored.box.common(mine)) is None:
                continue
            found.append(common)
            self._lacks -= math.prod(common.shape)
            at = tuple(p + f - m for p, f, m in zip(mine.at, common.begin, mine.begin, strict=True))
            yield Piece(self, stored.slot, common, at)

    @torch.no_grad()
    def put_in(self, local: Tensor) -> None:
        """Copy what was kept into a local tensor of this one's layout."""
        for box, content in self.kept:
            box.of_local(local).copy_(content)
        self.kept = []

    def refuse_gap(self) -> None:
        """Raise ValueError unless each element was found, once."""
        for mine, found in zip(self.boxes, self._found, strict=True):
            if len(found) == 1 and found[0].shape == mine.shape:
                continue
            begins = [[f - m for f, m in zip(one.begin, mine.begin, strict=True)] for one in found]
            rows = [[*begin, *one.shape] for begin, one in zip(begins, found, strict=True)]
            boxes = np.array(rows, dtype=np.int64).reshape(len(rows), 2 * len(mine.shape))
            if math.prod(mine.shape) and (problem := box_writers.cover_problem(mine.shape, boxes)):
                raise ValueError(f"the parts of {self.name} in its files {problem}")


class Piece(NamedTuple):
    """What a box in a file and a box of this process have in common."""

    wanted: Wanted
    slot: Slot
    common: Box
    """`at` is its place in the file's box."""
    at: tuple[int, ...]
    """Its place in the local tensor."""

    def place(self) -> Box:
        """Return its place in the local tensor."""
        return self.common._replace(at=self.at)

    def target(self) -> Tensor:
        """Return its elements as a view of the local tensor."""
        return self.place().of_local(self.wanted.local)

    def span(self) -> tuple[int, int]:
        """Return its first element in the file's box, and the end of its last one."""
        steps = strides(self.slot.shape)
        first = sum(at * step for at, step in zip(self.common.at, steps, strict=True))
        last = sum((length - 1) * step for length, step in zip(self.common.shape, steps, strict=True))
        return first, first + last + 1

    def is_in_one_row(self) -> bool:
        """Whether its elements follow each other in the file."""
        first, end = self.span()
        return end - first == math.prod(self.common.shape)


def strides(shape: Sequence[int]) -> list[int]:
    """Return the strides of a tensor in row-major order.

    >>> strides((2, 3, 4))
    [12, 4, 1]
    """
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


@dataclass(slots=True)
class _Row:
    """Bytes of a file that are read together, and the pieces that are in them."""

    begin: int
    end: int
    pieces: Sequence[Piece]
    memory: memoryview | None = None
    keeps: bool = False
    """Whether it must not be put in yet."""
    targets: list[Target] = field(default_factory=list)

    def prepare(self, reads: bool, keeps: bool) -> None:
        flat = None if keeps and not reads else _direct(self.pieces)
        self.keeps = not reads and flat is None
        if flat is not None and not reads:
            self.targets = [Target(self.begin, self.end, None)]
        elif flat is None:
            self.memory = memoryview(bytearray(self.end - self.begin))
            self.targets = [Target(self.begin, self.end, self.memory)]
        elif flat.is_cpu:
            array: Any = flat.numpy()
            self.targets = [Target(self.begin, self.end, memoryview(array))]
        else:
            self.targets = [Target(self.begin, self.end, None, partial(send, flat))]

    @torch.no_grad()
    def put_in(self) -> None:
        if self.memory is None:
            return
        raw = torch.frombuffer(self.memory, dtype=torch.uint8)
        dtype, shape = self.pieces[0].slot.dtype, self.pieces[0].slot.shape
        tensor_file.refuse_no_booleans(raw, dtype)
        row, start = tensor_file.viewed(raw, dtype), self.pieces[0].span()[0]
        for piece in self.pieces:
            first, _ = piece.span()
            view = row.as_strided(piece.common.shape, strides(shape), first - start)
            if self.keeps:
                is_all = view.numel() == row.numel()
                piece.wanted.kept.append((piece.place(), view if is_all else view.clone()))
            else:
                piece.target().copy_(view)


def _direct(pieces: Sequence[Piece]) -> Tensor | None:
    """Return the memory that a row can be read into as it is; None if it has to be put in order first."""
    (piece, *more) = pieces
    target = piece.target()
    is_simple = not more and piece.is_in_one_row() and target.is_contiguous() and target.dtype != torch.bool
    if not is_simple or target.device.type not in ("cpu", "cuda"):
        return None
    return target.view(-1).view(torch.uint8)


def _rows(pieces: Sequence[Piece]) -> Iterator[_Row]:
    for _, same in groupby(sorted(pieces, key=attrgetter("slot.begin", "common.at")), attrgetter("slot")):
        of_slot = [*same]
        together = [of_slot]
        if all(piece.is_in_one_row() for piece in of_slot):
            together = [[piece] for piece in of_slot]
        for some in together:
            spans, slot = [piece.span() for piece in some], some[0].slot
            width = slot.dtype.itemsize
            first, end = min(begin for begin, _ in spans), max(end for _, end in spans)
            some.sort(key=Piece.span)
            yield _Row(slot.begin + first * width, slot.begin + end * width, some)


def read(
    file: BoxFile, pieces: Sequence[Piece], *, reads: Callable[[Piece], bool], keeps: bool = False
) -> list[Piece]:
    """Verify the blocks of a file that some pieces are in, and read those that are to be read.

    Of the others return those that can be read into their place later, unless all are to be kept. What
    cannot is kept until then: to read all bytes around it again would take too long.
    """
    again = memoryview(bytearray(len(file.header)))
    waiting, size = [Target(0, len(again), again)], 0
    some: list[_Row] = []
    left: list[Piece] = []
    for row in sorted(_rows(pieces), key=attrgetter("begin")):
        is_read = reads(row.pieces[0])
        row.prepare(is_read, keeps)
        left += [] if is_read or row.keeps else row.pieces
        size += row.memory.nbytes if row.memory else 0
        some.append(row)
        waiting += row.targets
        if size > _AT_A_TIME:
            _scan(file, some, waiting)
            some, waiting, size = [], [], 0
    _scan(file, some, waiting)
    if again != file.header:
        raise disk.damaged(file.folder, f"{file.path} has changed while it was read")
    return left


def _scan(file: BoxFile, rows: Sequence[_Row], targets: Sequence[Target]) -> None:
    if not targets:
        return
    devices = {p.wanted.local.device for row in rows for p in row.pieces if p.wanted.local.is_cuda}
    on_lanes(
        devices,
        lambda lane: file_reader.scan_again(file.folder, file.path, file.size, file.digests, targets, lane),
    )
    for row in rows:
        row.put_in()
        row.memory = None


def take(data: memoryview, pieces: Sequence[Piece]) -> None:
    """Take pieces from the content of their file."""
    for piece in pieces:
        slot = piece.slot
        (whole,) = tensor_file.from_row(data[slot.begin : slot.end], [slot])
        with torch.no_grad():
            piece.target().copy_(piece.common.of_local(whole))


def fresh_like(tensor: Any, dtype: torch.dtype) -> Tensor:
    """Return a sharded tensor with memory of its own, placed as another one."""
    from torch.distributed.tensor import DTensor

    local = torch.empty_like(sharded_tensor.local(tensor), dtype=dtype, requires_grad=False)
    made: Tensor = DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    return made
