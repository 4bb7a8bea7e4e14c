"""Sure signs of what no checkpoint can have: open files, threads, locks, and iterators that have begun."""

from __future__ import annotations

import io
import itertools
import multiprocessing.process
import socket
import subprocess
import threading
from collections.abc import Iterator
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from ..objects import kinds, own, slots

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
    return _live(type(value))


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
    if kinds.kind_of(value) != "object":
        return None
    held = slots.attributes(value).values()
    return next((found for one in held if type(one) not in kinds.ATOMS and (found := live(one))), None)
