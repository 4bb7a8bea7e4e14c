"""Copies of the containers in a value: other threads of the script may change them while it is stored."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any

from .encoder import DEEPEST

_COPIED = {dict, OrderedDict, defaultdict, Counter, list, deque, set, bytearray}
_KINDS = {*_COPIED, tuple}
_ENTERED = _COPIED - {set, bytearray}


def copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with copies of their dicts, lists, deques and sets; what was one object is one copy.

    Each container is copied in one call, which no other thread interrupts. Tensors stay the same objects.

    >>> own = [1]
    >>> found = copied({"one": {"own": own}, "other": own})
    >>> found["one"]["own"] is found["other"], found["other"] is own
    (True, False)
    """
    # With each original, which keeps its identity from being used again.
    made: dict[int, tuple[Any, Any]] = {}
    return {name: _copied(value, made, 0) for name, value in values.items()}


def _copied(value: Any, made: dict[int, tuple[Any, Any]], depth: int) -> Any:
    kind = type(value)
    if kind is tuple and depth < DEEPEST:
        return tuple(_inside(value, made, depth)) if _nests(value) else value
    # What is nested deeper, and a subclass, is refused when it is encoded.
    if kind not in _COPIED or depth >= DEEPEST:
        return value
    if id(value) in made:
        return made[id(value)][1]
    copy: Any = value.copy()
    made[id(value)] = value, copy
    if kind in _ENTERED and _nests(items := copy.values() if isinstance(copy, dict) else copy):
        inside = _inside([*items], made, depth)
        if isinstance(copy, dict):
            # Not by update(), which adds to a Counter.
            for key, item in zip([*copy], inside, strict=True):
                copy[key] = item
        else:
            copy.clear()
            copy.extend(inside)
    return copy


def _nests(items: Any) -> bool:
    # The kinds of ten thousand items are found in one call.
    return not _KINDS.isdisjoint(map(type, items))


def _inside(items: Any, made: dict[int, tuple[Any, Any]], depth: int) -> list[Any]:
    return [_copied(one, made, depth + 1) for one in items]
