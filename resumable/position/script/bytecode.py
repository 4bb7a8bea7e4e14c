"""Reads the bytecode of the script: its loops, its statements, and the variables that they access."""

from __future__ import annotations

import dis
from collections.abc import Mapping
from functools import cache, cached_property
from itertools import pairwise
from types import CodeType

from .events import (
    JUMPS,
    Call,
    Calls,
    Event,
    Name,
    Written,
    begin_of,
    call_of,
    events_of,
    instructions_of,
    is_constant_key,
    names_of,
    renamed,
    root_of,
)
from .liveness import left_at_end, live_at_head
from .statements import NO_WAY_ON, Statement, statements_of


class Bytecode:
    """The instructions of a function that run if nothing is raised, and the variables that they access.

    `names` are other names for its variables.
    """

    def __init__(self, code: CodeType, calls: Calls = (), names: tuple[tuple[Name, Name], ...] = ()) -> None:
        self._calls, self._names, self._constants = calls, dict(names), code.co_consts
        instructions = instructions_of(code)
        self._jumps = {one.offset: one.argval for one in instructions if one.opcode in JUMPS}
        """Where each jump leads."""
        self.instructions = _without_handlers(instructions, self._jumps)
        self._shown: dict[tuple[int, bool], list[Statement] | None] = {}

    @cached_property
    def _own_events(self) -> dict[int, list[Event]]:
        """The variables that each instruction accesses by itself, by its offset."""
        found = events_of(self.instructions, self._constants)
        if self._names:
            found = {
                at: [(how, renamed(name, self._names)) for how, name in some] for at, some in found.items()
            }
        return found

    @cached_property
    def events(self) -> dict[int, list[Event]]:
        """The variables that each instruction accesses, or the function that it loads, by its offset."""
        found = {**self._own_events}
        for at, _, call in self._calls:
            if at in found:
                found[at] = found[at] + [("load", name) for name in call.read | call.left]
                found[at] += [("store", name) for name in call.stored]
        return found

    @cached_property
    def stores(self) -> list[tuple[int, set[Name]]]:
        """The instructions that store variables: their offsets, and the variables."""
        return [
            (offset, stored) for offset, some in self.events.items() if (stored := names_of(some, "store"))
        ]

    @cached_property
    def statements(self) -> list[Statement]:
        """The statements and conditions, in their order."""
        found = [*statements_of(self.instructions, self._own_events)]
        for at, end, call in self._calls:
            for one in found:
                if one.first <= at <= one.last:
                    one.decides |= call.decides
                    arguments = self._arguments(end, call)
                    one.decides.update(*(arguments[name] for name in call.given))
                    one.passes += [(arguments.get(name, {name}), targets) for name, targets in call.passes]
                    one.events += [("load", name) for name in call.returned]
        return found

    @cached_property
    def written(self) -> list[tuple[int, Written]]:
        """The elements that are assigned with a computed index or key, each at its offset."""
        found = []
        for number, one in enumerate(self.instructions):
            if one.opname not in ("STORE_SUBSCR", "STORE_SLICE") or number == 0:
                continue
            before = self.instructions[number - 1]
            is_item = one.opname == "STORE_SUBSCR" and is_constant_key(before)
            if is_item or before.opname in ("SWAP", "ROT_THREE"):
                continue
            size = 2 if one.opname == "STORE_SLICE" else 1
            key = begin_of(self.instructions, number, size)[0]
            begin, excess = begin_of(self.instructions, number, size + 1)
            owners = self._own_loads(begin)
            keys = {name for at in range(key, number) for name in self._loads(at)}
            # From Python 3.13 on, one instruction may load the owner and its key.
            owner = owners[-2:-1] if excess == 0 and begin == key else owners[-1:]
            found += [(one.offset, (name, frozenset(keys) - {name})) for name in owner if keys - {name}]
        for at, end, call in self._calls:
            arguments = self._arguments(end, call) if call.written else {}
            for name, indices in call.written:
                given = frozenset[Name]().union(*(arguments.get(one, {one}) for one in indices))
                found += [(at, (name, given))] if given else []
        return found

    def called(self, first: int, last: int) -> frozenset[str]:
        """Return the functions and methods that are called between two offsets, and those that these call."""
        found = {name for at, _, call in self._calls if first <= at <= last for name in call.called}
        for one in self.statements:
            if first <= one.first <= last:
                # A function of an imported module is loaded like an attribute.
                of_modules = {name for name in one.names("load") if root_of(name) in one.functions}
                found |= one.methods | one.functions | {name.rpartition(".")[2] for name in of_modules}
        return frozenset(found)

    def _loads(self, number: int) -> set[Name]:
        """Return the variables that an instruction loads, and those that a function returns that it loads."""
        at = self.instructions[number].offset
        returned = (call.returned for place, _, call in self._calls if place == at)
        return {*self._own_loads(number)}.union(*returned)

    def _loads_between(self, start: tuple[int, int], end: tuple[int, int]) -> set[Name]:
        """Return the variables that are loaded between two instructions.

        From Python 3.13 on, one may load two: each place has the number of those that come before.
        """
        if start[0] == end[0]:
            return {*self._own_loads(start[0])[start[1] : end[1]]}
        inside = {name for number in range(start[0] + 1, end[0]) for name in self._loads(number)}
        first = self._own_loads(start[0])[start[1] :] if start[1] else self._loads(start[0])
        return inside.union(first, self._own_loads(end[0])[: end[1]])

    def _own_loads(self, number: int) -> list[Name]:
        events = self._own_events[self.instructions[number].offset]
        return [name for how, name in events if how == "load"]

    def _arguments(self, end: int, call: Call) -> dict[Name, set[Name]]:
        """Return the variables in the arguments of a call whose function is loaded up to an offset."""
        found: dict[Name, set[Name]] = {name: set() for name in (*call.parameters, "*")}
        numbers = [number for number, one in enumerate(self.instructions) if one.offset == end]
        place = call_of(self.instructions, self._constants, numbers[0] + 1) if numbers else None
        if place is None:
            return found
        at, count, keywords = place
        is_named = self.instructions[at].opname.endswith("_KW")
        starts = [begin_of(self.instructions, at, count - one + is_named) for one in range(count)] + [(at, 0)]
        by_position = count - len(keywords)
        for number, (start, following) in enumerate(pairwise(starts)):
            name = keywords[number - by_position] if number >= by_position else "*"
            if number < min(by_position, len(call.parameters)):
                name = call.parameters[number]
            found[name if name in found else "*"] |= self._loads_between(start, following)
        return found

    def inner_loops(self, first: int, last: int) -> dict[int, int]:
        """Return the first and the last offset of each loop inside a body."""
        found: dict[int, int] = {}
        for one in self.between(first, last):
            head = self._jumps.get(one.offset, one.offset + 1)
            if first < head <= one.offset and "NO_INTERRUPT" not in one.opname:
                found[head] = max(one.offset, found.get(head, 0))
        return found

    def targets(self, first: int, last: int) -> set[Name]:
        """Return the variables that the head of a loop assigns, if it is a `for`."""
        body = self.between(first, last)
        if not body or body[0].opname != "FOR_ITER":
            return set()
        found = set[Name]()
        for one in body[1:]:
            if not one.opname.startswith(("STORE_", "UNPACK_", "NOP", "CACHE")):
                break
            found |= names_of(self._own_events[one.offset], "store")
        return found

    def shown_by(self, condition: Statement) -> list[Statement] | None:
        """Return the statements that a condition decides on; None if one does more than show something."""
        return self._decided_by(condition, may_return=False)

    def returned_by(self, condition: Statement) -> list[Statement] | None:
        """Return the statements that a condition decides on, if they only return or show something."""
        return self._decided_by(condition, may_return=True)

    def _decided_by(self, condition: Statement, *, may_return: bool) -> list[Statement] | None:
        key = condition.first, may_return
        if key not in self._shown:
            self._shown[key] = self._find_shown(condition, may_return=may_return)
        return self._shown[key]

    def _find_shown(self, condition: Statement, *, may_return: bool) -> list[Statement] | None:
        if condition.last not in self._jumps:
            return None
        numbers = {one.offset: number for number, one in enumerate(self.instructions)}
        number, jump = numbers[condition.last], self._jumps[condition.last]
        ways = {number + 1}, {numbers[jump]} if jump > condition.last else set[int]()
        decided = self._reached(ways[0], numbers) ^ self._reached(ways[1], numbers)
        # In a loop, a return decides how often the loop runs.
        may_end = not self.loops_around(condition.last)
        if any(self._leaves(one, may_end=may_end, may_return=may_return and may_end) for one in decided):
            return None
        offsets = {self.instructions[one].offset for one in decided}
        found = [one for one in self.statements if one.first in offsets or one.last in offsets]
        return found if all(one.only_shows() for one in found) else None

    def _leaves(self, number: int, *, may_end: bool, may_return: bool) -> bool:
        """Whether an instruction raises, or returns what it may not."""
        one, before = self.instructions[number], self.instructions[number - 1]
        if one.opname not in ("RETURN_VALUE", "RETURN_CONST"):
            return one.opname.startswith("RAISE")
        is_constant = one.opname == "RETURN_CONST" or before.opname == "LOAD_CONST"
        is_none = is_constant and (one if one.opname == "RETURN_CONST" else before).argval is None
        return not (may_return or (may_end and is_none))

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
        found: dict[int, int] = {}
        for one in self.instructions:
            head = self._jumps.get(one.offset, at + 1)
            # An await jumps back too, with NO_INTERRUPT, until it has what it waits for.
            if head <= at <= one.offset and "NO_INTERRUPT" not in one.opname:
                found[head] = max(one.offset, found.get(head, 0))
        return found

    def between(self, first: int, last: int) -> list[dis.Instruction]:
        """Return the instructions of a body."""
        return [one for one in self.instructions if first <= one.offset <= last]

    def accessed(self, how: str, body: list[dis.Instruction]) -> set[Name]:
        """Return the variables that a body loads, or those that it stores."""
        return names_of([event for one in body for event in self.events[one.offset]], how)

    def read_first(self, body: list[dis.Instruction]) -> set[Name]:
        """Return the variables that a body may read before it stores them."""
        return live_at_head(body, self._jumps, self.events)

    def owners_read_first(self, body: list[dis.Instruction]) -> set[Name]:
        """Return the variables that a body stores, and that it may read before, or an attribute of theirs."""
        stored = self.accessed("store", body)
        owners = {root_of(name) for name in self.accessed("load", body) if "." in name} & stored
        if not owners:
            return set()
        events: dict[int, list[Event]] = {}
        for one in body:
            pairs = ((how, name, root_of(name)) for how, name in self.events[one.offset])
            events[one.offset] = [
                (how, root) for how, name, root in pairs if root in owners and (how == "load" or name == root)
            ]
        return live_at_head(body, self._jumps, events)

    def left_at_end(self, body: list[dis.Instruction]) -> set[Name]:
        """Return the variables that may come to the end of a body as they were at its head."""
        first, last = body[0].offset, body[-1].offset
        backward = {one.offset for one in body if self._jumps.get(one.offset) == first} | {last}
        return left_at_end(body, self._jumps, self.events, backward)

    def left_at_return(self) -> set[Name]:
        """Return the variables that may be at the function's end as they were at its begin."""
        ends = {one.offset for one in self.instructions if one.opname in ("RETURN_VALUE", "RETURN_CONST")}
        return left_at_end(self.instructions, self._jumps, self.events, ends)


