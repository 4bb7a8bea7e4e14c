"""Reads the content of a checkpoint, its trees and tensors, verified as in a load."""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import xxhash

from ..errors import CheckpointDamaged
from ..files import codec, disk, file_reader, safetensors_header, tensor_file
from ..files.file_reader import Lane, Target
from ..files.strict_json import Json, parse, typed
from ..files.tensor_file import Slot
from ..progress import Told
from ..run import manifest
from ..run.checkpoint import RANKS, Checkpoint
from . import magnitudes, variables
from .magnitudes import Size
from .trees import Stored, leaves, refuse_depth, stored

Tree = Mapping[str, Json]
Key = tuple[str, str]
"""A tensor of a training: the stem of its file, and its name."""

_FROZEN = "-frozen"
_LONGEST_STATE = 1 << 20
"""The largest state of a random generator, in bytes, that is shown as a digest."""
RANDOM = ("random", "generator")
"""The kinds of parts that hold random generators."""

PLACE = "position"
"""The kind of parts that hold the place in the data."""


class Span(NamedTuple):
    """Bytes of a tensor in a file: all of it, or a box if it was sharded."""

    file: str
    begin: int
    end: int
    at: tuple[int, ...]
    """Where the box begins in the tensor."""
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.end - self.begin


class Tensor(NamedTuple):
    """A tensor of a checkpoint, and where it lies."""

    stem: str
    name: str
    part: str
    """The part that it belongs to; empty if no tree names it."""
    dtype: str
    shape: tuple[int, ...]
    spans: tuple[Span, ...]

    @property
    def key(self) -> Key:
        """The same in two checkpoints, even if it was frozen in between and lies in another file."""
        return self.stem, self.name

    @property
    def file(self) -> str:
        """The file that it is in; the folder if it was sharded into several."""
        files = {span.file for span in self.spans}
        return self.spans[0].file if len(files) == 1 else f"{self.stem}/"

    @property
    def values(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Its bytes."""
        return sum([span.size for span in self.spans])

    @property
    def width(self) -> int:
        """The bytes of one element."""
        return self.size // self.values if self.values else 1


class Place(NamedTuple):
    """Where a plain value stands: the stem of its tree's file, its part, and its path from there."""

    stem: str
    part: str
    path: str


@dataclass(frozen=True, slots=True)
class Contents:
    """The trees of a checkpoint, and the tensors in its files."""

    found: Checkpoint
    trees: Mapping[str, Tree]
    """The parts by name, by the stem of the file that has their tensors ("model", "ranks/00000")."""
    tensors: Sequence[Tensor]
    heads: Mapping[str, memoryview]
    """The header of each file with tensors, not verified yet."""

    def ranks(self) -> list[str]:
        """Return the stems of what differs by process, rank 0 first."""
        return sorted(stem for stem in self.trees if stem.startswith(RANKS))

    def kind_of(self, part: str) -> Json:
        """Return the kind of a part."""
        return self.found.about.parts.get(part, {}).get("kind")

    def leaves(self) -> dict[Place, Json]:
        """Return the plain values of all trees."""
        with reading(self.found, "the plain values"):
            return {
                Place(stem, part, path): value
                for stem, tree in self.trees.items()
                for part, values in tree.items()
                for path, value in (
                    variables.leaves(values) if part == variables.PART else leaves(values, part)
                )
            }


def stem_of(file: str) -> str:
    """Return the name of a file without its suffixes: frozen tensors belong to the same tree.

    >>> stem_of("model-frozen.safetensors"), stem_of("ranks/00000.json")
    ('model', 'ranks/00000')
    """
    return (
        codec.stem_of(file)
        if codec.shard_of(file) is not None
        else file.rpartition(".")[0].removesuffix(_FROZEN)
    )


def read(found: Checkpoint) -> Contents:
    """Return what a checkpoint holds; of the files with tensors only the headers are read, unverified."""
    found.refuse_part()
    trees: dict[str, Tree] = {}
    heads: dict[str, memoryview] = {}
    states: dict[str, Tree] = {}
    with reading(found, manifest.NAME):
        refuse_depth([found.about.built, found.about.environment, found.about.parts])
    for file in found.about.files:
        with reading(found, file):
            if codec.is_tensor_file(file):
                heads[file] = found.read_header(file)
                continue
            whole = typed(dict, parse(found.read_file(file)))
            refuse_depth(whole)
            if codec.has_trees(file):
                states[file] = whole
            else:
                trees[stem_of(file)] = whole
    with reading(found, "the plain values"):
        trees |= codec.joined(states)
    tensors: dict[Key, Tensor] = {}
    for file, head in heads.items():
        with reading(found, file):
            slots = tensor_file.read_header(head, found.about.files[file].size)
            begins = None if codec.shard_of(file) is None else safetensors_header.begins_of(head, slots)
            for tensor in _tensors(file, slots, trees.get(stem_of(file), {}), begins):
                there = tensors.get(tensor.key)
                if there and (begins is None or (there.dtype, there.shape) != (tensor.dtype, tensor.shape)):
                    raise ValueError(f"its {tensor.name} is in another file, too")
                tensors[tensor.key] = _joined(there, tensor) if there else tensor
    for tensor in tensors.values():
        if sum(math.prod(span.shape) for span in tensor.spans) != tensor.values:
            raise disk.damaged(found.path, f"its files hold not all of {tensor.name}, or some of it twice")
    return Contents(found, trees, [*tensors.values()], heads)


def _joined(one: Tensor, other: Tensor) -> Tensor:
    there = {(span.at, span.shape) for span in one.spans}
    # Each disk of the processes that saved has what they need.
    more = tuple(span for span in other.spans if (span.at, span.shape) not in there)
    return one._replace(spans=one.spans + more)


@contextlib.contextmanager
def reading(found: Checkpoint, file: str) -> Iterator[None]:
    """Name the checkpoint and the file in what goes wrong in the body."""
    try:
        yield
    except CheckpointDamaged:
        raise
    except ValueError as exc:
        raise disk.damaged(found.path, f"{file}: {exc}") from exc


def _tensors(
    file: str, slots: Sequence[Slot], tree: Tree, begins: Mapping[str, tuple[int, ...]] | None
) -> Iterator[Tensor]:
    named = {one.name: (part, one) for part, value in tree.items() for one in stored(value)}
    paths = variables.tensor_names(tree[variables.PART]) if variables.PART in tree else {}
    for slot in slots:
        name = slot.name
        if begins is not None and name not in named:
            # Of several boxes of a tensor all but the first have a number behind their name.
            name = name.rpartition("~")[0]
        part, (_, dtype, shape, whole) = named.get(name, ("", Stored(name)))
        if dtype is None:
            dtype, shape = (
                str(slot.dtype).removeprefix("torch."),
                slot.shape if begins is None else whole or slot.shape,
            )
        else:
            # Stored as its bytes.
            shape = slot.shape[:-1] if shape is None else shape
            width = magnitudes.width(dtype)
            if width is not None and math.prod(shape) * width != slot.end - slot.begin:
                raise ValueError(f"{slot.name} is no {dtype} of shape {list(shape)}")
        at = (0,) * len(shape) if begins is None else begins[slot.name]
        span = Span(file, slot.begin, slot.end, at, shape if begins is None else slot.shape)
        yield Tensor(stem_of(file), paths.get(name, name), part, dtype, shape, (span,))


def scan(
    contents: Contents,
    file: str,
    take: Callable[[Tensor, Span, int, memoryview], None],
    told: Told | None = None,
    whole: Collection[Key] = (),
) -> None:
    """Read a file with tensors, verified, and pass their bytes to `take`: of what, and from where on.

    Several threads call it, piece by piece but never with part of an element; those in `whole` come at once.
    """
    found, head = contents.found, contents.heads[file]
    again = memoryview(bytearray(len(head)))
    apart: list[tuple[Tensor, Span, memoryview]] = []
    targets = [Target(0, len(head), again, partial(_take, None, told))]
    there = [(span, tensor) for tensor in contents.tensors for span in tensor.spans if span.file == file]
    for span, tensor in sorted(there, key=lambda pair: pair[0].begin):
        if not span.size:
            continue
        memory = None
        if tensor.key in whole or not _comes_in_elements(tensor, span):
            memory = memoryview(bytearray(span.size))
            apart.append((tensor, span, memory))
        pass_on = partial(_take, None if memory else partial(take, tensor, span), told)
        targets.append(Target(span.begin, span.end, memory, pass_on))
    size, digest, _ = found.about.files[file]
    with reading(found, file):
        file_reader.scan(found.path, file, size, digest, targets)
        if again != head:
            raise disk.damaged(found.path, f"{file} has changed while it was read")
        for tensor, span, memory in apart:
            take(tensor, span, 0, memory)


def whole(contents: Contents, tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order; its files have been verified."""
    found = np.empty((*tensor.shape, tensor.width), np.uint8)
    for span in tensor.spans:
        with disk.opened(contents.found.path, span.file) as opened:
            piece = file_reader.read_range(opened.fileno(), span.begin, span.end)
        place = tuple(slice(at, at + size) for at, size in zip(span.at, span.shape, strict=True))
        found[place] = np.frombuffer(piece, np.uint8).reshape(*span.shape, tensor.width)
    raw: Any = found.reshape(-1)
    return memoryview(raw)


def _take(
    take: Callable[[int, memoryview], None] | None, told: Told | None, lane: Lane, at: int, piece: memoryview
) -> None:
    if take:
        take(at, piece)
    if told:
        told(piece.nbytes)


def _comes_in_elements(tensor: Tensor, span: Span) -> bool:
    # A file is read in pieces and blocks whose lengths are powers of two.
    return tensor.width in (1, 2, 4, 8, 16) and span.begin % tensor.width == 0


@dataclass(frozen=True, slots=True)
class Measured:
    """How large the tensors are, and the states of random generators as digests."""

    sizes: Mapping[Key, Size]
    states: Mapping[Key, str]


def measure(contents: Contents, told: Told | None = None) -> Measured:
    """Read all tensors of a checkpoint, verified, and return how large they are."""
    sizes = {tensor.key: Size(is_known=magnitudes.is_number(tensor.dtype)) for tensor in contents.tensors}
    states: dict[Key, str] = {}
    guard = threading.Lock()

    def take(tensor: Tensor, span: Span, at: int, piece: memoryview) -> None:
        size = magnitudes.size_of(piece, tensor.dtype, tensor.width)
        with guard:
            sizes[tensor.key].add(size)
            if tensor.key in small:
                states[tensor.key] = xxhash.xxh3_64_hexdigest(piece)

    small = {
        tensor.key
        for tensor in contents.tensors
        if tensor.size <= _LONGEST_STATE and contents.kind_of(tensor.part) in RANDOM
    }
    for file in contents.heads:
        scan(contents, file, take, told, small)
    return Measured(sizes, states)


def generators(contents: Contents, measured: Measured) -> Iterator[dict[str, Json]]:
    """Yield the random generators in a checkpoint: equal states have equal digests.

    The rank is that of the process that has it; None if all have the same.
    """
    for stem, tree in contents.trees.items():
        rank = int(stem.removeprefix(RANKS)) if stem.startswith(RANKS) else None
        for part, value in tree.items():
            if (kind := contents.kind_of(part)) in RANDOM:
                each = value if kind == "random" and isinstance(value, dict) else {part: value}
                for name, state in each.items():
                    text = [json.dumps(state, sort_keys=True)]
                    text += [measured.states.get((stem, one.name), "") for one in stored(state)]
                    digest = xxhash.xxh3_64_hexdigest("".join(text).encode())[:8]
                    yield {"rank": rank, "name": name, "kind": _algorithm(state), "state": digest}


def _algorithm(state: Json) -> str:
    match state:
        case {"bit_generator": str(kind)}:
            return kind
        case {"words": _}:
            return "MT19937"
        case list():
            return f"{len(state)} devices" if len(state) != 1 else "1 device"
        case _:
            return "torch"
