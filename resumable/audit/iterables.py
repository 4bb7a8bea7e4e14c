"""Where an iterator that a script has made by itself stands."""

from __future__ import annotations

import gc
import itertools
import operator
import types
from collections.abc import Iterator
from typing import Any

from ..loaders import torch_iterators
from ..trace import digest

_LENGTHS: tuple[Any, ...] = (
    iter([]),
    iter(()),
    iter(range(0)),
    iter(range(1 << 70)),
    iter(""),
    iter({}),
    iter({}.values()),
    iter({}.items()),
    iter(set()),
    reversed([]),
    reversed(()),
    itertools.repeat(0, 0),
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
    itertools.accumulate,
    itertools.compress,
    itertools.dropwhile,
    itertools.pairwise,
    itertools.starmap,
    itertools.takewhile,
    itertools.zip_longest,
)
_PLAIN = frozenset({int, float})
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
    return torch_iterators.handed_out(value) is not None


def _told(value: Any, depth: int) -> list[int | str]:
    kind = type(value)
    if (batches := torch_iterators.handed_out(value)) is not None:
        return [batches]
    if kind in _LISTS:
        return [operator.length_hint(value)]
    if kind is itertools.count:
        # (a number of the script's own class would be asked for its text)
        is_plain = _PLAIN.issuperset(map(type, gc.get_referents(value)))
        return [repr(value)] if is_plain else []
    if depth == _DEEPEST or kind not in _AROUND:
        return []
    return [one for inner in _around(value) for one in _told(inner, depth + 1)]


def _around(value: Any) -> Iterator[Any]:
    for inner in gc.get_referents(value):
        # (zip() has its iterators in a tuple)
        yield from inner if type(inner) is tuple else (inner,)
