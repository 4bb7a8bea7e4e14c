"""A tree of tensors and plain values, to files and back.

Plain values become JSON. A type that JSON lacks becomes an object with one key that begins
with "$", as in `{"$tuple": [1, 2]}`. Tensors go into a safetensors file, and the JSON
refers to them by name. Reading imports nothing and calls nothing by name.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from ..boundary import Boundary
from ..errors import CannotStore
from .strict_json import LONGEST, MOST, Json, is_more_than, parse, typed
from .tensor_file import DTYPES, as_bytes, from_safetensors, to_safetensors, viewed

Path = tuple[str, ...]
Place = Callable[[Path, str], torch.device]
"""Returns the device of a tensor, given its path in the tree and the device that it was saved on."""

_DTYPES_BY_NAME = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
_FACTORIES: dict[str, Any] = {
    "None": None,
    **{kind.__name__: kind for kind in (bool, int, float, str, list, dict, set, tuple)},
}
_NUMPY_DTYPE = re.compile(r"[<>|][biufcSUmM][1-9][0-9]*(\[[0-9a-zA-Z]+\])?")
_SURROGATE = re.compile("[\ud800-\udfff]")
_DEEPEST = 64


@dataclass(slots=True)
class Encoded:
    """A tree as JSON, and the live tensors that it names."""

    json: Json
    tensors: dict[str, torch.Tensor]
    aliases: dict[str, str]
    """Tied tensors: the name each would have had, and the name of the one that is stored."""
    key: tuple[Any, ...] = ()
    """Equal for two encodings only if their tensors have the same names, dtypes, shapes and devices."""
    frozen: frozenset[str] = frozenset()
    """The tensors that are not trained, which are in a file of their own."""
    kept: frozenset[str] = frozenset()
    """The tensors that may be used without a copy: live ones, or not referred to from elsewhere."""
    moved: Mapping[str, str] = field(default_factory=dict)
    """The device of this process for each device of the process that saved."""


Memo = dict[Path, "_Group"]
"""Groups of the last encoding of a tree, by path; an encoding reads and updates them."""


def encode(tree: Any, name: Callable[[Path], str] = ".".join, memo: Memo | None = None) -> Encoded:
    """Return the tree as JSON and tensors; `name` makes a tensor's name in the file from its path.

    >>> encode({"lr": 0.1, "betas": (0.9, float("inf"))}).json
    {'lr': 0.1, 'betas': {'$tuple': [0.9, {'$float': 'inf'}]}}
    """
    encoder = _Encoder(name, memo)
    try:
        json = encoder.encode(tree, ())
    except _MemoStale:
        assert memo is not None
        memo.clear()
        # Without the memo: two dicts can have the same path, and would get each other's group again.
        encoder = _Encoder(name, None)
        json = encoder.encode(tree, ())
    return Encoded(json, encoder.tensors, encoder.aliases, tuple(encoder.key))


class _MemoStale(Exception):
    """A tensor shares its memory or its name with one of a group that was taken from the memo."""


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """An encoded dict of tensors, reused until one of them moves.

    Encoding ten thousand tensors one by one would delay the training by a tenth of a second.
    """

    facts: tuple[list[Any], ...]
    json: dict[str, Json]
    stored: dict[str, str]
    """The key in the dict, by the name in the file."""
    aliases: dict[str, str]
    places: frozenset[int]


def _facts(values: Mapping[str, torch.Tensor]) -> tuple[list[Any], ...] | None:
    """Return everything that the encoding of plain tensors depends on, one call for all of them."""
    tensors = values.values()
    if not values or not {*map(type, tensors)} <= _PLAIN:
        return None
    dtypes = [tensor.dtype for tensor in tensors]
    if any(dtype.is_complex for dtype in {*dtypes}) or any(map(torch.Tensor.is_neg, tensors)):
        return None
    try:
        methods = (torch.Tensor.data_ptr, torch.Tensor.size, torch.Tensor.stride)
        places, *shapes = ([*map(method, tensors)] for method in methods)
        # A tensor without bytes has no address, which otherwise identifies the device.
        devices = [tensor.device for tensor in tensors] if 0 in places else []
        return [*values], dtypes, places, *shapes, devices
    except RuntimeError:
        # Sparse and nested tensors have no address.
        return None


_PLAIN = {torch.Tensor, torch.nn.Parameter}


class _Encoder:
    def __init__(self, name: Callable[[Path], str], memo: Memo | None) -> None:
        self._name = name
        self._memo = memo
        self._seen: dict[Any, str] = {}
        self._places: set[int] = set()
        self._places_in_groups: set[int] = set()
        self.tensors: dict[str, torch.Tensor] = {}
        self.aliases: dict[str, str] = {}
        self.key: list[Any] = []

    def encode(self, value: Any, path: Path) -> Json:
        # Exact types: a subclass would come back as another type.
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            # JSON reads a pair of surrogates as one character.
            return value if _is_text(value) else {"$str": value.encode("utf-8", "surrogatepass").hex()}
        if kind is int:
            # Other JSON readers round beyond 2^53; Python refuses more than 4300 digits.
            return value if abs(value) <= 2**53 else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if len(path) > _DEEPEST:
            raise _cannot(path, f"is nested more than {_DEEPEST} deep, or holds itself", "flatten it")
        if method := _ENCODERS.get(kind):
            return method(self, value, path)
        if isinstance(value, np.generic) and kind.__module__ == "numpy":
            return {"$numpy": [_numpy_dtype(value.dtype, path), value.tobytes().hex()]}
        raise _cannot(path, f"is {_described(value)}, which cannot be stored", _advice(value))

    def _each(self, values: Iterable[Any], path: Path) -> list[Json]:
        return [self.encode(value, (*path, str(i))) for i, value in enumerate(values)]

    def _pairs(self, values: Mapping[Any, Any], path: Path) -> list[Json]:
        return [
            [self.encode(key, (*path, "key")), self.encode(value, (*path, _step(key)))]
            for key, value in values.items()
        ]

    def _dict(self, values: dict[Any, Any], path: Path) -> Json:
        group = self._memo.get(path) if self._memo else None
        facts = None if self._memo is None else _facts(values)
        if group and group.facts == facts:
            return self._same_group(values, group)
        if not all(type(key) is str and not key.startswith("$") and _is_text(key) for key in values):
            return {"$dict": self._pairs(values, path)}
        if facts:
            return self._new_group(values, path, facts)
        return {key: self.encode(value, (*path, key)) for key, value in values.items()}

    def _new_group(self, values: dict[str, torch.Tensor], path: Path, facts: tuple[list[Any], ...]) -> Json:
        assert self._memo is not None
        key, tensors, aliases = len(self.key), len(self.tensors), len(self.aliases)
        json = {key: self.encode(value, (*path, key)) for key, value in values.items()}
        fresh = {*islice(reversed(self.tensors), len(self.tensors) - tensors)}
        tied = dict(islice(reversed(self.aliases.items()), len(self.aliases) - aliases))
        self._memo.pop(path, None)
        # A tensor that is tied to one elsewhere, or whose name is taken there, depends on that one.
        is_apart = fresh.issuperset(tied.values())
        if is_apart and not any(name.endswith("~") for name in (*fresh, *tied)):
            stored: dict[str, str] = {}
            for member, item in json.items():
                for name in fresh.intersection(tensor_names(item)):
                    stored.setdefault(name, member)
            places = frozenset(place for place in facts[2] if place)
            group = self._memo[path] = _Group(facts, json, stored, tied, places)
            self.key[key:] = [group]
        return json

    def _same_group(self, values: dict[str, torch.Tensor], group: _Group) -> Json:
        names = (self.tensors.keys(), self.aliases.keys())
        is_apart = all(mine.isdisjoint(theirs) for mine in names for theirs in (group.stored, group.aliases))
        if not is_apart or not all(map(group.places.isdisjoint, (self._places, self._places_in_groups))):
            raise _MemoStale
        self._places_in_groups |= group.places
        self.tensors.update(zip(group.stored, map(values.__getitem__, group.stored.values()), strict=True))
        self.aliases.update(group.aliases)
        self.key.append(group)
        return group.json

    def _defaultdict(self, values: defaultdict[Any, Any], path: Path) -> Json:
        for name, factory in _FACTORIES.items():
            if values.default_factory is factory:
                return {"$defaultdict": [name, self._pairs(values, path)]}
        raise _cannot(
            path,
            "is a defaultdict whose factory cannot be stored",
            "use int, float, list, dict or set as its factory, or a plain dict",
        )

    def _set(self, values: Iterable[Any], path: Path) -> list[Json]:
        # Sorted: the order of a set differs between processes.
        return sorted(self._each(values, path), key=json.dumps)

    def _array(self, value: np.ndarray[Any, Any], path: Path) -> Json:
        dtype = _numpy_dtype(value.dtype, path)
        order: Literal["C", "F"] = "F" if value.flags.fnc else "C"
        content = torch.from_numpy(np.frombuffer(bytearray(value.tobytes(order)), np.uint8))
        stored = self._store(content.view(_stored_as(value.dtype)), path)
        return {"$ndarray": [stored, dtype, list(value.shape), order]}

    def _tensor(self, value: torch.Tensor, path: Path) -> Json:
        if problem := _unstorable(value):
            raise _cannot(path, f"is {problem}, which cannot be stored", "store a dense tensor")
        # The tensor itself where possible: later reads fill it in place, and the training must see them.
        live = value.detach().resolve_conj().resolve_neg() if value.is_conj() or value.is_neg() else value
        # Kernels may sum in another order on another layout, so the layout is state too.
        is_laid_out = not live.is_contiguous() and _is_dense(live.shape, live.stride())
        facts = {
            "dtype": None if live.dtype in DTYPES else str(live.dtype).removeprefix("torch."),
            "stride": list(live.stride()) if is_laid_out else None,
            "device": None if live.device.type == "cpu" else str(live.device),
        }
        about = {key: fact for key, fact in facts.items() if fact is not None}
        stored = self._store(live, path)
        return {"$tensor": [stored, about] if about else stored}

    def _store(self, tensor: torch.Tensor, path: Path) -> str:
        # A surrogate cannot be encoded as UTF-8, which other tools use for names.
        name = self._name(path).encode(errors="replace").decode()
        while name in self.tensors or name in self.aliases or name == "__metadata__":
            name += "~"
        if tensor.data_ptr() in self._places_in_groups:
            raise _MemoStale
        self._places.add(tensor.data_ptr())
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        if tensor.numel() and (first := self._seen.setdefault(place, name)) != name:
            self.aliases[name] = first
            self.key.append((name, first))
            return first
        self.tensors[name] = tensor
        self.key.append((name, tensor.dtype, tensor.shape, tensor.device))
        return name


_ENCODERS: dict[type, Callable[[_Encoder, Any, Path], Json]] = {
    dict: _Encoder._dict,
    list: _Encoder._each,
    defaultdict: _Encoder._defaultdict,
    np.ndarray: _Encoder._array,
    tuple: lambda self, value, path: {"$tuple": self._each(value, path)},
    set: lambda self, value, path: {"$set": self._set(value, path)},
    frozenset: lambda self, value, path: {"$frozenset": self._set(value, path)},
    deque: lambda self, value, path: {"$deque": [value.maxlen, self._each(value, path)]},
    OrderedDict: lambda self, value, path: {"$OrderedDict": self._pairs(value, path)},
    Counter: lambda self, value, path: {"$Counter": self._pairs(value, path)},
    bytes: lambda _, value, __: {"$bytes": base64.b64encode(value).decode()},
    bytearray: lambda _, value, __: {"$bytearray": base64.b64encode(value).decode()},
    complex: lambda self, value, path: {"$complex": self._each((value.real, value.imag), path)},
    # Not str(value): numpy drops trailing zeros.
    np.str_: lambda self, value, path: {"$numpy.str_": self.encode(str.__str__(value), path)},
    np.bytes_: lambda self, value, path: {"$numpy.bytes_": self.encode(bytes(value), path)},
    Boundary: lambda _, value, __: {"$Boundary": value.value},
    torch.Size: lambda _, value, __: {"$torch.Size": list(value)},
    torch.dtype: lambda _, value, __: {"$torch.dtype": str(value).removeprefix("torch.")},
    torch.device: lambda _, value, __: {"$torch.device": str(value)},
}


def _is_text(value: str) -> bool:
    return value.isascii() or not _SURROGATE.search(value)


def _step(key: Any) -> str:
    try:
        return str(key)
    except ValueError:
        # Python refuses to print an int of more than 4300 digits.
        return "number"


def _stored_as(dtype: np.dtype[Any]) -> torch.dtype:
    # Uninitialized memory holds any byte; a safetensors file has only real booleans.
    return torch.bool if dtype.kind == "b" else torch.uint8


def _numpy_dtype(dtype: np.dtype[Any], path: Path) -> str:
    if not _NUMPY_DTYPE.fullmatch(dtype.str):
        raise _cannot(path, f"has the numpy dtype {dtype}, which cannot be stored", "convert it")
    text: str = dtype.str
    return text


def _unstorable(value: torch.Tensor) -> str | None:
    if torch.nn.parameter.is_lazy(value):
        return "a parameter that has no shape yet (run one batch through the model first)"
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return _described(value)
    if value.layout != torch.strided or value.is_nested or not _is_storable(value.dtype):
        return f"a tensor of layout {value.layout} and dtype {value.dtype}"
    if value.is_meta:
        return "a tensor on the meta device"
    return None


def _is_storable(dtype: torch.dtype) -> bool:
    # Other dtypes (quantized, int1 to uint7) cannot even be copied.
    return dtype in DTYPES or dtype.is_floating_point or dtype.is_complex


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    # Every element exactly once, in any order: empty_strided can make such a tensor again.
    expected = 1
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def _cannot(path: Path, problem: str, advice: str) -> CannotStore:
    return CannotStore(f"{'.'.join(path)} {problem}.", fix=f"{advice}. Nothing was written.")


def _described(value: Any) -> str:
    if callable(value) and hasattr(value, "__qualname__"):
        return f"a {'class' if isinstance(value, type) else 'function'} ({value.__qualname__})"
    return f"of type {type(value).__module__}.{type(value).__qualname__}"


def _advice(value: Any) -> str:
    if callable(value):
        return "store what it is made from (numbers, names) and make it again in the script"
    return (
        "keep plain values and tensors, or give its class `state_dict` and `load_state_dict` "
        "and pass it in extra={...}"
    )


def tensor_names(tree: Json) -> Iterator[str]:
    """Yield the names of the tensors that a tree's JSON mentions."""
    # Not recursive: JSON that was not decoded yet can be nested to any depth.
    waiting = [tree]
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            waiting += reversed(item)
        elif isinstance(item, dict):
            match item:
                case {"$tensor": about} | {"$ndarray": about}:
                    yield about if isinstance(about, str) else about[0]
                case _:
                    waiting += reversed(item.values())


