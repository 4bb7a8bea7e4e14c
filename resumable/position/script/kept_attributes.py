"""Tells whether something depends on what an attribute keeps from one batch, or one epoch, to the next."""

from __future__ import annotations

import dis
from collections.abc import Collection, Iterator
from types import CodeType, FunctionType

from .bytecode import Bytecode, read_code
from .events import codes_in
from .statements import Statement

_PASSES_ON = ("STORE_", "YIELD_", "RETURN_")
_SHOWS = ("__repr__", "__str__")


def is_read(attribute: str, functions: Collection[FunctionType]) -> bool:
    """Whether these functions do more with an attribute than to count it up, to show it, or to make it."""
    return any(_needs(code, attribute) for one in functions for code in codes_in(one.__code__))


def _needs(code: CodeType, attribute: str) -> bool:
    if attribute in code.co_consts:
        # As in getattr().
        return True
    if attribute not in code.co_names or code.co_name in _SHOWS:
        return False
    read = read_code(code)
    is_length = code.co_name == "__len__"
    harmless = {
        one.offset
        for statement in read.statements
        if _is_harmless(statement, read, attribute) or (is_length and _is_length(statement))
        for one in read.between(statement.first, statement.last)
    }
    if _makes_again(read, attribute):
        harmless.update(_of_self(read, attribute))
    return any(
        one.argval == attribute and "STORE" not in one.opname and one.offset not in harmless
        for one in dis.get_instructions(code)
        if "ATTR" in one.opname or one.opname == "LOAD_METHOD"
    )


def _is_harmless(statement: Statement, read: Bytecode, attribute: str) -> bool:
    """Whether a statement counts the attribute up, or only shows something."""
    if not statement.only_shows():
        return False
    if statement.is_condition:
        decided = read.shown_by(statement)
        return decided is not None and not any(_passed_on(one, read) for one in decided)
    if passed := _passed_on(statement, read):
        return all(one.opname == "STORE_ATTR" and one.argval == attribute for one in passed)
    return bool(statement.functions | statement.methods)


def _is_length(statement: Statement) -> bool:
    """Whether a statement reads only the length of a list, which a new order in it leaves as it is."""
    return statement.functions == {"len"} and not statement.methods


def _passed_on(statement: Statement, read: Bytecode) -> list[dis.Instruction]:
    """Return the instructions that give a value of the statement to a variable, or to the caller."""
    instructions = read.between(statement.first, statement.last)
    return [one for one in instructions if one.opname.startswith(_PASSES_ON)]


def _makes_again(read: Bytecode, attribute: str) -> bool:
    """Whether a method assigns the attribute, or empties it, before it reads it."""
    name = f"self.{attribute}"
    for one in read.statements:
        # What is given to a method, such as copy_(), is read before the method writes.
        if one.methods and name in one.names("load") & one.names("store"):
            return False
    return name in read.accessed("store", read.instructions) - read.read_first(read.instructions)


def _of_self(read: Bytecode, attribute: str) -> Iterator[int]:
    """Yield where the attribute of `self` is loaded."""
    steps = read.instructions
    for owner, between, one in zip(steps, steps[1:], steps[2:], strict=False):
        # From Python 3.13 on, one instruction may load two variables.
        loaded = owner.argval[-1] if isinstance(owner.argval, tuple) else owner.argval
        is_next, is_copied = between.argval == attribute, between.opname in ("COPY", "DUP_TOP")
        if loaded == "self" and (is_next or (is_copied and one.argval == attribute)):
            yield (between if is_next else one).offset
