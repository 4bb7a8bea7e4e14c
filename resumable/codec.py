"""One tree of tensors and plain values, to files and back.

Plain values become JSON. What JSON does not have is an object with one key that begins
with "$", as in `{"$tuple": [1, 2]}`. Tensors go into a safetensors file, and stand in
the JSON by name. Reading imports nothing and calls nothing by name.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from .boundary import Boundary
from .errors import CannotStore
from .sealed import Json, parse
from .tensorfile import DTYPES, from_safetensors, to_safetensors

Path = tuple[str, ...]
Place = Callable[[Path, str], torch.device]
"""Where a tensor goes, by its path in the tree and the device that it came from."""

_DTYPES_BY_NAME = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
_FACTORIES: dict[str, Any] = {
    "None": None,
    **{kind.__name__: kind for kind in (bool, int, float, str, list, dict, set, tuple)},
}
_NUMPY_DTYPE = re.compile(r"[<>|][biufcSUmM][0-9]+(\[[0-9a-zA-Z]+\])?")
_DEEPEST = 64


@dataclass(slots=True)
class Encoded:
    """A tree as JSON, and the tensors (still the live ones) that it names."""

    json: Json
    tensors: dict[str, torch.Tensor]
    aliases: dict[str, str]
    """Tied tensors: the name each would have had, and the name of the one that is stored."""


def encode(tree: Any, name: Callable[[Path], str] = ".".join) -> Encoded:
    """Return the tree as JSON and tensors; `name` gives a tensor its name in the file.

    >>> encode({"lr": 0.1, "betas": (0.9, float("inf"))}).json
    {'lr': 0.1, 'betas': {'$tuple': [0.9, {'$float': 'inf'}]}}
    """
    encoder = _Encoder(name)
    return Encoded(encoder.encode(tree, ()), encoder.tensors, encoder.aliases)


class _Encoder:
    def __init__(self, name: Callable[[Path], str]) -> None:
        self._name = name
        self._seen: dict[Any, str] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.aliases: dict[str, str] = {}

    def encode(self, value: Any, path: Path) -> Json:
        # Exact types: a subclass would come back as something else.
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            # Beyond 2^53 other readers of JSON round; beyond 4300 digits Python refuses.
            return value if abs(value) <= 2**53 else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.generic):
            return {"$numpy": [_numpy_dtype(value.dtype, path), value.tobytes().hex()]}
        if len(path) > _DEEPEST:
            raise _cannot(path, f"is nested more than {_DEEPEST} deep, or holds itself", "flatten it")
        if method := _ENCODERS.get(kind):
            return method(self, value, path)
        raise _cannot(path, f"is {_described(value)}, which cannot be stored", _advice(value))

    def _each(self, values: Iterable[Any], path: Path) -> list[Json]:
        return [self.encode(value, (*path, str(i))) for i, value in enumerate(values)]

    def _pairs(self, values: Mapping[Any, Any], path: Path) -> list[Json]:
        return [
            [self.encode(key, (*path, "key")), self.encode(value, (*path, str(key)))]
            for key, value in values.items()
        ]

    def _dict(self, values: dict[Any, Any], path: Path) -> Json:
        if all(type(key) is str and not key.startswith("$") for key in values):
            return {key: self.encode(value, (*path, key)) for key, value in values.items()}
        return {"$dict": self._pairs(values, path)}

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
        # Sorted, since the order of a set changes from process to process.
        return sorted(self._each(values, path), key=json.dumps)

    def _array(self, value: np.ndarray[Any, Any], path: Path) -> Json:
        dtype = _numpy_dtype(value.dtype, path)
        order: Literal["C", "F"] = "F" if value.flags.fnc else "C"
        content = torch.from_numpy(np.frombuffer(bytearray(value.tobytes(order)), np.uint8))
        return {"$ndarray": [self._store(content, path), dtype, list(value.shape), order]}

    def _tensor(self, value: torch.Tensor, path: Path) -> Json:
        if problem := _unstorable(value):
            raise _cannot(path, f"is {problem}, which cannot be stored", "store a dense tensor")
        live = value.detach().resolve_conj().resolve_neg()
        about: dict[str, Json] = {}
        if live.dtype not in DTYPES:
            about["dtype"] = str(live.dtype).removeprefix("torch.")
        # Kernels may add in another order on another layout, so the layout is state too.
        if not live.is_contiguous() and _is_dense(live):
            about["stride"] = list(live.stride())
        if live.device.type != "cpu":
            about["device"] = str(live.device)
        stored = self._store(live, path)
        return {"$tensor": [stored, about] if about else stored}

    def _store(self, tensor: torch.Tensor, path: Path) -> str:
        name = self._name(path)
        while name in self.tensors or name in self.aliases or name == "__metadata__":
            name += "~"
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        if tensor.numel() and (first := self._seen.setdefault(place, name)) != name:
            self.aliases[name] = first
            return first
        self.tensors[name] = tensor
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
    Boundary: lambda _, value, __: {"$Boundary": value.value},
    torch.Size: lambda _, value, __: {"$torch.Size": list(value)},
    torch.dtype: lambda _, value, __: {"$torch.dtype": str(value).removeprefix("torch.")},
    torch.device: lambda _, value, __: {"$torch.device": str(value)},
}


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
    if value.layout != torch.strided or value.is_quantized or value.is_nested:
        return f"a tensor of layout {value.layout} and dtype {value.dtype}"
    if value.is_meta:
        return "a tensor on the meta device"
    return None


def _is_dense(tensor: torch.Tensor) -> bool:
    # Every element once, whatever the order: what empty_strided can make again.
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
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
    if isinstance(tree, list):
        for item in tree:
            yield from tensor_names(item)
    elif isinstance(tree, dict):
        for key, item in tree.items():
            if key in ("$tensor", "$ndarray"):
                yield item if isinstance(item, str) else item[0]
            else:
                yield from tensor_names(item)


_RANK_0 = "ranks/00000"


def to_files(trees: Mapping[str, Encoded]) -> dict[str, list[Any]]:
    """Return the content of every file of a checkpoint, in pieces.

    The tree "rank" is what differs by process; all others share state.json.
    """
    shared = {stem: tree.json for stem, tree in trees.items() if stem != "rank"}
    files: dict[str, list[Any]] = {"state.json": [_text(shared)]}
    for stem, tree in trees.items():
        path = _RANK_0 if stem == "rank" else stem
        if stem == "rank":
            files[f"{path}.json"] = [_text(tree.json)]
        if tree.tensors:
            files[f"{path}.safetensors"] = to_safetensors(tree.tensors, tree.aliases)
    return files


def from_files(files: Mapping[str, memoryview]) -> dict[str, Encoded]:
    """Return the trees that `to_files` was given; their tensors share the files' memory."""
    trees = {"rank": _from_file(files, _RANK_0, parse(files[f"{_RANK_0}.json"]))}
    for stem, tree in _checked(dict, parse(files["state.json"])).items():
        trees[stem] = _from_file(files, stem, tree)
    return trees