def tensor_facts(tree: Json) -> dict[str, dict[str, Json]]:
    """Return the dtypes, strides and devices that a tree's JSON has for its tensors, by name."""
    found: dict[str, dict[str, Json]] = {}
    waiting = [tree]
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            waiting += item
        elif isinstance(item, dict):
            match item:
                case {"$tensor": [str(name), dict(about)]}:
                    _checked_device(about.get("device", "cpu"))
                    found[name] = about
                case _:
                    waiting += item.values()
    return found


_OF_RANK = re.compile(r"ranks/([0-9]{5})\.(?:json|safetensors)")


def _rank_path(rank: int) -> str:
    return f"ranks/{rank:05}"


def rank_of(path: str) -> int | None:
    """Return the rank that a file belongs to; None if all ranks share it."""
    found = _OF_RANK.fullmatch(path)
    return int(found[1]) if found else None


def to_texts(trees: Mapping[str, Encoded], rank: int = 0) -> dict[str, bytes]:
    """Return the JSON files of a checkpoint. The tree "rank" differs between processes."""
    shared = {stem: tree.json for stem, tree in trees.items() if stem != "rank"}
    texts = {"state.json": _text(shared)}
    if "rank" in trees:
        texts[f"{_rank_path(rank)}.json"] = _text(trees["rank"].json)
    return texts


