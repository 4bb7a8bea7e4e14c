"""What asks our loops for batches; the index of an `enumerate` lies in a C struct, and is set there."""

from __future__ import annotations

import ctypes
import gc
import itertools
import sys
from collections.abc import Iterator
from types import FrameType, GeneratorType
from typing import Any

_PASSING = (enumerate, itertools.islice, map, filter, GeneratorType)


def around(iterator: Iterator[Any], asked_by: FrameType | None) -> list[Any]:
    """Return the iterators and generators that get their items from another, the inner ones first.

    It reads all objects that there are, which takes milliseconds.

    `asked_by`: the frame that asks the iterator just now, which may be a generator's.

    >>> numbers = iter([7])
    >>> around(numbers, None)
    []
    >>> outer = enumerate(map(str, enumerate(numbers, 3)), 2)
    >>> [type(one).__name__ for one in around(numbers, None)]
    ['enumerate', 'map', 'enumerate']
    """
    found: list[Any] = [iterator]
    done = 0
    while done < len(found):
        found += (one for one in _holders(found[done]) if not any(one is it for it in found))
        done += 1
        if done == len(found) and asked_by is not None:
            # A generator that runs does not show what it holds, only its frame.
            found += [one for one in gc.get_referrers(asked_by) if _runs_in(one, asked_by)]
            asked_by = asked_by.f_back
    return found[1:]


def _holders(value: Any) -> Iterator[Any]:
    for one in gc.get_referrers(value):
        if type(one) in _PASSING:
            yield one
        elif type(one) is tuple:
            # Several iterators are held together.
            yield from (outer for outer in gc.get_referrers(one) if type(outer) in (map, zip))


def _runs_in(one: Any, frame: FrameType) -> bool:
    return type(one) is GeneratorType and one.gi_frame is frame


def index_of(one: enumerate[Any]) -> int:
    """Return the index that an `enumerate` gives next.

    >>> index_of(enumerate("abc", start=5))
    5
    """
    reduced: Any = one.__reduce__()
    index: int = reduced[1][1]
    return index


def set_index(one: enumerate[Any], index: int) -> bool:
    """Let an `enumerate` go on with an index; return False, with all as it was, where that cannot be done.

    >>> numbered = enumerate("abc")
    >>> set_index(numbered, 7), next(numbered)
    (True, (7, 'a'))
    """
    before = index_of(one)
    if sys.implementation.name != "cpython" or not 0 <= index < sys.maxsize > before:
        return False
    # The first field behind the header of the object; what it says of itself is the proof.
    place = ctypes.c_ssize_t.from_address(id(one) + object.__basicsize__)
    if place.value != before:
        return False
    place.value = index
    if index_of(one) == index:
        return True
    place.value = before
    return False
