"""What a checkpoint holds, read as safely as a load reads it, but without torch."""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import xxhash

from ..errors import CheckpointDamaged
from ..files import disk, large_files, safetensors_header
from ..files.large_files import Lane, Target
from ..files.safetensors_header import Entry
from ..files.strict_json import Json, parse, typed
from ..progress import Told
from ..run import manifest
from ..run.checkpoint import RANKS, Checkpoint
from . import magnitudes
from .magnitudes import Size

_DTYPES = {
    **{"BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32"},
    **{"U32": "uint32", "I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16"},
    **{"F32": "float32", "F64": "float64", "C64": "complex64", "F8_E4M3": "float8_e4m3fn"},
    **{"F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"},
    "F8_E8M0": "float8_e8m0fnu",
}
"""What torch calls the dtypes of a safetensors file."""

Tree = Mapping[str, Json]
Key = tuple[str, str]
"""Which tensor of a training it is: the stem of its file, and its name."""

_FROZEN = "-frozen"
_DEEPEST = 200
"""A value of 64 containers in each other is twice as many lists and objects, and the trees are some more."""
_LONGEST_STATE = 1 << 20
"""Of so many bytes can the state of a random generator be that is told by a digest."""


class Tensor(NamedTuple):
    """One tensor of a checkpoint, and where it lies."""

    file: str
    name: str
    part: str
    """The part that it belongs to; empty where no tree names it."""
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def key(self) -> Key:
        """Which tensor it is, also where it was frozen since and lies in another file."""
        return stem_of(self.file), self.name

    @property
    def values(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """How many bytes it has."""
        return self.end - self.begin

    @property
    def width(self) -> int:
        """How many bytes one of its numbers has."""
        return self.size // self.values if self.values else 1


class Place(NamedTuple):
    """Where a plain value stands: in the tree of which file, in which part, and its path, which begins so."""

    stem: str
    part: str
    path: str


@dataclass(frozen=True, slots=True)
class Contents:
    """The trees of a checkpoint, and the tensors in its files."""

    found: Checkpoint
    trees: Mapping[str, Tree]
    """By the stem of the file that has the tensors ("model", "ranks/00000"), the parts by their names."""
    tensors: Sequence[Tensor]
    heads: Mapping[str, memoryview]

    def ranks(self) -> list[str]:
        """Return the stems of what differs by process, rank 0 first."""
        return sorted(stem for stem in self.trees if stem.startswith(RANKS))

    def leaves(self) -> dict[Place, Json]:
        """Return the plain values of all trees."""
        with reading(self.found, "the plain values"):
            return {
                Place(stem, part, path): value
                for stem, tree in self.trees.items()
                for part, values in tree.items()
                for path, value in leaves(values, part)
            }


def stem_of(file: str) -> str:
    """Return what a file is called without its suffixes: what is frozen belongs to the same tree.

    >>> stem_of("model-frozen.safetensors"), stem_of("ranks/00000.json")
    ('model', 'ranks/00000')
    """
    return file.rpartition(".")[0].removesuffix(_FROZEN)


def read(found: Checkpoint) -> Contents:
    """Return what a checkpoint holds. Of the files with tensors only the heads are read, not verified yet."""
    trees: dict[str, Tree] = {}
    heads: dict[str, memoryview] = {}
    with reading(found, manifest.NAME):
        _refuse_depth([found.about.built, found.about.environment, found.about.parts])
    for file in found.about.files:
        with reading(found, file):
            if file.endswith(".safetensors"):
                heads[file] = _head(found, file)
                continue
            whole = typed(dict, parse(found.read_file(file)))
            _refuse_depth(whole)
            trees |= {stem_of(file): whole} if file.startswith(RANKS) else _by_stem(whole)
    tensors: list[Tensor] = []
    for file, head in heads.items():
        with reading(found, file):
            entries = safetensors_header.entries_of(head, found.about.files[file].size)
            tensors += _tensors(file, entries, trees.get(stem_of(file), {}))
            if twice := len(tensors) - len({tensor.key for tensor in tensors}):
                raise ValueError(f"{twice} of its tensors are in another file, too")
    return Contents(found, trees, tensors, heads)


def _by_stem(whole: Tree) -> dict[str, Tree]:
    return {stem: typed(dict, tree) for stem, tree in whole.items()}


def _refuse_depth(whole: Json) -> None:
    # Before all that calls itself: Python gives up at some depth, with an error that names no file.
    waiting = [whole]
    for _ in range(_DEEPEST):
        inner = (one.values() if isinstance(one, dict) else one for one in waiting)
        waiting = [item for items in inner for item in items if isinstance(item, (list, dict))]
    if waiting:
        raise ValueError(f"it is nested more than {_DEEPEST} deep")


def _head(found: Checkpoint, file: str) -> memoryview:
    size = found.about.files[file].size
    start = large_files.read_start(found.path, file, size, 8)
    return large_files.read_start(found.path, file, size, safetensors_header.header_size(start, size))


@contextlib.contextmanager
def reading(found: Checkpoint, file: str) -> Iterator[None]:
    """Name the checkpoint and the file where what is read in the body is no such thing."""
    try:
        yield
    except CheckpointDamaged:
        raise
    except ValueError as exc:
        raise disk.damaged(found.path, f"{file}: {exc}") from exc


def _tensors(file: str, entries: Sequence[Entry], tree: Tree) -> Iterator[Tensor]:
    named = {one.name: (part, one) for part, value in tree.items() for one in _stored(value)}
    for name, code, shape, begin, end in entries:
        part, stored = named.get(name, ("", _Stored(name)))
        dtype = stored.dtype or _DTYPES[code]
        if stored.dtype:
            # (stored as its bytes)
            shape = shape[:-1] if stored.shape is None else stored.shape
        width = magnitudes.width(dtype) if stored.dtype else None
        if width is not None and math.prod(shape) * width != end - begin:
            raise ValueError(f"{name} is no {dtype} of shape {list(shape)}")
        yield Tensor(file, name, part, dtype, shape, begin, end)


class _Stored(NamedTuple):
    name: str
    dtype: str | None = None
    shape: tuple[int, ...] | None = None


def _stored(tree: Json) -> Iterator[_Stored]:
    """Yield the tensors that a tree names, with the dtypes and shapes of those that are stored as bytes."""
    # Not by calling itself: a tree can be nested as deeply as its maker liked.
    waiting = [tree]
    while waiting:
        item = waiting.pop()
        match item:
            case {"$tensor": str(name)}:
                yield _Stored(name)
            case {"$tensor": [str(name), dict(about)]}:
                yield _Stored(name, typed(str, about["dtype"]) if "dtype" in about else None)
            case {"$ndarray": [str(name), str(dtype), list(shape), _]}:
                yield _Stored(name, dtype, tuple(typed(int, length) for length in shape))
            case list():
                waiting += item
            case dict():
                waiting += item.values()


def scan(
    contents: Contents,
    file: str,
    take: Callable[[Tensor, int, memoryview], None],
    told: Told | None = None,
    whole: Collection[Key] = (),
) -> None:
    """Read a file with tensors, verified, and give their bytes to `take`: which tensor, from where on.

    Several threads do so, and never with a part of an element; those that are to be `whole` come at once.
    """
    found, head = contents.found, contents.heads[file]
    again = memoryview(bytearray(len(head)))
    note: Callable[[int], object] = told or _to_nobody
    apart: list[tuple[Tensor, memoryview]] = []
    targets = [Target(0, len(head), again, partial(_take, None, note))]
    for tensor in contents.tensors:
        if tensor.file != file or not tensor.size:
            continue
        memory = None
        if tensor.key in whole or not _comes_in_elements(tensor):
            memory = memoryview(bytearray(tensor.size))
            apart.append((tensor, memory))
        pass_on = partial(_take, None if memory else partial(take, tensor), note)
        targets.append(Target(tensor.begin, tensor.end, memory, pass_on))
    with reading(found, file):
        large_files.scan(found.path, file, *found.about.files[file], targets)
        if again != head:
            raise disk.damaged(found.path, f"{file} has changed while it was read")
        for tensor, memory in apart:
            take(tensor, 0, memory)


def _take(
    take: Callable[[int, memoryview], None] | None, note: Told, lane: Lane, at: int, piece: memoryview
) -> None:
    if take:
        take(at, piece)
    note(piece.nbytes)


def _comes_in_elements(tensor: Tensor) -> bool:
    # A file is read in pieces and blocks whose lengths are powers of two.
    return tensor.width in (1, 2, 4, 8, 16) and tensor.begin % tensor.width == 0


def _to_nobody(size: int) -> None:
    """Where nobody wants to know."""


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

    def take(tensor: Tensor, at: int, piece: memoryview) -> None:
        size = magnitudes.size_of(piece, tensor.dtype, tensor.width)
        with guard:
            sizes[tensor.key].add(size)
            if tensor.key in small:
                states[tensor.key] = xxhash.xxh3_64_hexdigest(piece)

    small = {
        tensor.key
        for tensor in contents.tensors
        if tensor.size <= _LONGEST_STATE and _is_state(contents, tensor)
    }
    for file in contents.heads:
        scan(contents, file, take, told, small)
    return Measured(sizes, states)


def _is_state(contents: Contents, tensor: Tensor) -> bool:
    kind = contents.found.about.parts.get(tensor.part, {}).get("kind")
    return kind in ("random", "generator")


class Generator(NamedTuple):
    """The state of one random generator, in short."""

    rank: int | None
    """Of which process; None where all have the same."""
    name: str
    kind: str
    state: str
    """A digest: two are equal where their states are."""


def generators(contents: Contents, measured: Measured) -> list[Generator]:
    """Return the random generators that a checkpoint holds."""
    kinds = {name: about.get("kind") for name, about in contents.found.about.parts.items()}
    found = []
    for stem, tree in contents.trees.items():
        rank = int(stem.removeprefix(RANKS)) if stem.startswith(RANKS) else None
        for part, value in tree.items():
            each = value if kinds.get(part) == "random" and isinstance(value, dict) else {"": value}
            for name, state in each.items() if kinds.get(part) in ("random", "generator") else ():
                text = [json.dumps(state, sort_keys=True)]
                text += [measured.states.get((stem, one.name), "") for one in _stored(state)]
                digest = xxhash.xxh3_64_hexdigest("".join(text).encode())[:8]
                found.append(Generator(rank, name or part, _algorithm(name, state), digest))
    return found


def _algorithm(name: str, state: Json) -> str:
    match state:
        case {"bit_generator": str(kind)}:
            return kind
        case {"words": _}:
            return "MT19937"
        case list():
            return f"{len(state)} devices" if len(state) != 1 else "1 device"
        case _:
            return "torch"


def leaves(tree: Json, path: str = "") -> Iterator[tuple[str, Json]]:
    """Yield the plain values of a tree by their paths, and no tensors; ValueError where it is no tree.

    >>> [*leaves({"groups": [{"lr": 0.1, "betas": {"$tuple": [0.9, 0.99]}}], "exp": {"$tensor": "w"}})]
    [('groups.0.lr', 0.1), ('groups.0.betas', {'$tuple': [0.9, 0.99]})]
    """
    inside: Iterable[tuple[str, Json]] = ()
    match tree:
        case {"$tensor": _} | {"$ndarray": _}:
            return
        case {"$dict": list(pairs)} | {"$OrderedDict": list(pairs)} | {"$Counter": list(pairs)}:
            inside = _pairs(pairs)
        case {"$defaultdict": [_, list(pairs)]}:
            inside = _pairs(pairs)
        case {"$tuple": list(items)} | {"$deque": [_, list(items)]} if not _is_flat(items):
            inside = ((str(i), item) for i, item in enumerate(items))
        case list() if not _is_flat(tree):
            inside = ((str(i), item) for i, item in enumerate(tree))
        case dict() if tree and not any(key.startswith("$") for key in tree):
            inside = tree.items()
        case _:
            yield path, tree
    for key, value in inside:
        yield from leaves(value, f"{path}.{key}" if path else key)


def _pairs(pairs: Sequence[Json]) -> Iterator[tuple[str, Json]]:
    for pair in pairs:
        key, value = typed(list, pair)
        yield key if isinstance(key, str) else described(key), value


def _is_flat(items: Sequence[Json]) -> bool:
    return not any(isinstance(item, (list, dict)) and not _is_number(item) for item in items)


def _is_number(item: Json) -> bool:
    return isinstance(item, dict) and item.keys() <= {"$float", "$int"}


def described(value: Json) -> str:
    """Return a plain value of a tree as Python would write it.

    >>> described({"$tuple": [0.9, {"$float": "inf"}]}), described("x"), described(None)
    ('(0.9, inf)', "'x'", 'None')
    """
    match value:
        case {"$tuple": list(items)}:
            inside = ", ".join(map(described, items))
            return f"({inside},)" if len(items) == 1 else f"({inside})"
        case {"$set": list(items)} | {"$frozenset": list(items)} if items:
            return f"{{{', '.join(map(described, items))}}}"
        case list():
            return f"[{', '.join(map(described, value))}]"
        case {"$float": str(text)} | {"$Boundary": str(text)} | {"$torch.dtype": str(text)}:
            return text
        case {"$int": str(text)}:
            return text
        case dict():
            return json.dumps(value)
        case _:
            return repr(value)
