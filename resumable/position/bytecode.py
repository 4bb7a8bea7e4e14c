"""Which variables a loop of the script carries from one body to the next, as its bytecode tells."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import CodeType
from typing import Literal

Name = str
"""A variable, such as "best", or an attribute of one, such as "self.best"."""
_TRAINS = {"backward", "step"}
"""Methods that change what is trained: what they are called on or given decides how."""
_SEEDS = {"manual_seed", "seed", "set_state", "setstate"}
_ENDS = ("POP_JUMP", "JUMP", "RETURN", "GET_ITER", "POP_TOP")
"""How the bytecode of a statement, or of a condition, ends if nothing is assigned."""
_NO_WAY_ON = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "RETURN", "RAISE", "RERAISE")

Event = tuple[Literal["load", "store"], Name]


@dataclass
class _Statement:
    """A statement of the script, or a condition, as its bytecode tells."""

    first: int
    events: list[Event] = field(default_factory=list)
    methods: set[str] = field(default_factory=set)
    is_condition: bool = False
    """Whether it decides which way the code takes."""

    def names(self, kind: str) -> set[Name]:
        return {name for how, name in self.events if how == kind}

    def reads(self, states: frozenset[Name]) -> bool:
        """Whether it reads the RunState, or an attribute of it."""
        return any(name in states or name.partition(".")[0] in states for name in self.names("load"))


@dataclass(frozen=True)
class Carried:
    """The variables that decide in the loops around a place, and come there from the body before."""

    assigned: frozenset[Name] = frozenset()
    """Those that a body assigns."""
    kept: frozenset[Name] = frozenset()
    """Those that it only reads: an object, or a list, may change all the same."""
    used: frozenset[Name] = frozenset()
    """All that the loops read, and neither make in each body nor seed."""
    made: frozenset[Name] = frozenset()
    """Those that each body assigns before it reads them."""
    restarted: frozenset[Name] = frozenset()
    """Those that an inner loop carries, and that each body of the outermost one assigns first."""
    named: frozenset[Name] = frozenset()
    """All that the loops read or assign."""


@cache
def carried(code: CodeType, at: int, states: frozenset[Name]) -> Carried:
    """Return the variables that decide in the loops around a place.

    `states` are the names of the RunState: what it assigns before the loops is restored.
    """
    instructions = _without_handlers([*dis.get_instructions(code)])
    events = _events(instructions)
    loops = {
        head: end
        for head, end in _loops_around(instructions, at).items()
        # (one that makes the RunState is around the training)
        if not any(head <= at <= end and ("store", one) in events[at] for at in events for one in states)
    }
    if not loops:
        return Carried()
    start = min(loops)
    statements = [*_statements(instructions, events)]
    found: set[Name] = set()
    kept: set[Name] = set()
    used: set[Name] = set()
    assigned: set[Name] = set()
    outer: set[Name] = set()
    for head, end in loops.items():
        body = [one for one in instructions if head <= one.offset <= end]
        inside = [event for one in body for event in events[one.offset]]
        stored = {name for how, name in inside if how == "store"}
        loaded = {name for how, name in inside if how == "load"}
        live = _live_at_head(body, events)
        found |= live & stored
        kept |= loaded
        if head == start:
            used, assigned, outer = live - stored, stored, live
    kept -= assigned
    before = [one for one in statements if one.first < start]
    restored = {name for one in before if one.reads(states) for _, name in one.events}
    given = {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]}
    given -= {name for one in before for name in one.names("store")}
    body_of_all = [one for one in statements if start <= one.first <= loops[start]]
    used -= {name for one in body_of_all if one.methods & _SEEDS for name in one.names("load")}
    known = states | restored | given
    return Carried(
        frozenset(name for name in found - known if _decides(name, body_of_all, states)),
        frozenset(name for name in kept - found - known if _decides(name, body_of_all, states)),
        frozenset(used - states),
        frozenset(assigned - found),
        frozenset(found & assigned - outer),
        frozenset(assigned | used | kept | found),
    )


@cache
def is_in_loop(code: CodeType, at: int) -> bool:
    """Whether a place in a function is inside a loop."""
    return bool(_loops_around(_without_handlers([*dis.get_instructions(code)]), at))


@cache
def of_method(code: CodeType) -> tuple[frozenset[Name], frozenset[Name]]:
    """Return the names that a function may read before it stores them, and those that it stores."""
    instructions = _without_handlers([*dis.get_instructions(code)])
    events = _events(instructions)
    stored = {name for some in events.values() for how, name in some if how == "store"}
    return frozenset(_live_at_head(instructions, events)), frozenset(stored)


def _events(instructions: list[dis.Instruction]) -> dict[int, list[Event]]:
    """Return the variables that each instruction loads or stores, by its offset, in the order of both."""
    found: dict[int, list[Event]] = {}
    for one, following in zip(instructions, [*instructions[1:], None], strict=True):
        events = _variables_in(one)
        is_attribute = following is not None and following.opname in ("LOAD_ATTR", "STORE_ATTR")
        if events and is_attribute and following and not _is_method(following):
            # (of two that are loaded at once, the attribute is the second one's)
            how: Literal["load", "store"] = "store" if following.opname == "STORE_ATTR" else "load"
            events[-1] = how, f"{events[-1][1]}.{following.argval}"
        found[one.offset] = [(how, name) for how, name in events if name != "self"]
    return found


def _variables_in(one: dis.Instruction) -> list[Event]:
    """Return what an instruction loads and stores; from Python 3.12 on one does two."""
    names = one.argval if isinstance(one.argval, tuple) else (one.argval,) * len(_how(one.opname))
    return [(how, str(name)) for how, name in zip(_how(one.opname), names, strict=False)]


@cache
def _how(opname: str) -> tuple[Literal["load", "store"], ...]:
    # (LOAD_FAST_AND_CLEAR keeps a variable safe while a comprehension runs)
    if opname == "LOAD_FAST_AND_CLEAR" or not opname.startswith(("LOAD_", "STORE_", "DELETE_")):
        return ()
    words = opname.replace("BORROW_", "").replace("DELETE_", "STORE_").split("_")
    if not {"FAST", "NAME", "GLOBAL", "DEREF"} & {*words}:
        return ()
    return tuple("load" if word == "LOAD" else "store" for word in words if word in ("LOAD", "STORE"))


def _is_method(one: dis.Instruction) -> bool:
    """Whether an attribute is loaded in order to be called."""
    if one.opname == "LOAD_ATTR" and sys.version_info < (3, 11):
        # (with keywords it is not loaded as a method there)
        return one.argval in ("backward", "save")
    is_flagged = sys.version_info >= (3, 12) and one.opname == "LOAD_ATTR" and bool((one.arg or 0) & 1)
    return one.opname == "LOAD_METHOD" or is_flagged


def _without_handlers(instructions: list[dis.Instruction]) -> list[dis.Instruction]:
    """Leave out what only an exception leads to: it jumps back to where the code goes on."""
    numbers = {one.offset: number for number, one in enumerate(instructions)}
    reached: set[int] = set()
    waiting = [0]
    while waiting:
        number = waiting.pop()
        if number in reached or number == len(instructions):
            continue
        reached.add(number)
        one = instructions[number]
        waiting += [numbers[one.argval]] if _is_jump(one) else []
        waiting += [] if one.opname.startswith(_NO_WAY_ON) else [number + 1]
    return [instructions[number] for number in sorted(reached)]


def _is_jump(one: dis.Instruction) -> bool:
    if one.opname.startswith("SETUP_"):
        # (in 3.10: to a handler)
        return False
    return one.opcode in dis.hasjrel or one.opcode in dis.hasjabs


def _loops_around(instructions: list[dis.Instruction], at: int) -> dict[int, int]:
    """Return the first and the last offset of each loop that a place is in."""
    found: dict[int, int] = {}
    for one in instructions:
        # (NO_INTERRUPT is how an await waits)
        if _is_jump(one) and one.argval <= at <= one.offset and "NO_INTERRUPT" not in one.opname:
            found[one.argval] = max(one.offset, found.get(one.argval, 0))
    return found


def _live_at_head(body: list[dis.Instruction], events: Mapping[int, list[Event]]) -> set[Name]:
    """Return the variables that a body may read before it stores them."""
    numbers = {one.offset: number for number, one in enumerate(body)}
    after: list[list[tuple[int, frozenset[Name]]]] = []
    for number, one in enumerate(body):
        is_inside = _is_jump(one) and one.argval in numbers
        ways = [(numbers[one.argval], _set_in_loop(body, number, events))] if is_inside else []
        ends = one.opname.startswith(_NO_WAY_ON)
        after.append(ways if ends or number + 1 == len(body) else [*ways, (number + 1, frozenset())])
    live: list[frozenset[Name]] = [frozenset()] * len(body)
    is_done = False
    while not is_done:
        is_done = True
        for number in reversed(range(len(body))):
            now = frozenset().union(*(live[way] - known for way, known in after[number]))
            for how, name in reversed(events[body[number].offset]):
                now = now | {name} if how == "load" else now - {name}
            is_done &= now == live[number]
            live[number] = now
    return set(live[0])


def _set_in_loop(
    body: list[dis.Instruction], number: int, events: Mapping[int, list[Event]]
) -> frozenset[Name]:
    """Return what is known at the end of the `for` at a place: it is taken to have run once at least."""
    one = body[number]
    if one.opname != "FOR_ITER":
        return frozenset()
    inside = (other for other in body[number + 1 :] if other.offset < one.argval)
    return frozenset(name for other in inside for how, name in events[other.offset] if how == "store")


def _statements(
    instructions: list[dis.Instruction], events: Mapping[int, list[Event]]
) -> Iterator[_Statement]:
    now, has_stored, before = None, False, ""
    inside = {*_in_expressions(instructions)}
    for one in instructions:
        # What is stored from a copy goes on to be used: (n := n + 1) > 3.
        is_store = one.opname.startswith("STORE_") and before not in ("COPY", "DUP_TOP")
        before = one.opname
        if now and has_stored and not is_store:
            yield now
            now = None
        now = now or _Statement(one.offset)
        now.events += events[one.offset]
        if _is_method(one):
            now.methods.add(str(one.argval))
        has_stored = is_store
        if one.opname.startswith(_ENDS) and one.offset not in inside:
            now.is_condition = "_IF_" in one.opname or one.opname == "GET_ITER"
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
            if _is_jump(step) or step.opname.startswith(_NO_WAY_ON):
                break
            depth += dis.stack_effect(step.opcode, step.arg, jump=False)
            if depth < 1:
                break
            following += 1


def _decides(name: Name, statements: list[_Statement], states: frozenset[Name]) -> bool:
    """Whether a variable, or what comes of it, decides which way the code takes or what is trained."""
    known, size = {name}, 0
    while size < len(known):
        size = len(known)
        for one in statements:
            if not one.names("load") & known:
                continue
            is_metric = "save" in one.methods and one.reads(states)
            if one.is_condition or is_metric or one.methods & _TRAINS:
                return True
            known |= one.names("store")
    return False
