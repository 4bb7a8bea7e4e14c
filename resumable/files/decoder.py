"""The decoder: the tree that was encoded, from its JSON and its tensors."""

from __future__ import annotations

import base64
import itertools
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sized
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import torch

from ..boundary import Boundary
from .encoder import (
    DEEPEST,
    FACTORIES,
    NUMPY_DTYPE,
    STORED_AS,
    Path,
    is_dense,
    is_storable,
    plain_names,
    step_of,
)
from .sharded_tensor import is_sharded
from .strict_json import Json, typed
from .tensor_file import DTYPES, as_bytes, viewed

Place = Callable[[Path, str], torch.device]
"""Returns the device of a tensor, given its path in the tree and the device that it was saved on."""

_NESTED = {list, dict}
_HOST = torch.device("cpu")
_DTYPES_BY_NAME = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


def decode(
    tree: Json,
    tensors: Mapping[str, torch.Tensor],
    place: Place | None = None,
    kept: Collection[str] = (),
    *,
    is_by_device: bool = False,
) -> Any:
    """Return the tree that was encoded; ValueError if `tree` cannot come from `encode`.

    Without `place` the tensors share the memory of `tensors`; with it they are new ones, but for
    those that are `kept` and lie well. `is_by_device`: `place` looks at the device only, not at the path.
    """
    if type(tree) not in _NESTED:
        return tree
    try:
        return _Decoder(tensors, place, kept, is_by_device).decode(tree, ())
    except (KeyError, TypeError, OverflowError, RuntimeError, RecursionError) as exc:
        raise ValueError(f"it holds something that is no value: {exc!r}") from exc


