"""Reads the statements and conditions of the script's bytecode, and which of them only show something."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from .events import JUMPS, Event, Name, begin_of, is_method, names_of, root_of

NO_WAY_ON = (
    *("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "RAISE", "RERAISE"),
    # A generator continues behind its RETURN_GENERATOR.
    *("RETURN_VALUE", "RETURN_CONST"),
)
_ENDS = ("POP_JUMP", "JUMP", "RETURN", "POP_TOP")
"""How the bytecode of a statement, or of a condition, ends if nothing is assigned."""
_CONSTANTS = ("LOAD_CONST", "LOAD_ATTR")
SHOWS = {
    *("print", "write", "flush", "log", "debug", "info", "warning", "set_postfix", "set_postfix_str"),
    *("set_description", "set_description_str", "add_scalar", "add_scalars", "add_image", "add_histogram"),
    *("add_text", "add_figure", "log_metrics", "log_metric", "report_scalar", "format", "join", "strftime"),
    *("item", "tolist", "cpu", "detach", "float", "int", "str", "len", "round", "sum", "min", "max", "mean"),
    *("time", "perf_counter", "get_last_lr", "exp", "items", "keys", "values", "range", "enumerate", "zip"),
}
"""Functions and methods that change nothing but what is shown."""


@dataclass
class Statement:
    """A statement of the script, or a condition, as its bytecode tells."""

    first: int
    last: int = -1
    events: list[Event] = field(default_factory=list)
    methods: set[str] = field(default_factory=set)
    functions: set[str] = field(default_factory=set)
    """The functions that it calls by a variable's name; "?" for one that is computed."""
    decides: set[Name] = field(default_factory=set)
    """The variables that decide in a function that it calls."""
    passes: list[tuple[set[Name], frozenset[Name]]] = field(default_factory=list)
    """Variables, and those to which a function that it calls gives values made from them."""
    is_condition: bool = False
    """Whether it decides which way the code takes."""
    is_return: bool = False
    """Whether it returns or yields a value."""

    def names(self, kind: str) -> set[Name]:
        return names_of(self.events, kind)

    def made_from(self, known: set[Name]) -> set[Name]:
        """Return the variables to which it gives values made from these."""
        found = self.names("store") if self.names("load") & known else set[Name]()
        return found.union(*(targets for sources, targets in self.passes if sources & known))

    def calls(self, functions: set[str]) -> bool:
        return not (self.methods | self.names("load")).isdisjoint(functions)

    def only_shows(self) -> bool:
        """Whether it calls nothing but what shows something."""
        return self.methods | self.functions <= SHOWS

    def reads(self, states: frozenset[Name]) -> bool:
        """Whether it reads the RunState, or an attribute of it."""
        return any(name in states or root_of(name) in states for name in self.names("load"))


def statements_of(
    instructions: list[dis.Instruction], events: Mapping[int, list[Event]]
) -> Iterator[Statement]:
    now, has_stored, before, comprehension_ends = None, False, "", 0
    inside, called = {*_in_expressions(instructions)}, _called(instructions)
    for one, following in zip(instructions, [*instructions[1:], None], strict=True):
        if one.opname == "FOR_ITER" and before == "SWAP":
            # From Python 3.12 on, a comprehension is a loop in the middle of a statement.
            comprehension_ends = one.argval
        if now and one.offset < comprehension_ends:
            now.events += events[one.offset]
            continue
        # A value stored from a copy is still used: (n := n + 1) > 3.
        is_copy = before in ("COPY", "DUP_TOP") and not one.opname.endswith("STORE_FAST_STORE_FAST")
        is_store = one.opname.startswith("STORE_") and not is_copy
        before = one.opname
        if now and has_stored and not is_store:
            yield now
            now = None
        now = now or Statement(one.offset)
        now.events += events[one.offset]
        now.last = one.offset
        # From Python 3.12 on, super().method is one instruction.
        if is_method(one) or one.opname == "LOAD_SUPER_ATTR":
            now.methods.add(str(one.argval))
        now.is_return |= one.opname in ("RETURN_VALUE", "YIELD_VALUE")
        now.functions |= called.get(one.offset, set())
        has_stored = is_store
        is_loop = one.opname == "GET_ITER" and following is not None and following.opname == "FOR_ITER"
        if is_loop or (one.opname.startswith(_ENDS) and one.offset not in inside):
            now.is_condition = is_loop or "_IF_" in one.opname
            yield now
            now = None


def _called(instructions: list[dis.Instruction]) -> dict[int, set[str]]:
    """Return the functions that are called by a variable's name, by the offset of an instruction."""
    found: dict[int, set[str]] = {}
    for number, one in enumerate(instructions):
        loads = [*instructions[max(0, number - 1) : number], one, *instructions[number + 1 : number + 2]]
        if one.opname == "PUSH_NULL":
            # It stands behind the function from Python 3.13 on.
            load = loads[0 if sys.version_info >= (3, 13) else -1]
        elif one.opname.startswith("CALL_FUNCTION") and sys.version_info < (3, 11):
            values = 1 - dis.stack_effect(one.opcode, one.arg)
            load = instructions[begin_of(instructions, number, values)[0]]
        elif (one.opname == "LOAD_GLOBAL" and "NULL" in one.argrepr) or one.opname == "MAKE_FUNCTION":
            load = one
        else:
            continue
        is_name = load.opname.startswith("LOAD_") and type(load.argval) is str
        found[one.offset] = {load.argval if is_name and load.opname not in _CONSTANTS else "?"}
    return found


def _in_expressions(instructions: list[dis.Instruction]) -> Iterator[int]:
    """Yield the offsets of the jumps of `x if y else z`, which chooses a value and no way."""
    for number, one in enumerate(instructions):
        depth, following = 0, number + 1
        while "POP_JUMP" in one.opname and following < len(instructions):
            step = instructions[following]
            if step.opname == "JUMP_FORWARD" and depth == 1:
                yield from (one.offset, step.offset)
            if step.opcode in JUMPS or step.opname.startswith(NO_WAY_ON):
                break
            depth += dis.stack_effect(step.opcode, step.arg, jump=False)
            if depth < 1:
                break
            following += 1
