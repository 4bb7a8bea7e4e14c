"""Sure signs of what no checkpoint can have: open files, threads, locks, and iterators that have begun."""

from __future__ import annotations

import io
import itertools
import multiprocessing.process
import socket
import subprocess
import threading
from collections.abc import Collection, Iterable, Iterator
from types import AsyncGeneratorType, CoroutineType, FunctionType, GeneratorType
from typing import Any, TypeVar

from ..objects import contents, kinds, own, slots
from .atoms import Hole

T = TypeVar("T", bound=Iterable[Any])
_MOST_NODES = 300

_LIVE: tuple[tuple[str, tuple[type, ...]], ...] = (
    ("an open file", (io.IOBase,)),
    ("a socket", (socket.socket,)),
    ("a thread", (threading.Thread,)),
    ("a process", (multiprocessing.process.BaseProcess,)),
    ("a command that runs", (subprocess.Popen,)),
    ("a lock", (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event)),
    ("a generator", (GeneratorType, CoroutineType, AsyncGeneratorType)),
)


def live(value: Any) -> str | None:
    """Return what an object is if it stands for something outside of this process' memory, or has begun.

    >>> live(iter([1, 2])), live(threading.Lock()), live([1, 2])
    ('an iterator', 'a lock', None)
    """
    return None if type(value) in contents.ATOMS else _live(type(value))


@own.by_class
def _live(of: type) -> str | None:
    for name, some in _LIVE:
        if issubclass(of, some):
            return name
    is_iterator = issubclass(of, Iterator) and of is not itertools.count and not own.is_own_class(of)
    return "an iterator" if is_iterator else None


def begun(value: Any) -> str | None:
    """Return what an object is if it gives items that are gone then: an iterator, or a generator."""
    found = live(value)
    return found if found in ("an iterator", "a generator") else None


def inside(value: Any) -> str | None:
    """Return what of this kind an object of the script holds as one of its attributes."""
    if type(value) in contents.ATOMS or kinds.kind_of(value) != "object":
        return None
    return among(slots.attributes(value).values())


def among(held: Collection[Any]) -> str | None:
    """Return what of this kind is among some values."""
    if contents.ATOMS.issuperset(map(type, held)):
        return None
    return next((found for one in held if type(one) not in contents.ATOMS and (found := live(one))), None)


def holds_graph(tensor: Any) -> bool:
    """Whether a tensor has a graph that `backward()` can still use, and that has not been used yet."""
    waiting, seen, is_found = [tensor.grad_fn], dict[int, Any](), False
    while waiting and len(seen) < _MOST_NODES:
        if (node := waiting.pop()) is None or id(node) in seen:
            continue
        seen[id(node)] = node
        try:
            for name in _saved_by(type(node)):
                # With a hook it is computed again as it is read.
                if getattr(getattr(node, name), "unpack_hook", None) is None:
                    getattr(node, name.removeprefix("_raw"), None)
                is_found = True
        except RuntimeError:
            # What it needs is freed, or changed.
            return False
        waiting += [one for one, _ in node.next_functions]
    return is_found


@own.by_class
def _saved_by(of: type) -> list[str]:
    """Return the attributes in which nodes of a graph keep what `backward()` needs, packed."""
    return [one for one in dir(of) if one.startswith("_raw_saved_")]


def is_own(function: Any) -> bool:
    """Whether something is a function that the script defines."""
    return type(function) is FunctionType and own.is_own_code(function.__code__)


def hashed(keys: T) -> T:
    """Return the keys of a dict or a set; Hole if one has no hash, or one that the script computes."""
    types = {id(of): of for of in map(type, keys)}
    for of in types.values():
        if _has_own_hash(of):
            raise Hole(f"a key of {of.__name__}, whose __hash__ is the script's")
    for one in keys if any(issubclass(of, tuple) for of in types.values()) else ():
        if isinstance(one, tuple):
            hashed(one)
    try:
        frozenset(keys)
    except TypeError as exc:
        raise Hole(str(exc)) from exc
    return keys


@own.by_class
def _has_own_hash(of: type) -> bool:
    held = (own.namespace(one) for one in of.__mro__)
    return is_own(next(one["__hash__"] for one in held if "__hash__" in one))
