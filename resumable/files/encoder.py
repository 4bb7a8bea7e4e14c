"""The encoder: a tree as JSON, and the tensors that it names."""

from __future__ import annotations

import base64
import json
import math
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from typing import Any, Literal

import numpy as np
import torch

from ..boundary import Boundary
from ..errors import CannotStore
from . import sharded_tensor
from .sharded_tensor import is_sharded
from .strict_json import Json
from .tensor_file import DTYPES
from .tensor_groups import Facts, Group, facts_of

Path = tuple[str, ...]

FACTORIES: dict[str, Any] = {
    "None": None,
    **{kind.__name__: kind for kind in (bool, int, float, str, list, dict, set, tuple, deque, Counter)},
}
"""The factories that a stored defaultdict may have, by name."""

NUMPY_DTYPE = re.compile(r"[<>|][biufcSUmM][1-9][0-9]*(\[[0-9a-zA-Z]+\])?")
DEEPEST = 64
_EXACT = 2**53
_SURROGATE = re.compile("[\ud800-\udfff]")


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
    begins: Mapping[str, Sequence[int]] | None = None
    """Where each tensor begins in its whole, if they are boxes of sharded ones."""
    moved: Mapping[str, str] = field(default_factory=dict)
    """The device of this process for each device of the process that saved."""


Memo = dict[Path, Group]
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
            return value if -_EXACT <= value <= _EXACT else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if len(path) > DEEPEST:
            raise _cannot(path, f"is nested more than {DEEPEST} deep, or holds itself", "flatten it")
        if method := _ENCODERS.get(kind):
            return method(self, value, path)
        if isinstance(value, np.generic) and kind.__module__ == "numpy":
            return {"$numpy": [_numpy_dtype(value.dtype, path), value.tobytes().hex()]}
        raise _cannot(path, f"is {_described(value)}, which cannot be stored", _advice(value))

    def _each(self, values: Iterable[Any], path: Path) -> list[Json]:
        # Copied in one call, as everywhere here: another thread of the script may change it meanwhile.
        return self._all(enumerate([*values]), path)

    def _all(self, items: Iterable[tuple[Any, Any]], path: Path) -> list[Json]:
        found = []
        for key, value in items:
            kind = type(value)
            # Most values are numbers and texts, and a call for each would take longer than all else.
            if (
                value is None
                or kind is bool
                or (kind is int and -_EXACT <= value <= _EXACT)
                or (kind is str and value.isascii())
                or (kind is float and math.isfinite(value))
            ):
                found.append(value)
                continue
            step = (*path, key if type(key) is str else step_of(key))
            if len(path) >= DEEPEST:
                found.append(self.encode(value, step))
            elif kind is list:
                found.append(self._all(enumerate(value.copy()), step) if value else [])
            elif kind is dict and not value:
                found.append({})
            else:
                method = _ENCODERS.get(kind)
                found.append(method(self, value, step) if method else self.encode(value, step))
        return found

    def _pairs(self, values: Mapping[Any, Any], path: Path) -> list[Json]:
        items = [item for key, value in [*values.items()] for item in (("key", key), (key, value))]
        found = self._all(items, path)
        return [[*pair] for pair in zip(found[::2], found[1::2], strict=True)]

    def _dict(self, values: dict[Any, Any], path: Path) -> Json:
        values = values.copy()
        group = self._memo.get(path) if self._memo else None
        if group and group.is_of(values):
            return self._same_group(values, group)
        facts = facts_of(values) if self._memo is not None and values else None
        if group and group.facts == facts:
            group.guard(values)
            return self._same_group(values, group)
        if group and self._memo:
            del self._memo[path]
        # One look at all keys nearly always suffices.
        names = "".join(values) if {*map(type, values)} <= {str} else "$"
        if ("$" in names or not names.isascii()) and not all(map(_is_name, values)):
            return {"$dict": self._pairs(values, path)}
        if facts:
            return self._new_group(values, path, facts)
        return dict(zip(values, self._all(values.items(), path), strict=True))

    def _new_group(self, values: dict[str, torch.Tensor], path: Path, facts: Facts) -> Json:
        assert self._memo is not None
        key, tensors, aliases = len(self.key), len(self.tensors), len(self.aliases)
        json = dict(zip(values, self._all(values.items(), path), strict=True))
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
            places = frozenset(place for place in facts.places if place)
            group = self._memo[path] = Group(facts, json, stored, tied, places)
            self.key[key:] = [group]
        return json

    def _same_group(self, values: dict[str, torch.Tensor], group: Group) -> Json:
        if self.tensors or self.aliases:
            names = group.stored.keys() | group.aliases.keys()
            if not (self.tensors.keys().isdisjoint(names) and self.aliases.keys().isdisjoint(names)):
                raise _MemoStale
        if not (group.places.isdisjoint(self._places) and group.places.isdisjoint(self._places_in_groups)):
            raise _MemoStale
        self._places_in_groups |= group.places
        self.tensors.update(group.take(values))
        self.aliases.update(group.aliases)
        self.key.append(group)
        return group.json

    def _defaultdict(self, values: defaultdict[Any, Any], path: Path) -> Json:
        for name, factory in FACTORIES.items():
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
        stored = self._store(content.view(STORED_AS.get(value.dtype.kind, torch.uint8)), path)
        return {"$ndarray": [stored, dtype, list(value.shape), order]}

    def _tensor(self, value: torch.Tensor, path: Path) -> Json:
        if is_sharded(value):
            return self._sharded(value, path)
        if problem := unstorable(value):
            raise _cannot(path, f"is {problem}, which cannot be stored", "store a dense tensor")
        # The tensor itself where possible: later reads fill it in place, and the training must see them.
        live = value.detach().resolve_conj().resolve_neg() if value.is_conj() or value.is_neg() else value
        # Kernels may sum in another order on another layout, so the layout is state too.
        is_laid_out = not live.is_contiguous() and is_dense(live.shape, live.stride())
        about: dict[str, Json] = {}
        if live.dtype not in DTYPES:
            about["dtype"] = str(live.dtype).removeprefix("torch.")
        if is_laid_out:
            about["stride"] = list(live.stride())
        about |= {} if live.device.type == "cpu" else {"device": str(live.device)}
        stored = self._store(live, path)
        return {"$tensor": [stored, about] if about else stored}

    def _sharded(self, value: torch.Tensor, path: Path) -> Json:
        live = sharded_tensor.local(value)
        if (problem := unstorable(live)) or live.dtype not in DTYPES or live.is_neg() or live.is_conj():
            problem = problem or f"a sharded tensor of dtype {live.dtype}"
            raise _cannot(path, f"is {problem}, which cannot be stored", "store a plain, dense tensor")
        about: dict[str, Json] = {"shape": [*value.shape], "elements": str(live.dtype).removeprefix("torch.")}
        about |= {} if live.device.type == "cpu" else {"device": str(live.device)}
        return {"$tensor": [self._store(value, path), about]}

    def _store(self, tensor: torch.Tensor, path: Path) -> str:
        live = sharded_tensor.local(tensor)
        # A surrogate cannot be encoded as UTF-8, which other tools use for names.
        name = self._name(path).encode(errors="replace").decode()
        while name in self.tensors or name in self.aliases or name == "__metadata__":
            name += "~"
        if live.data_ptr() in self._places_in_groups:
            raise _MemoStale
        self._places.add(live.data_ptr())
        place = (live.data_ptr(), live.dtype, live.shape, live.stride(), live.device)
        if live.numel() and (first := self._seen.setdefault(place, name)) != name:
            self.aliases[name] = first
            self.key.append((name, first))
            return first
        self.tensors[name] = tensor
        placing = sharded_tensor.placing(tensor) if live is not tensor else ()
        self.key.append((name, live.dtype, live.shape, live.device, *placing))
        return name