@cache
def read_code(code: CodeType, calls: Calls = (), names: tuple[tuple[Name, Name], ...] = ()) -> Bytecode:
    """Return the bytecode of a function, which is read once."""
    return Bytecode(code, calls, names)


@cache
def loops_around(code: CodeType, at: int) -> tuple[tuple[int, int], ...]:
    """Return the first and the last offset of each loop that a place in a function is in."""
    return tuple(read_code(code).loops_around(at).items())


@cache
def reads_own_variables(code: CodeType) -> bool:
    """Whether a function may call `locals()`, or `vars()` without an argument."""
    if not {"locals", "vars"} & {*code.co_names}:
        return False
    steps = [one for one in instructions_of(code) if one.opname not in ("PUSH_NULL", "PRECALL", "CACHE")]
    for one, following in zip(steps, [*steps[1:], None], strict=True):
        is_global = one.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        if is_global and one.argval == "locals":
            return True
        # An argument of vars() follows its name.
        if is_global and one.argval == "vars" and not (following and following.opname.startswith("LOAD_")):
            return True
    return False


@cache
def updated_and_used(code: CodeType) -> tuple[frozenset[Name], frozenset[Name]]:
    """Return the names to which a function gives values made from their own, and those that it uses.

    To use is more than to make the next value, or to show it.
    """
    read = read_code(code)
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
    read = read_code(code)
    return frozenset(read.read_first(read.instructions)), frozenset(read.accessed("store", read.instructions))


@cache
def called_by(code: CodeType) -> frozenset[str]:
    """Return the functions and methods that a function calls."""
    read = read_code(code)
    return read.called(0, read.instructions[-1].offset)


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
