"""Where an iterator that a script has made by itself stands."""

from __future__ import annotations

import gc
import itertools
import operator
import types
from typing import Any

from . import digest, iterators

_LENGTHS: tuple[Any, ...] = (
    iter([]),
    iter(()),
    iter(range(0)),
    iter(range(1 << 70)),
    iter(""),
    iter({}),
    iter({}.values()),
)
_LISTS = tuple(map(type, _LENGTHS))
_AROUND = (
    types.GeneratorType,
    enumerate,
    zip,
    map,
    filter,
    itertools.cycle,
    itertools.chain,
    itertools.islice,
)
_DEEPEST = 8


def standing(value: Any) -> str | None:
    """Return a digest of where an iterator stands; None for what is none, or does not say.

    >>> numbers = iter([5, 6, 7])
    >>> before = standing(numbers)
    >>> next(numbers), standing(numbers) == before
    (5, False)
    """
    if not _is_iterator(value):
        return None
    told = [*_told(value, 0)]
    return digest.of(told) if told else None


def _is_iterator(value: Any) -> bool:
    kind = type(value)
    if kind in _LISTS or kind in _AROUND or kind is itertools.count:
        return True
    return iterators.handed_out(value) is not None


def _told(value: Any, depth: int) -> list[int]:
    kind = type(value)
    if (batches := iterators.handed_out(value)) is not None:
        return [batches]
    if kind in _LISTS:
        return [operator.length_hint(value)]
    if kind is itertools.count:
        return [int(one) for one in gc.get_referents(value) if type(one) is int] or [_count(value)]
    if depth == _DEEPEST or kind not in _AROUND:
        return []
    return [number for inner in gc.get_referents(value) for number in _told(inner, depth + 1)]


def _count(value: Any) -> int:
    digits = repr(value).removeprefix("count(").removesuffix(")")
    return int(digits) if digits.lstrip("-").isdigit() else 0