def to_groups(trees: Mapping[str, Encoded], rank: int = 0) -> dict[str, Encoded]:
    """Return the tensors of each safetensors file; frozen ones have a file of their own, which stays."""
    groups = {}
    for stem, tree in trees.items():
        path = _rank_path(rank) if stem == "rank" else stem
        for suffix, group in _by_change(tree):
            if group.tensors:
                groups[f"{path}{suffix}.safetensors"] = group
    return groups


def _by_change(tree: Encoded) -> Iterator[tuple[str, Encoded]]:
    if not tree.frozen:
        yield "", tree
        return
    for suffix, is_frozen in (("", False), (_FROZEN, True)):
        tensors = {name: value for name, value in tree.tensors.items() if (name in tree.frozen) is is_frozen}
        aliases = {name: first for name, first in tree.aliases.items() if first in tensors}
        yield suffix, Encoded({}, tensors, aliases, (*tree.key, tree.frozen))


_FROZEN = "-frozen"


def to_files(trees: Mapping[str, Encoded]) -> dict[str, bytes | bytearray]:
    """Return the content of every file of a checkpoint."""
    groups = to_groups(trees).items()
    return {**to_texts(trees), **{path: to_safetensors(g.tensors, g.aliases) for path, g in groups}}


def from_files(files: Mapping[str, memoryview]) -> dict[str, Encoded]:
    """Return the trees that `to_files` was given; their tensors share the files' memory."""
    tensors = {path: from_safetensors(data) for path, data in files.items() if is_tensor_file(path)}
    return from_parts(to_trees({p: data for p, data in files.items() if p not in tensors}), tensors)


