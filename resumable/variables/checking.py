"""What a stored look must be like: a checkpoint may come from anybody."""

from __future__ import annotations

import array
import math
from collections.abc import Callable, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any

import numpy as np
import torch

from . import atoms

Entry = Mapping[str, Any]
_IMMUTABLE = ("tuple", "set", "partial", "method", "enum")
_DEEPEST = 100
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


class _Wrong(ValueError):
    """Something in a stored look is not as a look stores it."""


def check(tree: Any) -> None:
    """Raise ValueError unless a tree is one that a look may have stored."""
    _Check(tree).run()
    shared = tree.get("shared", [])
    _need(isinstance(shared, list) and all(map(_is_pair, shared)), "what optimizers share")
    _need(all(type(name) is str for pair in shared for name in pair), "what optimizers share")
    overridden = tree.get("overridden", [])
    _need(isinstance(overridden, list) and all(type(one) is str for one in overridden), "what was overridden")
    numbers = tree.get("numbers", {})
    _need(
        isinstance(numbers, Mapping) and all(map(_are_counts, numbers.values())), "what numbers the batches"
    )
    starts = tree.get("starts", {})
    _need(isinstance(starts, Mapping) and all(map(_are_starts, starts.values())), "how variables began")
    passes = tree.get("passes", {})
    _need(isinstance(passes, Mapping) and all(type(name) is str for name in passes), "the passes")
    for entries in passes.values():
        _Check({"namespaces": [], "entries": entries}).run()


def _are_starts(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        _is_name(name) and type(one) in _PLAIN for name, one in value.items()
    )


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int for one in value)


