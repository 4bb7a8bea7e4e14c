"""All that a pickle says: plain values as they are, other people's objects by name; none of them is made.

What a training tool keeps beside its tensors (settings, progress, callbacks) may be of any class. Here it
stays a name, while the numbers, texts and arrays around it come back.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from ..files.threads import no_garbage_collection
from .torch_file import DTYPES_BY_NAME, Global, Machine, Other, Stored
from .zip_archive import refused

_DEEPEST = 48
_MOST = 2_000_000
_PLAIN_KEYS = {str, int, float, bool, type(None)}


class Object:
    """A call that was not made: what was called, with what, and what was put into the result."""

    __slots__ = ("arguments", "items", "name", "state")

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.name = name
        self.arguments = arguments
        self.items: list[Any] = []
        self.state: Any = None


class Objects(Machine):
    """A pickle whose calls become `Object`s, whatever they ask for."""

    def is_known(self, name: str) -> bool:
        """Any name may stand there: it stays a name."""
        return True

    def append(self, items: list[Any]) -> None:
        """Append to a list, or to what stands for an object."""
        target = self.stack[-1]
        if type(target) is Object:
            target.items += items
        else:
            super().append(items)

    def set_items(self, items: list[Any]) -> None:
        """Put items into a dict; those of what stands for an object do not count."""
        if type(self.stack[-1]) is Object:
            return
        # (what is no plain key, such as a class, cannot be asked for either)
        pairs = zip(items[::2], items[1::2], strict=True)
        plain = [one for pair in pairs if type(pair[0]) in _PLAIN_KEYS for one in pair]
        target = self.stack[-1]
        if type(target) is not dict:
            raise ValueError("it puts into a dict what has no place there")
        target.update(zip(plain[::2], plain[1::2], strict=True))

    def build(self) -> None:
        """Keep what an object would have been given as its attributes."""
        state = self.stack.pop()
        if type(self.stack[-1]) is Object:
            self.stack[-1].state = state
        elif type(self.stack[-1]) not in (dict, Stored):
            raise ValueError("it gives attributes to what has none")

    def reduce(self) -> None:
        """Let an `Object` stand for what would have been called."""
        arguments, what = self.stack.pop(), self.stack.pop()
        if type(arguments) is not tuple or type(what) not in (Global, Object):
            raise ValueError("it calls what cannot be called")
        self.push(self.called(what.name, arguments))

    def called(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """Return a tensor or a dict; anything else is kept as it was asked for."""
        if name in _DICTS:
            return dict(_pairs(arguments)) if name == _ORDERED else {}
        if name in _TENSORS:
            return super().called(name, arguments)
        return Object(name, arguments)

    def pop(self) -> None:
        """Drop what lies on top."""
        self.stack.pop()

    instructions: ClassVar[Mapping[int, Callable[[Any], Any]]] = {
        **Machine.instructions,
        ord("0"): lambda m: m.pop(),
        ord("1"): lambda m: m.items(),
    }


_ORDERED = "collections OrderedDict"
_DICTS = {_ORDERED, "collections defaultdict"}
_TENSORS = {
    *("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3"),
    "torch._utils _rebuild_parameter",
}


def _pairs(arguments: tuple[Any, ...]) -> Iterable[tuple[Any, Any]]:
    if not arguments:
        return []
    (pairs,) = arguments
    if type(pairs) is not list or any(len(pair) != 2 or type(pair[0]) not in _PLAIN_KEYS for pair in pairs):
        raise ValueError("a dict is made of what are no pairs")
    return [(key, value) for key, value in pairs]


@no_garbage_collection()
def plain(found: Any) -> Any:
    """Return what a pickle says as plain values; `Other` stands where there is none."""
    return _Plain().value(found, 0)


class _Plain:
    def __init__(self) -> None:
        self._left = _MOST

    def value(self, found: Any, depth: int) -> Any:
        # One list can stand in many places, and those in many more: it is small only in the file.
        self._left -= 1
        if self._left < 0:
            raise refused(f"it holds more than {_MOST:,} values")
        kind = type(found)
        if kind in _AS_THEY_ARE:
            return found
        if depth > _DEEPEST:
            return Other(f"what is nested more than {_DEEPEST} deep")
        if kind is dict:
            return {key: self.value(item, depth + 1) for key, item in found.items()}
        if kind is list or kind is tuple:
            return kind(self.value(item, depth + 1) for item in found)
        if kind is Object:
            return self._object(found, depth + 1)
        if kind is Global:
            return DTYPES_BY_NAME.get(found.name, Other(found.name.replace(" ", ".")))
        return Other(kind.__name__)

    def _object(self, found: Object, depth: int) -> Any:
        name = found.name.replace(" ", ".")
        if make := _MAKERS.get(name):
            arguments = self.value((*found.arguments, *([found.items] if found.items else [])), depth)
            try:
                return make(arguments, self.value(found.state, depth))
            except (ValueError, TypeError, RuntimeError, OverflowError, KeyError, IndexError):
                pass
        return Other(name)


_AS_THEY_ARE = {*_PLAIN_KEYS, bytes, Stored, Other}


def _bytes(given: Any, _: Any) -> bytes:
    text, encoding = given
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(encoding)
    return str.encode(text, "latin-1")


def _distinct(given: Any, _: Any) -> set[Any]:
    (items,) = given
    if type(items) is not list or not {*map(type, items)} <= {*_PLAIN_KEYS, bytes}:
        raise ValueError("not plain")
    return set(items)


def _counted(given: Any, _: Any) -> Counter[Any]:
    (counts,) = given
    if type(counts) is not dict or not {*map(type, counts.values())} <= {int}:
        raise ValueError("not counts")
    return Counter(counts)


def _queue(given: Any, _: Any) -> deque[Any]:
    first, *rest = given
    longest = rest.pop(0) if rest and type(rest[0]) in (int, type(None)) else None
    return deque([*first, *(rest[0] if rest else ())], longest)


def _size(given: Any, _: Any) -> torch.Size:
    return torch.Size(given[0])


def _device(given: Any, _: Any) -> torch.device:
    kind, *index = given
    if type(kind) is not str or not {*map(type, index)} <= {int}:
        raise ValueError("no device")
    return torch.device(kind, *index)


def _complex(given: Any, _: Any) -> complex:
    real, imaginary = given
    if (type(real), type(imaginary)) != (float, float):
        raise ValueError("no numbers")
    return complex(real, imaginary)


def _dtype(given: Any, state: Any) -> np.dtype[Any]:
    # (numpy's own parser would also take "O", whose bytes are pointers)
    if given[0] not in _NUMPY:
        raise ValueError("not a number's")
    order = state[1] if state else "="
    found: np.dtype[Any] = np.dtype(given[0]).newbyteorder({"<": "<", ">": ">", "|": "=", "=": "="}[order])
    return found


_NUMPY = {"b1", "?"} | {f"{kind}{size}" for kind in "iuf" for size in (1, 2, 4, 8)} - {"f1"} | {"c8", "c16"}


def _number(given: Any, _: Any) -> Any:
    dtype, raw = given
    if not isinstance(dtype, np.dtype) or type(raw) is not bytes or len(raw) != dtype.itemsize:
        raise ValueError("no number")
    return np.frombuffer(raw, dtype)[0]


def _array(_: Any, state: Any) -> np.ndarray[Any, Any]:
    _, shape, dtype, is_fortran, raw = state
    if not isinstance(dtype, np.dtype) or type(raw) is not bytes:
        raise ValueError("no array")
    if dtype.kind == "b" and max(raw, default=0) > 1:
        raise ValueError("a boolean is neither 0 nor 1")
    flat: np.ndarray[Any, Any] = np.frombuffer(raw, dtype)
    found: np.ndarray[Any, Any] = flat.reshape(shape, order="F" if is_fortran else "C").copy(order="A")
    return found


_MAKERS: dict[str, Callable[[Any, Any], Any]] = {
    "_codecs.encode": _bytes,
    "__builtin__.bytes": lambda *_: b"",
    **dict.fromkeys(("__builtin__.set", "builtins.set"), _distinct),
    **dict.fromkeys(
        ("__builtin__.frozenset", "builtins.frozenset"), lambda *given: frozenset(_distinct(*given))
    ),
    **dict.fromkeys(("__builtin__.complex", "builtins.complex"), _complex),
    "collections.Counter": _counted,
    "collections.deque": _queue,
    "torch.Size": _size,
    "torch.device": _device,
    "numpy.dtype": _dtype,
    **dict.fromkeys(("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"), _number),
    **dict.fromkeys(("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"), _array),
}