def is_tensor_file(path: str) -> bool:
    """Return whether a file of a checkpoint holds tensors; the others are JSON."""
    return path.endswith(".safetensors")


def is_frozen(path: str) -> bool:
    """Return whether a file of a checkpoint holds frozen tensors."""
    return path.endswith(f"{_FROZEN}.safetensors")


def to_trees(texts: Mapping[str, bytes | memoryview], rank: int = 0) -> dict[str, dict[str, Json]]:
    """Return the JSON of the trees, from the JSON files of a checkpoint."""
    if missing := {"state.json", f"{_rank_path(rank)}.json"} - texts.keys():
        raise ValueError(f"there is no {' and no '.join(sorted(missing))}")
    if unknown := texts.keys() - {"state.json", f"{_rank_path(rank)}.json"}:
        raise ValueError(f"nothing says what {', '.join(sorted(unknown))} is")
    trees = _of_file("state.json", texts)
    if "rank" in trees:
        raise ValueError("state.json holds what differs by rank")
    path = f"{_rank_path(rank)}.json"
    found = {stem: _named("state.json", partial(typed, dict, tree)) for stem, tree in trees.items()}
    return {**found, "rank": _of_file(path, texts)}


def _of_file(path: str, texts: Mapping[str, bytes | memoryview]) -> dict[str, Json]:
    return _named(path, lambda: typed(dict, parse(texts[path])))


