"""Reads the bytecode of the script: its loops, its statements, and the variables that they access."""

from __future__ import annotations

import dis
from collections.abc import Mapping
from functools import cache, cached_property
from types import CodeType

from .events import Event, Name, events_of, names_of
from .statements import JUMPS, NO_WAY_ON, Statement, statements_of


class Bytecode:
    """The instructions of a function that run if nothing is raised, and the variables that they access."""

    def __init__(self, code: CodeType) -> None:
        instructions = [*dis.get_instructions(code)]
        self._jumps = {one.offset: one.argval for one in instructions if one.opcode in JUMPS}
        """Where each jump leads."""
        self.instructions = _without_handlers(instructions, self._jumps)
        self._shown: dict[int, list[Statement] | None] = {}

    @cached_property
    def events(self) -> dict[int, list[Event]]:
        """The variables that each instruction accesses, by its offset."""
        return events_of(self.instructions)

    @cached_property
    def statements(self) -> list[Statement]:
        """The statements and conditions, in their order."""
        return [*statements_of(self.instructions, self.events)]

    def shown_by(self, condition: Statement) -> list[Statement] | None:
        """Return the statements that a condition decides on; None if one does more than show something."""
        if condition.first not in self._shown:
            self._shown[condition.first] = self._find_shown(condition)
        return self._shown[condition.first]

    def _find_shown(self, condition: Statement) -> list[Statement] | None:
        if condition.last not in self._jumps:
            return None
        numbers = {one.offset: number for number, one in enumerate(self.instructions)}
        number, jump = numbers[condition.last], self._jumps[condition.last]
        ways = {number + 1}, {numbers[jump]} if jump > condition.last else set[int]()
        decided = self._reached(ways[0], numbers) ^ self._reached(ways[1], numbers)
        if any(self.instructions[one].opname.startswith(("RETURN", "RAISE")) for one in decided):
            return None
        offsets = {self.instructions[one].offset for one in decided}
        found = [one for one in self.statements if one.first in offsets or one.last in offsets]
        return found if all(one.only_shows() for one in found) else None

    def _reached(self, waiting: set[int], numbers: Mapping[int, int]) -> set[int]:
        """Return the instructions that come before the next one that jumps back."""
        found = set[int]()
        while waiting:
            number = waiting.pop()
            found.add(number)
            one = self.instructions[number]
            following = [] if one.opname.startswith(NO_WAY_ON) else [number + 1]
            if self._jumps.get(one.offset, -1) > one.offset:
                following.append(numbers[self._jumps[one.offset]])
            waiting.update({*following} - found)
        return found

    def loops_around(self, at: int) -> dict[int, int]:
        """Return the first and the last offset of each loop that a place is in."""
        return _loops_around(self.instructions, self._jumps, at)

    def between(self, first: int, last: int) -> list[dis.Instruction]:
        """Return the instructions of a body."""
        return [one for one in self.instructions if first <= one.offset <= last]

    def accessed(self, how: str, body: list[dis.Instruction]) -> set[Name]:
        """Return the variables that a body loads, or those that it stores."""
        return names_of([event for one in body for event in self.events[one.offset]], how)

    def read_first(self, body: list[dis.Instruction]) -> set[Name]:
        """Return the variables that a body may read before it stores them."""
        return _live_at_head(body, self._jumps, self.events)

    def left_at_end(self, body: list[dis.Instruction]) -> set[Name]:
        """Return the variables that may come to the end of a body as they were at its head."""
        return _left_at_end(body, self._jumps, self.events)


@cache
def is_in_loop(code: CodeType, at: int) -> bool:
    """Whether a place in a function is inside a loop."""
    return bool(Bytecode(code).loops_around(at))


@cache
def reads_global(code: CodeType, names: frozenset[str]) -> bool:
    """Whether a function reads one of these globals or builtins: an attribute of that name does not count."""
    return not names.isdisjoint(code.co_names) and any(
        one.argval in names
        for one in dis.get_instructions(code)
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    )


@cache
def updated_and_used(code: CodeType) -> tuple[frozenset[Name], frozenset[Name]]:
    """Return the names to which a function gives values made from their own, and those that it uses.

    To use is more than to make the next value, or to show it.
    """
    read = Bytecode(code)
    used, shown = set[Name](), set[int]()
    for one in read.statements:
        if one.is_condition and (decided := read.shown_by(one)) is not None:
            shown |= {one.first, *(other.first for other in decided)}
        is_shown = one.first in shown or (one.functions | one.methods and one.only_shows())
        used |= set() if is_shown else one.names("load") - one.names("store")
    stored = read.accessed("store", read.instructions)
    return frozenset(name for name in stored if _comes_to_itself(name, read.statements)), frozenset(used)


def _comes_to_itself(name: Name, statements: list[Statement]) -> bool:
    """Whether a variable is stored by a statement that loads it, or what was made from it."""
    known, size = {name}, 0
    while size < len(known):
        size = len(known)
        for one in statements:
            if one.names("load") & known:
                if name in one.names("store"):
                    return True
                known |= one.names("store")
    return False


@cache
def of_method(code: CodeType) -> tuple[frozenset[Name], frozenset[Name]]:
    """Return the names that a function may read before it stores them, and those that it stores."""
    read = Bytecode(code)
    return frozenset(read.read_first(read.instructions)), frozenset(read.accessed("store", read.instructions))


def _without_handlers(instructions: list[dis.Instruction], jumps: Mapping[int, int]) -> list[dis.Instruction]:
    """Leave out what only an exception leads to: it jumps back to where the code continues."""
    numbers = {one.offset: number for number, one in enumerate(instructions)}
    reached: set[int] = set()
    waiting = [0]
    while waiting:
        number = waiting.pop()
        if number in reached or number == len(instructions):
            continue
        reached.add(number)
        one = instructions[number]
        if one.offset in jumps:
            waiting.append(numbers[jumps[one.offset]])
        if not one.opname.startswith(NO_WAY_ON):
            waiting.append(number + 1)
    return [instructions[number] for number in sorted(reached)]


def _loops_around(instructions: list[dis.Instruction], jumps: Mapping[int, int], at: int) -> dict[int, int]:
    """Return the first and the last offset of each loop that a place is in."""
    found: dict[int, int] = {}
    for one in instructions:
        head = jumps.get(one.offset, at + 1)
        # An await jumps back too, with NO_INTERRUPT, until it has what it waits for.
        if head <= at <= one.offset and "NO_INTERRUPT" not in one.opname:
            found[head] = max(one.offset, found.get(head, 0))
    return found


def _live_at_head(
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


def _left_at_end(
    body: list[dis.Instruction], jumps: Mapping[int, int], events: Mapping[int, list[Event]]
) -> set[Name]:
    """Return the variables that may come to the end of a body as they were at its head."""
    stored = {name for one in body for how, name in events[one.offset] if how == "store"}
    last = body[-1].offset
    reads: list[Event] = [("load", name) for name in stored]
    at_end = {one.offset: [event for event in events[one.offset] if event[0] == "store"] for one in body}
    backward = {one.offset for one in body if jumps.get(one.offset) == body[0].offset} | {last}
    return _live_at_head(body, jumps, {at: reads if at in backward else some for at, some in at_end.items()})


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