class _Check:
    def __init__(self, tree: Any) -> None:
        _need(isinstance(tree, Mapping) and {"namespaces", "entries"} <= tree.keys(), "the variables")
        self._namespaces, self._entries = tree["namespaces"], tree["entries"]
        self._inside: list[list[int]] = []
        """By entry: the immutable ones in it, which are made before it."""

    def run(self) -> None:
        _need(isinstance(self._entries, list), "the entries")
        for number, entry in enumerate(self._entries):
            self._inside.append([])
            try:
                self._entry(entry, self._inside[-1])
            except _Wrong as exc:
                raise _Wrong(f"entry {number}: {exc}") from None
        _need(isinstance(self._namespaces, list), "the namespaces")
        for one in self._namespaces:
            _need(_is_pair(one) and type(one[0]) is str and isinstance(one[1], list), "a namespace")
            for row in one[1]:
                _need(_is_pair(row) and _is_name(row[0]), "a variable's name")
                self._value(row[1], [])
        self._refuse_cycles()

    def _entry(self, entry: Any, inside: list[int]) -> None:
        _need(type(entry) is dict, "no dict")
        if entry.keys() in ({"owned"}, {"hole"}):
            _need(type(*entry.values()) is str, "no text")
            return
        kind = entry.get("kind")
        _need(type(kind) is str and type(entry.get("class")) is str, "kind or class")
        if "at" in entry:
            _need(isinstance(entry["at"], list) and bool(entry["at"]), "path")
            _need(
                all(_is_pair(one) and type(one[0]) is str and type(one[1]) in _PLAIN for one in entry["at"]),
                "path",
            )
        if "constant" in entry:
            _need(_is_pair(entry["constant"]) and type(entry["constant"][0]) is str, "constant")
            if (stored := entry["constant"][1]) is not None:
                _need(type(stored) is dict and kind in ("tensor", "array", "generator"), "constant")
                self._content(kind, stored, inside)
        rest = {
            key: one for key, one in entry.items() if key not in ("kind", "class", "at", "constant", "hole")
        }
        is_made = kind in ("network", "library") and "set" in entry
        _need(not (is_made and "at" in entry), "what is made is not there before")
        if rest:
            self._content(kind, rest, inside)
        else:
            _need("at" in entry or "hole" in entry, "no content")

    def _content(self, kind: str, held: Entry, inside: list[int]) -> None:
        _need(kind in _KINDS, f"kind {kind!r}")
        forms = [one.split() for one in _KINDS[kind].split("|")]
        is_right = any(
            {key for key in form if key[-1] != "?"} <= held.keys() <= {key.rstrip("?") for key in form}
            for form in forms
        )
        _need(is_right, f"a {kind} of {', '.join(map(repr, held))}")
        for key, one in held.items():
            (_KEYS.get(f"{kind} {key}") or _KEYS[key])(self, one, inside)
        if "shape" in held:
            _need(math.prod(held["shape"]) == len(held.get("items", ())), "a shape")
        if held.get("typecode"):
            _need(len(held["bytes"]) % array.array(held["typecode"]).itemsize == 0, "bytes")

    def _value(self, stored: Any, inside: list[int], depth: int = 0) -> None:
        """Check a value: an atom, a tuple of such, or the number of an entry."""
        _need(depth < _DEEPEST, "nested too deeply")
        if type(stored) is tuple:
            for one in stored:
                self._value(one, inside, depth + 1)
        elif type(stored) is dict and stored.keys() == {"entry"}:
            number = stored["entry"]
            _need(type(number) is int and 0 <= number < len(self._entries), "entry")
            inside.append(number)
        elif type(stored) is dict and stored.keys() == {"atom"}:
            _need(_is_pair(stored["atom"]), "atom")
            atoms.check(*stored["atom"])
        else:
            _need(type(stored) in _PLAIN or isinstance(stored, np.generic), f"a {type(stored).__name__}")

    def _values(self, stored: Any, inside: list[int]) -> None:
        if isinstance(stored, np.ndarray):
            _need(stored.ndim == 1 and stored.dtype.kind in "iufb", "numbers")
            return
        _need(isinstance(stored, list), "no list")
        for one in stored:
            self._value(one, inside)

    def _pairs(self, stored: Any, inside: list[int]) -> None:
        _need(isinstance(stored, list) and all(map(_is_pair, stored)), "pairs")
        for key, one in stored:
            self._value(key, inside)
            self._value(one, inside)

    def _names(self, stored: Any, inside: list[int]) -> None:
        self._pairs(stored, inside)
        _need(all(_is_name(name) for name, _ in stored), "an attribute's name")

    def _steps(self, stored: Any, inside: list[int]) -> None:
        _need(isinstance(stored, list), "steps")
        for one in stored:
            _need(
                isinstance(one, list)
                and len(one) == 3
                and type(one[0]) is str
                and type(one[1]) in (str, int),
                "a step",
            )
            _need(one[0] != "attribute" or _is_name(one[1]), "an attribute's name")
            self._value(one[2], inside)

    def _refuse_cycles(self) -> None:
        """Refuse what holds itself before it is made."""
        inside = {
            number: [one for one in held if self._entries[one].get("kind") in _IMMUTABLE]
            for number, held in enumerate(self._inside)
        }
        depths = dict[int, int]()
        try:
            for number in TopologicalSorter(inside).static_order():
                depths[number] = 1 + max((depths[one] for one in inside[number]), default=0)
        except CycleError as exc:
            raise _Wrong(f"entry {exc.args[1][0]} holds itself") from None
        _need(max(depths.values(), default=0) < _DEEPEST, "nested too deeply")


def _need(is_right: bool, what: str) -> None:
    if not is_right:
        raise _Wrong(f"the variables of the script are not as a checkpoint stores them: {what}")


def _is_pair(one: Any) -> bool:
    return type(one) in (list, tuple) and len(one) == 2


def _is_name(one: Any) -> bool:
    """Whether something is a name that a script gives: none of Python's own."""
    return type(one) is str and one.isidentifier() and not (one.startswith("__") and one.endswith("__"))


def _if(is_right: Callable[[Any], bool]) -> Callable[[_Check, Any, list[int]], None]:
    return lambda check, one, inside: _need(is_right(one), f"a {type(one).__name__}")