def _named(path: str, read: Callable[[], dict[str, Json]]) -> dict[str, Json]:
    try:
        return read()
    except ValueError as exc:
        raise ValueError(f"{path}: {exc}") from exc


def from_parts(
    trees: Mapping[str, dict[str, Json]], tensors: Mapping[str, Mapping[str, torch.Tensor]]
) -> dict[str, Encoded]:
    """Return the trees of a checkpoint, from their JSON and the tensors of its other files."""
    if unknown := {path for path in tensors if stem_of(path) not in trees}:
        raise ValueError(f"nothing says what {', '.join(sorted(unknown))} is")
    return {stem: _from_parts(tensors, stem, tree) for stem, tree in trees.items()}


def stem_of(path: str) -> str:
    """Return the tree whose tensors a file holds."""
    if rank_of(path) is not None:
        return "rank"
    stem = path.removesuffix(".safetensors").removesuffix(_FROZEN)
    return "" if stem == "rank" else stem


def _from_parts(
    tensors: Mapping[str, Mapping[str, torch.Tensor]], stem: str, tree: dict[str, Json]
) -> Encoded:
    found: dict[str, torch.Tensor] = {}
    for path, there in tensors.items():
        if stem_of(path) == stem:
            if twice := found.keys() & there.keys():
                raise ValueError(f"{', '.join(sorted(twice))} is in two files")
            found |= there
    return Encoded(tree, found, {})


def _text(tree: Json) -> bytes:
    text = json.dumps(tree, allow_nan=False, separators=(",", ":"))
    # Refuse here what no load would read.
    if len(text) > LONGEST or is_more_than(MOST, text):
        raise CannotStore(
            f"the plain values of this checkpoint are {len(text):,} characters of JSON; at most {LONGEST:,} "
            f"can be read again, with at most {MOST:,} lists, dicts and keys.",
            fix="keep what is many in tensors or numpy arrays. Nothing was written.",
        )
    return text.encode()