_ENCODERS: dict[type, Callable[[_Encoder, Any, Path], Json]] = {
    dict: _Encoder._dict,
    list: _Encoder._each,
    torch.Tensor: _Encoder._tensor,
    torch.nn.Parameter: _Encoder._tensor,
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


STORED_AS = {"b": torch.bool}
"""The dtype as which an array is stored, by its kind; torch.uint8 for all others.

Uninitialized memory holds any byte, and a safetensors file has only real booleans.
"""


def _is_name(key: Any) -> bool:
    """Whether a key of a dict can be a key in JSON as it is."""
    return type(key) is str and not key.startswith("$") and _is_text(key)


def _is_text(value: str) -> bool:
    return value.isascii() or not _SURROGATE.search(value)


def step_of(key: Any) -> str:
    try:
        return str(key)
    except ValueError:
        # Python refuses to print an int of more than 4300 digits.
        return "number"


def are_storable(dtype: np.dtype[Any]) -> bool:
    """Whether arrays of a type can be stored."""
    return NUMPY_DTYPE.fullmatch(dtype.str) is not None


def _numpy_dtype(dtype: np.dtype[Any], path: Path) -> str:
    if not are_storable(dtype):
        raise _cannot(path, f"has the numpy dtype {dtype}, which cannot be stored", "convert it")
    text: str = dtype.str
    return text


def unstorable(value: torch.Tensor) -> str | None:
    """Return what a tensor is that cannot be stored."""
    if torch.nn.parameter.is_lazy(value):
        return "a parameter that has no shape yet (run one batch through the model first)"
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return _described(value)
    if value.layout != torch.strided or value.is_nested or not is_storable(value.dtype):
        return f"a tensor of layout {value.layout} and dtype {value.dtype}"
    if value.is_meta:
        return "a tensor on the meta device"
    return None


def is_storable(dtype: torch.dtype) -> bool:
    # Other dtypes (quantized, int1 to uint7) cannot even be copied.
    return dtype in DTYPES or dtype.is_floating_point or dtype.is_complex


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
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


def plain_names(value: Json) -> list[str]:
    """Return the names of the tensors if a JSON value is an object of plain ones, and of nothing else."""
    if type(value) is not dict:
        return []
    items = value.values()
    first = next(iter(items), None)
    if not isinstance(first, dict) or "$tensor" not in first:
        return []
    try:
        # Only objects have such an item.
        names = [*map(itemgetter("$tensor"), items)]
    except (KeyError, TypeError):
        return []
    return names if {*map(type, names)} == {str} and {*map(len, items)} == {1} else []


def tensor_names(tree: Json) -> list[str]:
    """Return the names of the tensors that a tree's JSON mentions."""
    found = []
    # Not recursive: JSON that was not decoded yet can be nested to any depth.
    waiting = [tree]
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            waiting += reversed(item)
        elif isinstance(item, dict):
            match item:
                case {"$tensor": about} | {"$ndarray": about}:
                    found.append(about if isinstance(about, str) else about[0])
                case _ if names := plain_names(item):
                    found += names
                case _:
                    waiting += reversed(item.values())
    return found