def _from_file(files: Mapping[str, memoryview], path: str, tree: Json) -> Encoded:
    data = files.get(f"{path}.safetensors")
    return Encoded(tree, from_safetensors(data) if data else {}, {})


def _text(tree: Json) -> bytes:
    return json.dumps(tree, allow_nan=False, separators=(",", ":")).encode()


def decode(tree: Json, tensors: Mapping[str, torch.Tensor], place: Place | None = None) -> Any:
    """Return what was encoded; ValueError if `tree` is not something that `encode` returns.

    Without `place` the tensors share the memory of `tensors`; with it they are new ones.
    """
    try:
        return _Decoder(tensors, place).decode(tree, ())
    except (KeyError, TypeError, OverflowError, RuntimeError, RecursionError) as exc:
        raise ValueError(f"it holds something that is no value: {exc!r}") from exc


class _Decoder:
    def __init__(self, tensors: Mapping[str, torch.Tensor], place: Place | None) -> None:
        self._tensors = tensors
        self._place = place
        self._made: dict[Any, torch.Tensor] = {}

    def decode(self, value: Json, path: Path) -> Any:
        if isinstance(value, list):
            return [self.decode(item, (*path, str(i))) for i, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        tag = next(iter(value), "")
        if not tag.startswith("$"):
            return {key: self.decode(item, (*path, key)) for key, item in value.items()}
        if len(value) != 1 or tag not in _DECODERS:
            raise ValueError(f"{tag} is not a kind of value in this format")
        return _DECODERS[tag](self, value[tag], path)

    def pairs(self, value: Json, path: Path) -> dict[Any, Any]:
        items = [(self.decode(key, path), item) for key, item in value]
        return {key: self.decode(item, (*path, str(key))) for key, item in items}

    def array(self, value: Json, path: Path) -> np.ndarray[Any, Any]:
        name, dtype, shape, order = value
        raw = bytearray(self._tensors[name].numpy())
        array: np.ndarray[Any, Any] = np.ndarray(shape, _checked_dtype(dtype), raw, order=order)
        if array.nbytes != len(raw):
            raise ValueError(f"an array of {array.nbytes} bytes is stored as {len(raw)}")
        return array

    def numpy(self, value: Json, path: Path) -> Any:
        dtype, content = value
        raw = bytes.fromhex(content)
        return np.ndarray((), _checked_dtype(dtype), raw)[()] if raw else np.zeros((), dtype)[()]

    def tensor(self, value: Json, path: Path) -> torch.Tensor:
        name, about = (value, {}) if isinstance(value, str) else value
        stored = self._tensors[name]
        if "dtype" in about:
            flat = stored.reshape(-1).view(_DTYPES_BY_NAME[about["dtype"]])
            stored = flat.reshape(stored.shape[:-1])
        if self._place is None:
            return stored
        device = self._place(path, about.get("device", "cpu"))
        # Tied tensors stay tied.
        key = (name, device, tuple(about.get("stride", ())))
        if key not in self._made:
            stride = about.get("stride", stored.stride())
            fresh = torch.empty_strided(stored.shape, stride, dtype=stored.dtype, device=device)
            self._made[key] = fresh.copy_(stored)
        return self._made[key]


_DECODERS: dict[str, Callable[[_Decoder, Any, Path], Any]] = {
    "$int": lambda _, value, __: int(value, 16),
    "$float": lambda _, value, __: float(value),
    "$complex": lambda self, value, path: complex(*self.decode(value, path)),
    "$tuple": lambda self, value, path: tuple(self.decode(value, path)),
    "$set": lambda self, value, path: set(self.decode(value, path)),
    "$frozenset": lambda self, value, path: frozenset(self.decode(value, path)),
    "$deque": lambda self, value, path: deque(self.decode(value[1], path), value[0]),
    "$dict": lambda self, value, path: self.pairs(value, path),
    "$OrderedDict": lambda self, value, path: OrderedDict(self.pairs(value, path)),
    "$Counter": lambda self, value, path: Counter(self.pairs(value, path)),
    "$defaultdict": lambda self, value, path: defaultdict(_FACTORIES[value[0]], self.pairs(value[1], path)),
    "$bytes": lambda _, value, __: base64.b64decode(value, validate=True),
    "$bytearray": lambda _, value, __: bytearray(base64.b64decode(value, validate=True)),
    "$numpy": _Decoder.numpy,
    "$ndarray": _Decoder.array,
    "$tensor": _Decoder.tensor,
    "$Boundary": lambda _, value, __: Boundary(value),
    "$torch.Size": lambda _, value, __: torch.Size(value),
    "$torch.dtype": lambda _, value, __: _DTYPES_BY_NAME[value],
    "$torch.device": lambda _, value, __: torch.device(_checked_device(value)),
}


def _checked(kind: type, value: Json) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{value!r} stands where a {kind.__name__} belongs")
    return value


def _checked_dtype(text: str) -> np.dtype[Any]:
    # numpy's own parser would also take "O", whose bytes are pointers.
    if not _NUMPY_DTYPE.fullmatch(text):
        raise ValueError(f"{text} is not a numpy dtype that can be stored")
    return np.dtype(text)


def _checked_device(text: str) -> str:
    if not re.fullmatch(r"[a-z]+(:[0-9]+)?", text):
        raise ValueError(f"{text} is not a device")
    return text
