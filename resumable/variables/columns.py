"""Long lists of tuples of one kind, such as a replay buffer: looked at and stored column by column."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from ..files import fingerprint, tensor_file
from ..objects import kinds, own
from .atoms import Hole

FEWEST = 64
_NUMBERS: dict[type, Any] = {int: np.int64, float: np.float64, bool: np.bool_}
_PLAIN = (str, type(None))


class Table(NamedTuple):
    """The rows of a list by columns; arrays and tensors stand in a pool, each object once."""

    of: type
    """The class of the rows."""
    columns: list[Any]
    """`{"numbers": array, "exactly": if of Python}`, `{"pool": number, "at": places in it}`, or a list."""
    pools: list[Any]
    """By kind and shape: the arrays or tensors, one above the other."""


def table_of(value: Any) -> Table | None:
    """Return the rows of a list or deque by columns; None if it is short, or of several kinds."""
    if len(value) < FEWEST:
        return None
    rows = kinds.items_of(value)
    of = type(rows[0])
    if not issubclass(of, tuple) or {*map(type, rows)} != {of} or len({*map(len, rows)}) != 1:
        return None
    if of is not tuple and not own.is_own_class(of):
        return None
    pools: dict[Hashable, dict[int, Any]] = {}
    columns = [_column(one, pools) for one in zip(*rows, strict=True)]
    if any(one is None for one in columns):
        return None
    stacked = [_stacked([*pool.values()]) for pool in pools.values()]
    return Table(of, columns, stacked)


def _column(values: Sequence[Any], pools: dict[Hashable, dict[int, Any]]) -> Any:
    types = {*map(type, values)}
    if types <= {*_PLAIN}:
        return [*values]
    of, *others = {_NUMBERS.get(one, one) for one in types}
    if not others and issubclass(of, np.generic):
        try:
            found = np.array(values, of if of in _NUMBERS.values() else None)
        except OverflowError:
            return None
        # An action may be Python's where it is chosen, and NumPy's where it is drawn.
        is_mixed = len(types) > 1
        exactly = np.array([type(one) in _NUMBERS for one in values]) if is_mixed else types <= {*_NUMBERS}
        return None if found.dtype.hasobject or found.ndim != 1 else {"numbers": found, "exactly": exactly}
    held = [one for one in values if one is not None]
    if not {*map(type, held)} <= {np.ndarray, torch.Tensor} or len(facts := {*map(_facts, held)}) != 1:
        return None
    key = facts.pop()
    if key is None:
        return None
    pool = pools.setdefault(key, {})
    for one in held:
        pool.setdefault(id(one), one)
    # The state that follows the last one of an episode may be None.
    places = {identity: place for place, identity in enumerate(pool)} | {id(None): -1}
    return {"pool": [*pools].index(key), "at": np.array([places[id(one)] for one in values], np.int64)}


def _facts(value: Any) -> Hashable:
    """Return what arrays of one pool have in common; None for one that cannot be in any."""
    if isinstance(value, np.ndarray):
        return None if value.dtype.hasobject else (value.dtype.str, value.shape)
    is_plain = value.is_cpu and value.layout is torch.strided and not value.requires_grad
    return (str(value.dtype), tuple(value.shape)) if is_plain else None


def _stacked(values: list[Any]) -> Any:
    return torch.stack(values) if isinstance(values[0], torch.Tensor) else np.stack(values)


def digest(table: Table) -> Hashable:
    """Return a digest of a table, of all its bits."""
    found = xxhash.xxh3_128(f"{table.of.__qualname__} {len(table.columns)}".encode())
    for one in table.columns:
        if isinstance(one, list):
            found.update(json.dumps(one).encode())
            continue
        data = one["numbers"] if "numbers" in one else one["at"]
        found.update(f"{data.dtype.str} {one.get('pool')}".encode())
        found.update(bytes(np.atleast_1d(one.get("exactly", False))))
        found.update(data if data.dtype.kind in "iufb" else data.view(np.uint8))
    for pool in table.pools:
        found.update(f"{pool.dtype} {[*pool.shape]}".encode())
        if isinstance(pool, torch.Tensor):
            found.update(tensor_file.as_bytes(pool))
        else:
            found.update(fingerprint.flat(pool).view(np.uint8))
    return found.digest()


def rows_of(of: type, columns: Sequence[Any], pools: Sequence[Any]) -> list[Any]:
    """Return the rows of a stored table."""
    # Each is an array of its own: a view would keep the whole pool alive.
    held = [
        [one.clone() for one in pool] if isinstance(pool, torch.Tensor) else [*map(np.array, pool)]
        for pool in pools
    ]
    found = []
    for one in columns:
        if isinstance(one, list):
            found.append(one)
        elif "numbers" in one:
            python, exactly = one["numbers"].tolist(), one["exactly"]
            pairs = zip(python, one["numbers"], np.broadcast_to(exactly, len(python)), strict=True)
            found.append(python if exactly is True else [a if is_python else b for a, b, is_python in pairs])
        else:
            if one["pool"] not in range(len(held)) or one["at"].max(initial=-1) >= len(held[one["pool"]]):
                raise Hole("a place in no pool")
            pool = held[one["pool"]]
            found.append([pool[at] if at >= 0 else None for at in one["at"].tolist()])
    if len({*map(len, found)}) != 1:
        raise Hole("columns of several lengths")
    rows = zip(*found, strict=True)
    return [*rows] if of is tuple else [tuple.__new__(of, row) for row in rows]
