"""Finds the variables whose values come to the head of a loop's body, or to its end."""

from __future__ import annotations

import dis
from collections.abc import Mapping

from .events import Event, Name, names_of
from .statements import NO_WAY_ON


def live_at_head(
    body: list[dis.Instruction], jumps: Mapping[int, int], events: Mapping[int, list[Event]]
) -> set[Name]:
    """Return the variables that a body may read before it stores them."""
    numbers = {one.offset: number for number, one in enumerate(body)}
    before: list[list[tuple[int, set[Name]]]] = [[] for _ in body]
    for number, one in enumerate(body):
        if (target := numbers.get(jumps.get(one.offset, -1))) is not None:
            known = _set_in_loop(body, number, events) if one.opname == "FOR_ITER" else set()
            before[target].append((number, known))
        if not one.opname.startswith(NO_WAY_ON) and number + 1 < len(body):
            before[number + 1].append((number, set()))
    accessed = [events[one.offset] for one in body]
    stored = [names_of(pairs, "store") if pairs else set() for pairs in accessed]
    live = [_read_first(pairs) if pairs else set() for pairs in accessed]
    waiting = [*range(len(body))]
    while waiting:
        number = waiting.pop()
        for earlier, known in before[number]:
            if new := live[number] - known - stored[earlier] - live[earlier]:
                live[earlier] |= new
                waiting.append(earlier)
    return live[0]


def left_at_end(
    body: list[dis.Instruction], jumps: Mapping[int, int], events: Mapping[int, list[Event]], ends: set[int]
) -> set[Name]:
    """Return the variables that may come to one of the ends of a body as they were at its head."""
    stored = {name for one in body for how, name in events[one.offset] if how == "store"}
    reads: list[Event] = [("load", name) for name in stored]
    at_end = {one.offset: [event for event in events[one.offset] if event[0] == "store"] for one in body}
    return live_at_head(body, jumps, {at: reads if at in ends else some for at, some in at_end.items()})


def _read_first(events: list[Event]) -> set[Name]:
    """Return the variables that an instruction loads before it stores them."""
    if len(events) == 2 and events[0] == ("store", events[1][1]):
        return set()
    return names_of(events, "load")


def _set_in_loop(body: list[dis.Instruction], number: int, events: Mapping[int, list[Event]]) -> set[Name]:
    """Return what is known at the end of the `for` at a place: it is taken to have run once at least."""
    end = body[number].argval
    inside = [other for other in body[number + 1 :] if other.offset < end]
    return {name for other in inside for how, name in events[other.offset] if how == "store"}