def decode(
    tree: Json,
    tensors: Mapping[str, torch.Tensor],
    place: Place | None = None,
    kept: Collection[str] = (),
) -> Any:
    """Return the tree that was encoded; ValueError if `tree` cannot come from `encode`.

    Without `place` the tensors share the memory of `tensors`; with it they are new ones, but for
    those that are `kept` and lie well.
    """
    try:
        return _Decoder(tensors, place, kept).decode(tree, ())
    except (KeyError, TypeError, OverflowError, RuntimeError, RecursionError) as exc:
        raise ValueError(f"it holds something that is no value: {exc!r}") from exc


class _Decoder:
    def __init__(
        self, tensors: Mapping[str, torch.Tensor], place: Place | None, kept: Collection[str]
    ) -> None:
        self._tensors = tensors
        self._place = place
        self._kept = kept
        self._made: dict[Any, torch.Tensor] = {}

    def decode(self, value: Json, path: Path) -> Any:
        if not isinstance(value, (list, dict)):
            return value
        # A tensor in the deepest list is one level deeper.
        if len(path) > _DEEPEST + 1:
            raise ValueError(f"it is nested more than {_DEEPEST} deep")
        if isinstance(value, list):
            return self.each(value, path)
        tags = [key for key in value if key.startswith("$")]
        if not tags:
            return {key: self.decode(item, (*path, key)) for key, item in value.items()}
        if len(value) != 1 or tags[0] not in _DECODERS:
            raise ValueError(f"{', '.join(value):.200} is not a kind of value in this format")
        return _DECODERS[tags[0]](self, value[tags[0]], path)

    def each(self, value: Json, path: Path) -> list[Any]:
        return [self.decode(item, (*path, str(i))) for i, item in enumerate(typed(list, value))]

    def distinct(self, value: Json, path: Path) -> set[Any]:
        return _all_of(items := self.each(value, path), set(items))

    def queue(self, value: Json, path: Path) -> deque[Any]:
        maxlen, content = typed(list, value)
        items = self.each(content, path)
        return _all_of(items, deque(items, None if maxlen is None else typed(int, maxlen)))

    def pairs(self, value: Json, path: Path) -> dict[Any, Any]:
        pairs = (typed(list, pair) for pair in typed(list, value))
        items = [(self.decode(key, (*path, "key")), item) for key, item in pairs]
        return _all_of(items, {key: self.decode(item, (*path, _step(key))) for key, item in items})

    def defaulting(self, value: Json, path: Path) -> defaultdict[Any, Any]:
        name, content = typed(list, value)
        return defaultdict(_FACTORIES[name], self.pairs(content, path))

    def complex_number(self, value: Json, path: Path) -> complex:
        real, imaginary = self.each(value, path)
        return complex(typed(float, real), typed(float, imaginary))

    def numpy(self, value: Json, path: Path) -> Any:
        name, content = typed(list, value)
        dtype, raw = _checked_dtype(name), bytes.fromhex(content)
        if dtype.kind in "SU" or dtype.itemsize != len(raw):
            raise ValueError(f"{content} is no number of dtype {dtype}")
        return np.ndarray((), dtype, raw)[()]

    def array(self, value: Json, path: Path) -> np.ndarray[Any, Any]:
        name, text, lengths, order = typed(list, value)
        stored, dtype = self._tensors[name], _checked_dtype(text)
        shape = [typed(int, length) for length in typed(list, lengths)]
        # numpy takes -1 for any length that fits.
        if stored.dtype != _stored_as(dtype) or order not in ("C", "F") or min(shape, default=0) < 0:
            raise ValueError(f"{value!r} does not describe an array")
        raw = bytearray(as_bytes(stored))
        array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, raw, order=order)
        if array.nbytes != len(raw):
            raise ValueError(f"an array of {array.nbytes} bytes is stored as {len(raw)}")
        return array

    def tensor(self, value: Json, path: Path) -> torch.Tensor:
        name, about = (value, {}) if isinstance(value, str) else typed(list, value)
        stored = self._tensors[name]
        if typed(dict, about):
            stored = _as_described(stored, about)
        if self._place is None:
            return stored
        device = self._place(path, about.get("device", "cpu"))
        if name in self._kept and stored.device == device and "stride" not in about:
            return stored
        # Tied tensors stay tied.
        key = (name, device)
        if key not in self._made:
            if "stride" in about:
                fresh = torch.empty_strided(stored.shape, about["stride"], dtype=stored.dtype, device=device)
                self._made[key] = fresh.copy_(stored)
            else:
                self._made[key] = stored.to(device, copy=True)
        return self._made[key]