class _Decoder:
    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        place: Place | None,
        kept: Collection[str],
        is_by_device: bool,
    ) -> None:
        self._tensors = tensors
        self._place = place
        self._kept = kept
        self._is_by_device = is_by_device
        self._made: dict[torch.device, dict[str, torch.Tensor]] = defaultdict(dict)

    def decode(self, value: Json, path: Path) -> Any:
        kind = type(value)
        if kind not in _NESTED:
            return value
        # A tensor in the deepest list is one level deeper.
        if len(path) > DEEPEST + 1:
            raise ValueError(f"it is nested more than {DEEPEST} deep")
        if kind is dict and len(value) == 1:
            ((tag, content),) = value.items()
            if tag in _DECODERS:
                return _DECODERS[tag](self, content, path)
        if kind is dict and "$" in "".join(value) and any(key.startswith("$") for key in value):
            raise ValueError(f"{', '.join(value):.200} is not a kind of value in this format")
        if names := plain_names(value) if len(path) <= DEEPEST else []:
            return dict(zip(value, self.group(names, path, value), strict=True))
        found = []
        for key, item in enumerate(value) if kind is list else value.items():
            # Most values are numbers and texts, and a call for each would take longer than all else.
            found.append(self.decode(item, (*path, str(key))) if type(item) in _NESTED else item)
        return found if kind is list else dict(zip(value, found, strict=True))

    def group(self, names: list[str], path: Path, keys: Collection[str]) -> list[torch.Tensor]:
        """Return the plain tensors of a dict: one by one, ten thousand take ten times as long."""
        stored = [*map(self._tensors.__getitem__, names)]
        if self._place is None:
            return stored
        if not self._are_all_on_host(path, keys, stored):
            steps = ((*path, key) for key in keys)
            return [self.tensor(name, step) for name, step in zip(names, steps, strict=True)]
        if self._kept and frozenset(self._kept).issuperset(names):
            return stored
        made = self._made[_HOST]
        fresh = [name for name in names if name not in self._kept and name not in made]
        made.update(zip(fresh, map(torch.clone, map(self._tensors.__getitem__, fresh)), strict=True))
        # Those that are kept have not been made.
        return [*map(made.get, names, stored)]

    def _are_all_on_host(self, path: Path, keys: Collection[str], stored: list[torch.Tensor]) -> bool:
        assert self._place
        asked = itertools.islice(keys, 1) if self._is_by_device else keys
        return (
            {self._place((*path, key), "cpu") for key in asked} == {_HOST}
            and {*map(type, stored)} == {torch.Tensor}
            and all(map(attrgetter("is_cpu"), stored))
        )

    def each(self, value: Json, path: Path) -> list[Any]:
        found: list[Any] = self.decode(typed(list, value), path)
        return found

    def distinct(self, value: Json, path: Path) -> set[Any]:
        return _all_of(items := self.each(value, path), set(items))

    def queue(self, value: Json, path: Path) -> deque[Any]:
        maxlen, content = typed(list, value)
        items = self.each(content, path)
        return _all_of(items, deque(items, None if maxlen is None else typed(int, maxlen)))

    def pairs(self, value: Json, path: Path) -> dict[Any, Any]:
        pairs = (typed(list, pair) for pair in typed(list, value))
        items = [(self.decode(key, (*path, "key")), item) for key, item in pairs]
        return _all_of(items, {key: self.decode(item, (*path, step_of(key))) for key, item in items})

    def defaulting(self, value: Json, path: Path) -> defaultdict[Any, Any]:
        name, content = typed(list, value)
        return defaultdict(FACTORIES[name], self.pairs(content, path))

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
        name, text, shape, order = typed(list, value)
        stored, dtype = self._tensors[name], _checked_dtype(text)
        is_shape = type(shape) is list and {*map(type, shape)} <= {int}
        # numpy takes -1 for any length that fits.
        if (
            not is_shape
            or min(shape, default=0) < 0
            or stored.dtype != STORED_AS.get(dtype.kind, torch.uint8)
            or order not in ("C", "F")
        ):
            raise ValueError(f"{value!r} does not describe an array")
        raw = bytearray(as_bytes(stored))
        array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, raw, order=order)
        if array.nbytes != len(raw):
            raise ValueError(f"an array of {array.nbytes} bytes is stored as {len(raw)}")
        return array

    def tensor(self, value: Json, path: Path) -> torch.Tensor:
        name, about = (value, {}) if isinstance(value, str) else typed(list, value)
        stored = self._tensors[name]
        if about != {}:
            stored = _as_described(stored, typed(dict, about))
        if self._place is None:
            return stored
        device = self._place(path, about.get("device", "cpu"))
        lies_well = stored.device == device and "stride" not in about
        if name in self._kept and (lies_well or is_sharded(stored)):
            return stored
        # Tied tensors stay tied.
        made = self._made[device]
        if name not in made:
            if "stride" in about:
                fresh = torch.empty_strided(stored.shape, about["stride"], dtype=stored.dtype, device=device)
                made[name] = fresh.copy_(stored)
            else:
                made[name] = stored.to(device, copy=True)
        return made[name]


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
    if not NUMPY_DTYPE.fullmatch(text):
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
    if unknown := about.keys() - {"dtype", "stride", "device", "shape", "elements"}:
        raise ValueError(f"a tensor has no {', '.join(unknown)}")
    if "dtype" in about:
        stored = _as_dtype(stored, _DTYPES_BY_NAME[about["dtype"]])
    if "stride" in about:
        stride = [typed(int, step) for step in typed(list, about["stride"])]
        # Strides decide how much memory is allocated.
        if not is_dense(stored.shape, stride):
            raise ValueError(f"a tensor of shape {list(stored.shape)} cannot have the strides {stride}")
    if "shape" in about and [*stored.shape] != about["shape"]:
        raise ValueError(f"a tensor of shape {list(stored.shape)} should have {about['shape']!r:.200}")
    if "elements" in about and str(stored.dtype) != f"torch.{about['elements']!s:.50}":
        raise ValueError(f"a tensor of {stored.dtype} should be of {about['elements']!r:.50}")
    _checked_device(about.get("device", "cpu"))
    return stored


def _as_dtype(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype in DTYPES or not is_storable(dtype) or stored.dtype not in (torch.uint8, dtype):
        raise ValueError(f"{dtype} is not stored as {stored.dtype}")
    # One that was never in a file still has its own dtype.
    if stored.dtype == dtype:
        return stored
    # Not a view for autograd: it may be handed over as it is.
    return viewed(stored.reshape(-1), dtype).reshape(stored.shape[:-1]).data


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
                    waiting += () if plain_names(item) else item.values()
    return found
