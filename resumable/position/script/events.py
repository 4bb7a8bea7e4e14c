"""Reads which variables each instruction of the bytecode loads and stores, and what is known of calls."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from types import CodeType
from typing import Any, Literal, NamedTuple

Name = str
"""A variable such as "best", an attribute such as "self.best", or an item such as "seen['best']"."""
Event = tuple[Literal["load", "store"], Name]
Written = tuple[Name, frozenset[Name]]
"""A container with an element that is assigned, and the variables in the element's index or key."""


class Call(NamedTuple):
    """What a function that is called does with the variables outside of it."""

    read: frozenset[Name] = frozenset()
    """Those that it may read before it stores them."""
    stored: frozenset[Name] = frozenset()
    left: frozenset[Name] = frozenset()
    """Those among the stored ones that it may leave as they were."""
    returned: frozenset[Name] = frozenset()
    """Those that reach what it returns."""
    passes: frozenset[tuple[Name, frozenset[Name]]] = frozenset()
    """Each that reaches others, or itself, or a parameter that does, with these."""
    decides: frozenset[Name] = frozenset()
    """Those that decide in the function itself."""
    written: frozenset[Written] = frozenset()
    parameters: tuple[Name, ...] = ()
    """Those that are given by position; "*" stands for all that have no name of their own."""
    given: frozenset[Name] = frozenset()
    """The parameters that decide in the function itself."""
    called: frozenset[str] = frozenset()
    """The functions and methods that it calls, and those that these call."""


Calls = tuple[tuple[int, int, Call], ...]
"""The calls of functions of the script: between which offsets each function is loaded, and what it does."""


JUMPS = {*dis.hasjrel, *dis.hasjabs} - {dis.opmap[name] for name in dis.opmap if name.startswith("SETUP_")}
"""All but those of Python 3.10 to a handler."""
_CALLS = ("PRECALL", "CALL", "CALL_KW", "CALL_FUNCTION", "CALL_FUNCTION_KW", "CALL_METHOD")
_SUBSCRIPTS = ("BINARY_SUBSCR", "STORE_SUBSCR", "COPY", "DUP_TOP_TWO")
"""What follows the key of an item: the last two stand in `seen["best"] += 1`."""
_LOADS_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_RESETS = {"clear", "copy_", "fill", "fill_", "load_state_dict", "normal_", "uniform_", "zero_"}
"""Methods that leave nothing of what an object was."""
_KEEPS = {"requires_grad_", "share_memory_"}
"""Methods that end like those that write into a tensor, and leave its elements as they are."""


def codes_in(code: CodeType) -> list[CodeType]:
    """Return code and that of the functions in it."""
    return [code, *(deeper for one in code.co_consts if type(one) is CodeType for deeper in codes_in(one))]


def instructions_of(code: CodeType) -> list[dis.Instruction]:
    """Return the instructions of code without the prefixes of large arguments, to which jumps may lead."""
    found, prefixes, moved = list[dis.Instruction](), list[int](), dict[int, int]()
    for one in dis.get_instructions(code):
        if one.opname == "EXTENDED_ARG":
            prefixes.append(one.offset)
            continue
        moved |= dict.fromkeys(prefixes, one.offset)
        prefixes.clear()
        found.append(one)
    return [
        one._replace(argval=moved[one.argval]) if one.opcode in JUMPS and one.argval in moved else one
        for one in found
    ]


def events_of(instructions: list[dis.Instruction], constants: tuple[Any, ...]) -> dict[int, list[Event]]:
    """Return the variables that each instruction loads or stores, by its offset, in the order of both."""
    found: dict[int, list[Event]] = {}
    appended = list[tuple[int, Name]]()
    for number, one in enumerate(instructions):
        events: list[Event] = []
        found[one.offset] = events
        ways = _how(one.opname)
        if not ways:
            continue
        # From Python 3.12 on, one instruction accesses two variables.
        names = one.argval if isinstance(one.argval, tuple) else (one.argval,) * len(ways)
        events += zip(ways, map(str, names), strict=False)
        after = instructions[number + 1 : number + 6]
        if len(after) > 1 and after[0].opname in ("COPY", "DUP_TOP") and after[1].opname == "LOAD_ATTR":
            # As in `self.count += 1`.
            name = f"{events[-1][1]}.{after[1].argval}"
            events[-1:] = [("load", name), ("store", name)]
        elif after and after[0].opname in ("LOAD_ATTR", "STORE_ATTR") and not is_method(after[0]):
            # Of two variables that are loaded at once, the attribute is the second one's.
            attribute = after.pop(0)
            events[-1] = _access(attribute), f"{events[-1][1]}.{attribute.argval}"
        if len(after) > 1 and after[1].opname in _SUBSCRIPTS and is_constant_key(after[0]):
            item = _access(after[1]), f"{events[-1][1]}[{after[0].argval!r}]"
            # What reads an item reads its container too, except for the last: append() stores that one.
            # What stores one leaves the container what it is.
            events[-1:] = [events[-1], item] if item[0] == "load" and after[0].argval != -1 else [item]
        elif events[-1][0] == "load" and after and after[0].argval == "append" and is_method(after[0]):
            appended.append((instructions.index(after[0], number), f"{events.pop()[1]}[-1]"))
        elif events[-1][0] == "load" and _is_reset(after):
            events[-1] = ("store", events[-1][1])
        elif events[-1][0] == "load" and _is_written(after):
            events.append(("store", events[-1][1]))
        found[one.offset] = [(how, name) for how, name in events if name != "self"]
    for offset, place in _of_elements(instructions):
        loads = [name for how, name in found[offset] if how == "load"]
        found[offset] += [("store", name) for name in loads[place:][:1]]
    for number, name in appended:
        called = call_of(instructions, constants, number + 1)
        if called and instructions[called[0]].opcode not in JUMPS:
            found[instructions[called[0]].offset] += [("store", name)]
    return found