_DECODERS: dict[str, Callable[[_Decoder, Any, Path], Any]] = {
    "$int": lambda _, value, __: int(value, 16),
    "$float": lambda _, value, __: _not_finite(value),
    "$str": lambda _, value, __: bytes.fromhex(value).decode("utf-8", "surrogatepass"),
    "$complex": _Decoder.complex_number,
    "$tuple": lambda self, value, path: tuple(self.each(value, path)),
    "$set": _Decoder.distinct,
    "$frozenset": lambda self, value, path: frozenset(self.distinct(value, path)),
    "$deque": _Decoder.queue,
    "$dict": _Decoder.pairs,
    "$OrderedDict": lambda self, value, path: OrderedDict(self.pairs(value, path)),
    "$Counter": lambda self, value, path: Counter(self.pairs(value, path)),
    "$defaultdict": _Decoder.defaulting,
    "$bytes": lambda _, value, __: base64.b64decode(value, validate=True),
    "$bytearray": lambda _, value, __: bytearray(base64.b64decode(value, validate=True)),
    "$numpy": _Decoder.numpy,
    "$numpy.str_": lambda self, value, path: np.str_(typed(str, self.decode(value, path))),
    "$numpy.bytes_": lambda self, value, path: np.bytes_(typed(bytes, self.decode(value, path))),
    "$ndarray": _Decoder.array,
    "$tensor": _Decoder.tensor,
    "$Boundary": lambda _, value, __: Boundary(value),
    "$torch.Size": lambda _, value, __: torch.Size(typed(int, n) for n in typed(list, value)),
    "$torch.dtype": lambda _, value, __: _DTYPES_BY_NAME[value],
    "$torch.device": lambda _, value, __: _checked_device(value),
}

_Content = TypeVar("_Content", bound=Sized)


def _all_of(items: Sized, made: _Content) -> _Content:
    if len(made) != len(items):
        raise ValueError(f"of {len(items)} items only {len(made)} have a place")
    return made


def _not_finite(text: Json) -> float:
    if text not in ("nan", "inf", "-inf"):
        raise ValueError(f"{text!r} is not a number that JSON lacks")
    return float(text)


def _checked_dtype(text: str) -> np.dtype[Any]:
    # numpy's own parser also takes "O", whose bytes are pointers.
    if not _NUMPY_DTYPE.fullmatch(text):
        raise ValueError(f"{text} is not a numpy dtype that can be stored")
    return np.dtype(text)


def _checked_device(text: str) -> torch.device:
    try:
        device = torch.device(typed(str, text))
    except RuntimeError as exc:
        raise ValueError(f"{text} is not a device") from exc
    # torch itself takes "cuda:300" for "cuda:44".
    if str(device) != text:
        raise ValueError(f"{text} is not a device")
    return device


def _as_described(stored: torch.Tensor, about: Mapping[str, Json]) -> torch.Tensor:
    if unknown := about.keys() - {"dtype", "stride", "device"}:
        raise ValueError(f"a tensor has no {', '.join(unknown)}")
    if "dtype" in about:
        stored = _as_dtype(stored, _DTYPES_BY_NAME[about["dtype"]])
    if "stride" in about:
        stride = [typed(int, step) for step in typed(list, about["stride"])]
        # Strides decide how much memory is allocated.
        if not _is_dense(stored.shape, stride):
            raise ValueError(f"a tensor of shape {list(stored.shape)} cannot have the strides {stride}")
    _checked_device(about.get("device", "cpu"))
    return stored


def _as_dtype(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype in DTYPES or not _is_storable(dtype) or stored.dtype not in (torch.uint8, dtype):
        raise ValueError(f"{dtype} is not stored as {stored.dtype}")
    # One that was never in a file still has its own dtype.
    if stored.dtype == dtype:
        return stored
    return viewed(stored.reshape(-1), dtype).reshape(stored.shape[:-1])
