"""What may still run in the body of a loop, from where a frame is."""

from __future__ import annotations

import dis
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from types import CodeType, FrameType

from . import bytecode

_NOTHING = ("RESUME", "POP_TOP", "EXTENDED_ARG", "CACHE", "NOP", "JUMP_", "LOAD_CONST", "RETURN_")


def may_name(
    frame: FrameType, heads: Collection[int], names: frozenset[str], codes: Iterable[CodeType]
) -> bool:
    """Whether a frame may come to one of `names` before it comes to the head of a loop.

    `heads`: where those are, as offsets. `codes`: the functions that may be called, which are known by name.
    """
    called = {*_names_in(_steps(frame.f_code, frame.f_lasti, frozenset(heads)))}
    by_name: dict[str, set[str]] = {}
    for code in codes:
        by_name.setdefault(code.co_name, set()).update(bytecode.names_in(code))
    waiting = [*called]
    while waiting and not called & names:
        new = by_name.get(waiting.pop(), set()) - called
        called |= new
        waiting += new
    return bool(called & names)


def _names_in(steps: Iterable[dis.Instruction]) -> Iterator[str]:
    for one in steps:
        if isinstance(one.argval, str):
            yield one.argval
        elif isinstance(one.argval, CodeType):
            yield from bytecode.names_in(one.argval)


@lru_cache(1024)
def _steps(
    code: CodeType, offset: int, heads: frozenset[int], *, with_errors: bool = True
) -> list[dis.Instruction]:
    """Return what may run after an instruction until one of `heads` comes, with those."""
    steps, found = bytecode.steps_of(code), list[dis.Instruction]()
    following: list[list[int]] = [[] for _ in steps]
    for number, later in bytecode.ways(code, steps, with_errors=with_errors):
        following[number].append(later)
    waiting = [number for number, one in enumerate(steps) if one.offset > offset][:1]
    seen = {*waiting}
    while waiting:
        number = waiting.pop()
        found.append(steps[number])
        if steps[number].offset not in heads:
            new = {*following[number]} - seen
            seen |= new
            waiting += new
    return found


def may_leave(code: CodeType, offset: int, heads: frozenset[int]) -> bool:
    """Whether the loop around an instruction may be left behind it, and may come to its head as well."""
    begin, end = max(_asking(code, heads).intersection(_around(code, offset)), default=(-1, -1))
    if begin not in heads:
        # A `while` reads its condition again.
        return False
    steps = [one for one in _steps(code, offset, heads, with_errors=False) if one.opname != "EXTENDED_ARG"]
    is_left = any(not begin <= one.offset <= end or one.opname.startswith("RETURN_") for one in steps)
    return is_left and any(one.offset == begin for one in steps)


def is_in_inner_loop(code: CodeType, offset: int, heads: frozenset[int]) -> bool:
    """Whether an instruction is in a loop that asks for nothing, in the body of one that does."""
    asking, around = _asking(code, heads), _around(code, offset)
    return bool(around) and around[-1] not in asking and not asking.isdisjoint(around)


def is_counted(code: CodeType, offset: int, heads: frozenset[int]) -> bool:
    """Whether the inner loop around an instruction is a `for` loop that is not ours."""
    around = _around(code, offset)
    begins = {one.offset for one in bytecode.steps_of(code) if one.opname == "FOR_ITER"}
    return bool(around) and around[-1][0] in begins - heads


def _around(code: CodeType, offset: int) -> list[tuple[int, int]]:
    """Return where the loops around an instruction begin and end, the innermost last."""
    return sorted(one for one in bytecode.loops(code) if one[0] <= offset <= one[1])


def _asking(code: CodeType, heads: frozenset[int]) -> set[tuple[int, int]]:
    """Return where the inner loop around each head begins and ends."""
    return {around[-1] for head in heads if (around := _around(code, head))}


def runs_behind(frame: FrameType, heads: frozenset[int] = frozenset()) -> bool:
    """Whether a frame does anything before it comes to the head of a loop, or returns."""
    steps = _steps(frame.f_code, frame.f_lasti, heads, with_errors=False)
    return any(one.offset not in heads and not one.opname.startswith(_NOTHING) for one in steps)