def _is_written(after: list[dis.Instruction]) -> bool:
    """Whether a method is called that writes into a tensor, such as `lerp_`."""
    method = str(after[0].argval) if after and is_method(after[0]) else ""
    return method.endswith("_") and not method.startswith("_") and method not in _KEEPS


def _is_reset(after: list[dis.Instruction]) -> bool:
    """Whether a call, or a write to `[:]`, leaves nothing of what an object was."""
    if after and is_method(after[0]):
        return after[0].argval in _RESETS
    names = [one.opname for one in after]
    if names[:2] == ["LOAD_CONST", "STORE_SUBSCR"]:
        return after[0].argval in (slice(None), ...)
    is_slice = names[2:3] == ["STORE_SLICE"] or names[2:4] == ["BUILD_SLICE", "STORE_SUBSCR"]
    return is_slice and [one.argval for one in after[:2]] == [None, None]


def _of_elements(instructions: list[dis.Instruction]) -> Iterator[tuple[int, int]]:
    """Yield where the owner of each element is loaded that is changed, as in `counts[label] += 1`."""
    for number, (before, one, following) in enumerate(
        zip(instructions, instructions[1:], instructions[2:], strict=False)
    ):
        is_pair = one.opname == "DUP_TOP_TWO" or one.opname == following.opname == "COPY"
        if is_pair and not is_constant_key(before):
            begin, excess = begin_of(instructions, number + 1, 2)
            # From Python 3.13 on, one instruction may load the owner and its key.
            yield instructions[begin].offset, -1 if excess else 0


def begin_of(instructions: list[dis.Instruction], number: int, values: int) -> tuple[int, int]:
    """Return which instruction begins to compute the last values on the stack before another one.

    The second number is how many other values it loads too.
    """
    while values > 0 and number > 0:
        number -= 1
        values -= dis.stack_effect(instructions[number].opcode, instructions[number].arg, jump=False)
    return number, -values


def call_of(
    instructions: list[dis.Instruction], constants: tuple[Any, ...], number: int
) -> tuple[int, int, tuple[str, ...]] | None:
    """Return where a function is called that was loaded before an instruction.

    With it come the number of arguments, and the names of the last ones: none if a condition stands among
    the arguments, or if they come from a sequence. Return None if the function itself is an argument.
    """
    depth, keywords = 0, ()
    for at in range(number, len(instructions)):
        one = instructions[at]
        if one.opcode in JUMPS or (one.opname == "CALL_FUNCTION_EX" and depth in (1, 2)):
            return at, 0, ()
        if one.opname == "PUSH_NULL" and at == number and sys.version_info >= (3, 13):
            continue
        if one.opname == "KW_NAMES":
            # Before Python 3.12 they are not resolved.
            keywords = constants[one.arg or 0]
        is_named = one.opname.endswith("_KW")
        is_call = one.opname in _CALLS and depth == (one.arg or 0) + is_named
        if is_call:
            return at, one.arg or 0, instructions[at - 1].argval if is_named else keywords
        if one.opname in ("PRECALL", "CALL"):
            keywords = ()
        depth += dis.stack_effect(one.opcode, one.arg, jump=False)
        if depth < 0:
            return None
    return None


def owner_of(name: Name) -> Name:
    """Return the name of the container that an item is in, or the name itself."""
    return name.partition("[")[0]


@cache
def root_of(name: Name) -> Name:
    """Return the variable that a name begins with; one of another module is such as "package.module:best".

    >>> root_of("self.best['loss']"), root_of("package.module:best.loss")
    ('self', 'package.module:best')
    """
    module, colon, inside = name.partition("[")[0].rpartition(":")
    return module + colon + inside.partition(".")[0]


def renamed(name: Name, names: Mapping[Name, Name]) -> Name:
    """Return a name that begins with another variable."""
    root = root_of(name)
    return names.get(root, root) + name[len(root) :]


def names_of(events: list[Event], kind: str) -> set[Name]:
    return {name for how, name in events if how == kind}


def _access(one: dis.Instruction) -> Literal["load", "store"]:
    return "store" if one.opname.startswith("STORE_") else "load"


def is_constant_key(one: dis.Instruction) -> bool:
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


def is_method(one: dis.Instruction) -> bool:
    """Whether an attribute is loaded in order to be called."""
    if one.opname == "LOAD_ATTR" and sys.version_info < (3, 11):
        # With keywords it is not loaded as a method there.
        return one.argval in ("backward", "save")
    is_flagged = sys.version_info >= (3, 12) and one.opname == "LOAD_ATTR" and bool((one.arg or 0) & 1)
    return one.opname == "LOAD_METHOD" or is_flagged
