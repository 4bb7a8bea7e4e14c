"""The index of an `enumerate` around our batches: it lies in a C struct, and is set there."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from typing import Any


def around(iterator: Iterator[Any]) -> list[enumerate[Any]]:
    """Return each `enumerate` that asks an iterator for its items."""
    return [one for one in gc.get_referrers(iterator) if type(one) is enumerate]


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