def _table(check: _Check, stored: Any, inside: list[int]) -> None:
    _need(isinstance(stored, list), "columns")
    one: Any
    for one in stored:
        if isinstance(one, list):
            _need(all(type(item) in (str, type(None)) for item in one), "a column")
            continue
        _need(type(one) is dict and one.keys() in ({"numbers", "exactly"}, {"pool", "at"}), "a column")
        data: Any = one.get("numbers", one.get("at"))
        _need(isinstance(data, np.ndarray) and data.ndim == 1 and not data.dtype.hasobject, "a column")
        exactly: Any = one.get("exactly", True)
        is_mask = isinstance(exactly, np.ndarray) and (exactly.dtype, exactly.shape) == (bool, data.shape)
        _need((type(exactly) is bool or is_mask) and type(one.get("pool", 0)) is int, "a column")
        _need("at" not in one or (data.dtype == np.int64 and data.min(initial=0) >= -1), "places")


def _pools(check: _Check, stored: Any, inside: list[int]) -> None:
    _need(
        isinstance(stored, list) and all(isinstance(one, (np.ndarray, torch.Tensor)) for one in stored),
        "pools",
    )


def _view(check: _Check, stored: Any, inside: list[int]) -> None:
    _need(isinstance(stored, list) and len(stored) == 4 and type(stored[0]) is str, "a view")
    _need(all(isinstance(one, list) for one in stored[1:3]) and len(stored[1]) == len(stored[2]), "a view")
    numbers = [*stored[1], *stored[2], stored[3]]
    _need(all(map(_is_size, numbers)), "a view")


def _is_size(one: Any) -> bool:
    return type(one) is int and one >= 0


def _nothing(check: _Check, stored: Any, inside: list[int]) -> None:
    """Leave what a library, or a generator, checks by itself when it takes it."""


def _inherited(check: _Check, stored: Any, inside: list[int]) -> None:
    _need(type(stored) is dict, "what is inherited")
    check._content("dict" if "set" in stored else "list", stored, inside)


_KINDS = {
    "list": "items maxlen | columns pools maxlen of?",
    "tuple": "items of?",
    "dict": "set is_all? gone? order? factory?",
    "set": "items",
    "buffer": "bytes typecode",
    "array": "array | items shape",
    "tensor": "tensor requires_grad is_parameter | view",
    "generator": "state",
    "count": "count",
    "enum": "member of",
    "object": "set is_all? gone? of? inherited?",
    "class": "steps",
    "function": "steps",
    "network": "steps | set is_all? of?",
    "partial": "items",
    "method": "self name",
    "library": "data | of_itself | set is_all? of?",
}
"""What an entry of each kind has, or instead of it; it may lack what a ? is behind."""
_KEYS: dict[str, Callable[[_Check, Any, list[int]], None]] = {
    "items": _Check._values,
    "maxlen": _if(lambda one: one is None or _is_size(one)),
    "columns": _table,
    "pools": _pools,
    "of": _Check._value,
    "set": _Check._names,
    "dict set": _Check._pairs,
    "is_all": _if(lambda one: type(one) is bool),
    "gone": _if(lambda one: type(one) is list and all(map(_is_name, one))),
    "dict gone": _Check._values,
    "order": _Check._values,
    "factory": lambda check, one, inside: None if type(one) is str else check._value(one, inside),
    "bytes": _if(lambda one: type(one) is bytes),
    "typecode": _if(lambda one: one is None or (type(one) is str and one in [*array.typecodes])),
    "array": _if(lambda one: isinstance(one, np.ndarray) and not one.dtype.hasobject),
    "shape": _if(lambda one: isinstance(one, list) and all(map(_is_size, one))),
    "tensor": _if(lambda one: isinstance(one, torch.Tensor)),
    "requires_grad": _if(lambda one: type(one) is bool),
    "is_parameter": _if(lambda one: type(one) is bool),
    "view": _view,
    "state": _nothing,
    "count": _if(lambda one: _is_pair(one) and {int, float}.issuperset(map(type, one))),
    "member": _if(lambda one: type(one) is str),
    "inherited": _inherited,
    "steps": _Check._steps,
    "self": _Check._value,
    "name": _if(_is_name),
    "data": _Check._names,
    "of_itself": _nothing,
}
"""What each must be; that of one kind may differ."""
