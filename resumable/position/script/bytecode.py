"""Reads the bytecode of the script: its loops, its statements, and the variables that they access."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from types import CodeType
from typing import Literal

Name = str
"""A variable such as "best", an attribute such as "self.best", or an item such as "seen['best']"."""
_ENDS = ("POP_JUMP", "JUMP", "RETURN", "POP_TOP")
"""How the bytecode of a statement, or of a condition, ends if nothing is assigned."""
_SUBSCRIPTS = ("BINARY_SUBSCR", "STORE_SUBSCR", "COPY", "DUP_TOP_TWO")
"""What follows the key of an item: the last two stand in `seen["best"] += 1`."""
_NO_WAY_ON = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "RETURN", "RAISE", "RERAISE")

_JUMPS = {*dis.hasjrel, *dis.hasjabs} - {dis.opmap[name] for name in dis.opmap if name.startswith("SETUP_")}
"""All but those of Python 3.10 to a handler."""

Event = tuple[Literal["load", "store"], Name]


@dataclass
class Statement:
    """A statement of the script, or a condition, as its bytecode tells."""

    first: int
    events: list[Event] = field(default_factory=list)
    methods: set[str] = field(default_factory=set)
    is_condition: bool = False
    """Whether it decides which way the code takes."""

    def names(self, kind: str) -> set[Name]:
        return names_of(self.events, kind)

    def calls(self, functions: set[str]) -> bool:
        return not (self.methods | self.names("load")).isdisjoint(functions)

    def reads(self, states: frozenset[Name]) -> bool:
        """Whether it reads the RunState, or an attribute of it."""
        return any(name in states or name.partition(".")[0] in states for name in self.names("load"))


class Bytecode:
    """The instructions of a function that run if nothing is raised, and the variables that they access."""

    def __init__(self, code: CodeType) -> None:
        instructions = [*dis.get_instructions(code)]
        self._jumps = {one.offset: one.argval for one in instructions if one.opcode in _JUMPS}
        """Where each jump leads."""
        self.instructions = _without_handlers(instructions, self._jumps)

    @cached_property
    def events(self) -> dict[int, list[Event]]:
        """The variables that each instruction accesses, by its offset."""
        return _events(self.instructions)

    @cached_property
    def statements(self) -> list[Statement]:
        """The statements and conditions, in their order."""
        return [*_statements(self.instructions, self.events)]

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
def of_method(code: CodeType) -> tuple[frozenset[Name], frozenset[Name]]:
    """Return the names that a function may read before it stores them, and those that it stores."""
    read = Bytecode(code)
    return frozenset(read.read_first(read.instructions)), frozenset(read.accessed("store", read.instructions))


def _events(instructions: list[dis.Instruction]) -> dict[int, list[Event]]:
    """Return the variables that each instruction loads or stores, by its offset, in the order of both."""
    found: dict[int, list[Event]] = {}
    for number, one in enumerate(instructions):
        events: list[Event] = []
        found[one.offset] = events
        ways = _how(one.opname)
        if not ways:
            continue
        # From Python 3.12 on, one instruction accesses two variables.
        names = one.argval if isinstance(one.argval, tuple) else (one.argval,) * len(ways)
        events += zip(ways, map(str, names), strict=False)
        after = instructions[number + 1 : number + 4]
        if len(after) > 1 and after[0].opname in ("COPY", "DUP_TOP") and after[1].opname == "LOAD_ATTR":
            # As in `self.count += 1`.
            name = f"{events[-1][1]}.{after[1].argval}"
            events[-1:] = [("load", name), ("store", name)]
        elif after and after[0].opname in ("LOAD_ATTR", "STORE_ATTR") and not _is_method(after[0]):
            # Of two variables that are loaded at once, the attribute is the second one's.
            attribute = after.pop(0)
            events[-1] = _access(attribute), f"{events[-1][1]}.{attribute.argval}"
        if len(after) > 1 and after[1].opname in _SUBSCRIPTS and _is_constant_key(after[0]):
            item = _access(after[1]), f"{events[-1][1]}[{after[0].argval!r}]"
            # What reads an item reads its container too; what stores one leaves the container what it is.
            events[-1:] = [events[-1], item] if item[0] == "load" else [item]
        found[one.offset] = [(how, name) for how, name in events if name != "self"]
    return found


def names_of(events: list[Event], kind: str) -> set[Name]:
    return {name for how, name in events if how == kind}


def _access(one: dis.Instruction) -> Literal["load", "store"]:
    return "store" if one.opname.startswith("STORE_") else "load"


def _is_constant_key(one: dis.Instruction) -> bool:
    return one.opname == "LOAD_CONST" and type(one.argval) in (str, int)


@cache
def _how(opname: str) -> tuple[Literal["load", "store"], ...]:
    # LOAD_FAST_AND_CLEAR saves a variable while a comprehension runs.
    if opname == "LOAD_FAST_AND_CLEAR" or not opname.startswith(("LOAD_", "STORE_", "DELETE_")):
        return ()
    words = opname.replace("BORROW_", "").replace("DELETE_", "STORE_").split("_")
    if not {"FAST", "NAME", "GLOBAL", "DEREF"} & {*words}:
        return ()
    return tuple("load" if word == "LOAD" else "store" for word in words if word in ("LOAD", "STORE"))


_LOADS_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")


def _is_method(one: dis.Instruction) -> bool:
    """Whether an attribute is loaded in order to be called."""
    if one.opname == "LOAD_ATTR" and sys.version_info < (3, 11):
        # With keywords it is not loaded as a method there.
        return one.argval in ("backward", "save")
    is_flagged = sys.version_info >= (3, 12) and one.opname == "LOAD_ATTR" and bool((one.arg or 0) & 1)
    return one.opname == "LOAD_METHOD" or is_flagged


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
        if not one.opname.startswith(_NO_WAY_ON):
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
        if not one.opname.startswith(_NO_WAY_ON) and number + 1 < len(body):
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


def _statements(
    instructions: list[dis.Instruction], events: Mapping[int, list[Event]]
) -> Iterator[Statement]:
    now, has_stored, before, comprehension_ends = None, False, "", 0
    inside = {*_in_expressions(instructions)}
    for one, following in zip(instructions, [*instructions[1:], None], strict=True):
        if one.opname == "FOR_ITER" and before == "SWAP":
            # From Python 3.12 on, a comprehension is a loop in the middle of a statement.
            comprehension_ends = one.argval
        if now and one.offset < comprehension_ends:
            now.events += events[one.offset]
            continue
        # A value stored from a copy is still used: (n := n + 1) > 3.
        is_store = one.opname.startswith("STORE_") and before not in ("COPY", "DUP_TOP")
        before = one.opname
        if now and has_stored and not is_store:
            yield now
            now = None
        now = now or Statement(one.offset)
        now.events += events[one.offset]
        if one.opname in _LOADS_ATTRIBUTE and _is_method(one):
            now.methods.add(str(one.argval))
        has_stored = is_store
        is_loop = one.opname == "GET_ITER" and following is not None and following.opname == "FOR_ITER"
        if is_loop or (one.opname.startswith(_ENDS) and one.offset not in inside):
            now.is_condition = is_loop or "_IF_" in one.opname
            yield now
            now = None


def _in_expressions(instructions: list[dis.Instruction]) -> Iterator[int]:
    """Yield the offsets of the jumps of `x if y else z`, which chooses a value and no way."""
    for number, one in enumerate(instructions):
        depth, following = 0, number + 1
        while "POP_JUMP" in one.opname and following < len(instructions):
            step = instructions[following]
            if step.opname == "JUMP_FORWARD" and depth == 1:
                yield from (one.offset, step.offset)
            if step.opcode in _JUMPS or step.opname.startswith(_NO_WAY_ON):
                break
            depth += dis.stack_effect(step.opcode, step.arg, jump=False)
            if depth < 1:
                break
            following += 1
