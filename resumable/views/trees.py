"""A tree in the JSON of a checkpoint, flat: its plain values by path, and the tensors that it names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..files.strict_json import Json, typed

_DEEPEST = 200
"""A value of 64 nested containers is twice as many lists and objects in JSON, and the tree adds some."""


def refuse_depth(whole: Json) -> None:
    """Raise ValueError for JSON that is nested deeper than any tree."""
    # Before anything recursive: a RecursionError of Python's would name no file.
    waiting = [whole]
    for _ in range(_DEEPEST):
        inner = (one.values() if isinstance(one, dict) else one for one in waiting)
        waiting = [item for items in inner for item in items if isinstance(item, (list, dict))]
    if waiting:
        raise ValueError(f"it is nested more than {_DEEPEST} deep")


class Stored(NamedTuple):
    """A tensor that a tree names."""

    name: str
    dtype: str | None = None
    """None unless it is stored as its bytes."""
    shape: tuple[int, ...] | None = None
    """None unless it is a NumPy array."""
    whole: tuple[int, ...] | None = None
    """Its shape if it is stored in boxes."""


def stored(tree: Json) -> Iterator[Stored]:
    """Yield the tensors that a tree names."""
    for _, value in walked(tree, ""):
        match value:
            case {"$tensor": str(name)}:
                yield Stored(name)
            case {"$tensor": [str(name), dict(about)]}:
                dtype = typed(str, about["dtype"]) if "dtype" in about else None
                lengths = typed(list, about["shape"]) if "shape" in about else None
                whole = None if lengths is None else tuple(typed(int, one) for one in lengths)
                yield Stored(name, dtype, whole=whole)
            case {"$ndarray": [str(name), str(dtype), list(shape), _]}:
                yield Stored(name, dtype, tuple(typed(int, length) for length in shape))


def leaves(tree: Json, path: str = "") -> Iterator[tuple[str, Json]]:
    """Yield the plain values of a tree by their paths, without the tensors; ValueError if it is no tree.

    >>> [*leaves({"groups": [{"lr": 0.1, "betas": {"$tuple": [0.9, 0.99]}}], "exp": {"$tensor": "w"}})]
    [('groups.0.lr', 0.1), ('groups.0.betas', {'$tuple': [0.9, 0.99]})]
    """
    for place, value in walked(tree, path):
        if not (isinstance(value, dict) and value.keys() & {"$tensor", "$ndarray"}):
            yield place, value


def walked(tree: Json, path: str) -> Iterator[tuple[str, Json]]:
    """Yield the plain values of a tree, and what names its tensors, by their paths."""
    inside: Iterable[tuple[str, Json]] = ()
    match tree:
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
        yield from walked(value, f"{path}.{key}" if path else key)


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
