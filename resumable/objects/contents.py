"""What counts of an object: atoms to the bit, others by their identity, and digests of much of either."""

from __future__ import annotations

import array
import contextlib
import datetime
import itertools
import json
import pathlib
import random
import types
from collections.abc import Collection, Hashable, Mapping
from operator import countOf
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from . import own

ATOMS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, range, slice, type(...), type(NotImplemented)}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format}
    | {datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone}
    | {pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PurePosixPath}
)
"""What has no objects in it, and never changes."""
MOST_ITEMS = 4096
"""Of more items in one object only a digest is kept."""
_ALSO_ATOMS = (np.generic, types.ModuleType)
"""With the classes derived from them; the variables of a module are looked at by themselves."""
_FEW = 16
_EQUAL = {bool, int, str, bytes, type(None), type(...)}
_PLAIN = {*_EQUAL, float}
"""Their texts differ if they do."""
_ROWS = {int: "q", float: "d"}

Mark = tuple[Any, ...]


class Held:
    """What an object holds by name: equal only for the same, bit for bit, in this process."""

    __slots__ = ("_known", "_names", "_values")

    def __init__(self, held: Mapping[Any, Any]) -> None:
        values = self._values = tuple(held.values())
        self._names = tuple(held)
        # Atoms are kept, so that no others get their identities.
        if ATOMS.issuperset(map(type, values)):
            self._known: tuple[Any, ...] = tuple(map(id, values))
        else:
            self._values = tuple(one if type(one) in ATOMS else mark(one) for one in values)
            self._known = tuple(id(one) if type(one) in ATOMS else one for one in self._values)

    def marks(self) -> dict[Any, Mark]:
        """Return the marks of what it holds."""
        pairs = zip(self._names, self._values, strict=True)
        return {name: mark(one) if type(one) in ATOMS else one for name, one in pairs}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Held):
            return NotImplemented
        if self._names == other._names and self._known == other._known:
            return True
        return self.marks() == other.marks()


class Content(NamedTuple):
    """What of an object counts: equal only for the same, bit for bit, in this process."""

    whole: tuple[Hashable, ...]
    held: Mapping[str, Held] = {}
    """By how a path goes on to it; without what only the digest has."""
    gone: Collection[int] = ()
    """The identities of objects that it does not count."""

    def but(self, identities: Collection[int]) -> Content:
        """Return a content that differs from any, and lacks the objects of these identities."""
        return Content((Content,), self.held, identities)

    def marks(self, how: str) -> dict[Any, Mark]:
        """Return the marks of what a path goes on to in one way, by name."""
        return {at: one for at, one in self.held[how].marks().items() if one[1] not in self.gone}


def is_atom(value: Any) -> bool:
    """Whether a value has no objects in it, and never changes; a tuple of atoms is one."""
    of = type(value)
    if of is tuple:
        return all(map(is_atom, value))
    return of in ATOMS or issubclass(of, _ALSO_ATOMS)


def mark(value: Any) -> Mark:
    """Return a stand-in for a value: an atom itself, to the bit, or the identity of an object."""
    of = type(value)
    if of in _EQUAL:
        # Python writes no decimals of a large one.
        return of, hex(value) if of is int and value.bit_length() > 4000 else value
    if of is float and value and value == value:
        return of, value
    if of in ATOMS:
        return of, repr(value)
    if of is tuple and is_atom(value):
        return of, tuple(map(mark, value))
    if of is itertools.count:
        # It cannot be filled in place: what holds it gets another.
        return of, id(value), repr(value)
    if issubclass(of, np.generic):
        return of, value.dtype.str, value.tobytes()
    # The class of an object of the script may become another one.
    return object if own.is_own_class(of) else of, id(value)


def types_of(items: Collection[Any]) -> set[type]:
    """Return the types of values; those of millions of one type are counted faster than collected."""
    of = type(next(iter(items), None))
    return {of} if countOf(map(type, items), of) == len(items) else {*map(type, items)}


def row(items: Collection[Any], types: Collection[type] = ()) -> Hashable:
    """Return what of values counts: marks of a few, a digest of many."""
    return tuple(map(mark, items)) if len(items) <= _FEW else digest(items, types)


def digest(items: Collection[Any], types: Collection[type] = ()) -> bytes:
    """Return a digest of values, of atoms to the bit and of others by their identity; `types`: if known."""
    types = types or types_of(items)
    # An integer may be too long for a row, or even for decimals; another thread may change a list.
    with contextlib.suppress(OverflowError, TypeError, ValueError, IndexError):
        of = next(iter(types), object)
        if len(types) == 1 and own.is_own_class(of):
            items, of = [*map(id, items)], int
        if len(types) == 1 and (code := _ROWS.get(of, "")):
            return xxhash.xxh3_128_digest(array.array(code, items)) + code.encode()
        if _PLAIN.issuperset(types):
            return _of_text([*items])
    return _of_text([*map(mark, items)])


def _of_text(items: list[Any]) -> bytes:
    return xxhash.xxh3_128_digest(repr(items).encode(errors="surrogatepass"))


def state_of(generator: Any) -> Any:
    """Return the state of a random generator."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    is_old = isinstance(generator, np.random.RandomState)
    return generator.get_state(legacy=False) if is_old else generator.get_state()


def of_generator(generator: Any) -> str:
    """Return the state of a random generator as a text, the same in every process."""
    return json.dumps(state_of(generator), default=lambda one: np.asarray(one).tobytes().hex())
