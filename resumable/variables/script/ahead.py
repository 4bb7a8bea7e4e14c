"""What may still run in the body of a loop."""

from __future__ import annotations

import dis
from collections.abc import Collection, Iterable, Iterator
from types import CodeType, FrameType

from . import bytecode


def may_name(
    frame: FrameType, heads: Collection[int], names: frozenset[str], codes: Iterable[CodeType]
) -> bool:
    """Whether a frame may come to one of `names` before it comes to the head of a loop.

    `heads`: where those are, as offsets. `codes`: the functions that may be called, which are known by name.
    """
    called = {*_names_before(frame.f_code, frame.f_lasti, frozenset(heads))}
    by_name: dict[str, set[str]] = {}
    for code in codes:
        by_name.setdefault(code.co_name, set()).update(bytecode.names_in(code))
    waiting = [*called]
    while waiting and not called & names:
        new = by_name.get(waiting.pop(), set()) - called
        called |= new
        waiting += new
    return bool(called & names)


def _names_before(code: CodeType, offset: int, heads: frozenset[int]) -> Iterator[str]:
    steps = [*dis.get_instructions(code)]
    following: list[list[int]] = [[] for _ in steps]
    for number, later in bytecode.ways(code, steps):
        following[number].append(later)
    waiting = [number for number, one in enumerate(steps) if one.offset > offset][:1]
    seen = {*waiting}
    while waiting:
        one = steps[number := waiting.pop()]
        if one.offset in heads:
            continue
        if isinstance(one.argval, str):
            yield one.argval
        elif isinstance(one.argval, CodeType):
            yield from bytecode.names_in(one.argval)
        new = {*following[number]} - seen
        seen |= new
        waiting += new
