"""How the script asks for batches: in which frame, with `for` or by hand, and through which iterators."""

from __future__ import annotations

import dis
import gc
import inspect
import sys
from collections.abc import Iterator
from itertools import count, cycle, islice
from types import CodeType, FrameType, GeneratorType
from typing import Any

from ...objects import own
from . import ahead, bytecode

_LIBRARY = __name__.partition(".")[0] + "."
_COUNTERS: tuple[type, ...] = (type(iter(range(0))), type(iter([])), count)


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


def holders(iterator: Iterator[Any]) -> set[type]:
    """Return those of `cycle`, `islice` and `zip` that get their items from an iterator.

    A `zip` counts only if it has a range, a list or a count beside the iterator.

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


def generators_in(variables: dict[str, Any]) -> list[GeneratorType[Any, Any, Any]]:
    """Return the generators among variables."""
    return [one for one in variables.values() if type(one) is GeneratorType]


def may_begin_again(generator: GeneratorType[Any, Any, Any]) -> bool:
    """Whether a generator that is made again gives what this one gives next.

    One that has not begun does, and one that hands our batches on, keeps nothing and has nothing left to do.
    """
    frame, code = generator.gi_frame, generator.gi_code
    if frame is None or generator.gi_running:
        return False
    if inspect.getgeneratorstate(generator) == inspect.GEN_CREATED:
        return True
    kept = bytecode.live_before(code)[frame.f_lasti] & {*code.co_varnames, *code.co_cellvars}
    heads = frozenset(begin for begin, _ in bytecode.loops(code))
    held = [type(one) for one in gc.get_referents(generator, frame) if issubclass(type(one), Iterator)]
    return (
        bool(held)
        and all(own.module_of(one).startswith(_LIBRARY) for one in held)
        and kept.isdisjoint(bytecode.assigned(code))
        and not ahead.runs_behind(frame, heads)
    )
