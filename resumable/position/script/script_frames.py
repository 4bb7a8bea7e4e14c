"""Finds the script's frames, and how it asks for batches: with for, by hand, or through itertools."""

from __future__ import annotations

import dis
import gc
import inspect
import sys
from collections.abc import Iterator
from itertools import cycle, islice
from types import CodeType, FrameType, GeneratorType
from typing import Any

from ...loaders.generators import code_names

_LIBRARY = __name__.partition(".")[0] + "."
_COUNTERS: tuple[type, ...] = (type(iter(range(0))), type(iter([])))


def holders(iterator: Iterator[Any]) -> set[type]:
    """Return those of `cycle`, `islice` and `zip` that get their items from an iterator.

    A `zip` counts only if it has a range or a list beside the iterator.

    >>> batches = map(str, range(3))
    >>> first_two = islice(batches, 2)
    >>> holders(batches) == {islice}
    True
    """
    found: set[type] = set()
    for holder in _referrers(iterator):
        if type(holder) in (cycle, islice):
            found.add(type(holder))
        elif type(holder) is tuple and any(type(item) in _COUNTERS for item in holder):
            found |= {zip} & {type(outer) for outer in _referrers(holder)}
    return found


def _referrers(value: Any) -> list[Any]:
    # Without frames: the one that asks would be kept alive by what it is given, and the iterator with it.
    # Among all objects, not only young ones: zip() and enumerate() are older than the iterator they ask for.
    return [one for one in gc.get_referrers(value) if type(one) is not FrameType]


def numbers(iterator: Iterator[Any], frame: FrameType) -> Iterator[int]:
    """Yield the number of each `enumerate` around an iterator, or around the generator that asks it.

    `frame` is the one that asks.

    >>> batches = map(str, range(3))
    >>> numbered = enumerate(batches, start=4)
    >>> import sys
    >>> [*numbers(batches, sys._getframe())]
    [4]
    """
    around = _referrers(iterator)
    if frame.f_code.co_flags & inspect.CO_GENERATOR:
        generators = [one for one in gc.get_objects() if type(one) is GeneratorType and one.gi_running]
        for generator in generators:
            around += _referrers(generator) if generator.gi_frame is frame else []
    for one in around:
        if type(one) is enumerate:
            yield int(one.__reduce__()[1][1])


def of_script(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those around it, as far as they run the user's own code."""
    while frame:
        if code_names.is_own_code(frame.f_code, frame.f_globals):
            yield frame
        frame = frame.f_back


def caller() -> FrameType | None:
    """Return the frame of the script that has called the library."""
    frame: FrameType | None = sys._getframe(1)
    while frame and frame.f_globals.get("__name__", "").startswith(_LIBRARY):
        frame = frame.f_back
    return frame


def is_break(code: CodeType | None) -> bool:
    """Whether a loop in this code of the script is being left by `break` or `return`, not by an error."""
    frame = caller()
    if frame is None or frame.f_code is not code:
        return False
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] in ("POP_TOP", "POP_ITER")


def is_call(frame: FrameType) -> bool:
    """Whether a frame is calling a function just now, such as next(), and not looping with for."""
    # 3.11 has two instructions for a call, and 3.10 several kinds.
    return "CALL" in dis.opname[frame.f_code.co_code[frame.f_lasti]]
