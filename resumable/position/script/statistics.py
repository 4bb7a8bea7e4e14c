"""Tells whether an attribute is only counted and shown, so that nothing depends on it."""

from __future__ import annotations

import dis
import sys
from collections.abc import Collection, Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

from ...loaders.generators import code_names
from . import script_frames
from .bytecode import Bytecode
from .statements import Statement

_ALL_ATTRIBUTES = {"__dict__", "asdict", "vars"}
_PASSES_ON = ("STORE_", "YIELD_", "RETURN_")


def is_only_shown(attribute: str, functions: Collection[FunctionType]) -> bool:
    """Whether the script only counts an attribute up and shows it, as far as its code tells.

    `functions` are those that load the data; the rest of the script's code is searched too.
    """
    loading = {*_with_inner(one.__code__ for one in functions)}
    if any(_ALL_ATTRIBUTES & {*code.co_names} for code in loading):
        return False
    if not any(_is_stored(code, attribute) for code in loading):
        # Its code was not found.
        return False
    return not any(_is_used(code, attribute) for code in loading.union(_with_inner(_of_script())))


def _with_inner(codes: Iterable[CodeType]) -> Iterator[CodeType]:
    for code in codes:
        yield code
        yield from _with_inner(one for one in code.co_consts if isinstance(one, CodeType))


def _of_script() -> Iterator[CodeType]:
    """Yield the code of the script that is running, and of its modules."""
    yield from (frame.f_code for frame in script_frames.of_script(sys._getframe()))
    for name, module in [*sys.modules.items()]:
        if code_names.is_own(name):
            for value in [*getattr(module, "__dict__", {}).values()]:
                yield from _of_value(value)
                if isinstance(value, type):
                    yield from (code for one in [*vars(value).values()] for code in _of_value(one))


def _of_value(value: object) -> Iterator[CodeType]:
    parts: tuple[Any, ...] = (value,)
    if isinstance(value, property):
        parts = value.fget, value.fset
    elif isinstance(value, (staticmethod, classmethod)):
        parts = (value.__func__,)
    yield from (one.__code__ for one in parts if isinstance(one, FunctionType))


def _is_stored(code: CodeType, attribute: str) -> bool:
    return attribute in code.co_names and any(
        one.opname == "STORE_ATTR" and one.argval == attribute for one in dis.get_instructions(code)
    )


def _is_used(code: CodeType, attribute: str) -> bool:
    """Whether code reads an attribute of this name to do more than count it up or show it."""
    if attribute in code.co_consts:
        return True
    if attribute not in code.co_names:
        return False
    read = Bytecode(code)
    harmless = {at for one in read.statements for at in _harmless(one, read, attribute)}
    return any(
        one.argval == attribute and "STORE" not in one.opname and one.offset not in harmless
        for one in dis.get_instructions(code)
        if "ATTR" in one.opname or one.opname == "LOAD_METHOD"
    )


def _harmless(statement: Statement, read: Bytecode, attribute: str) -> Iterator[int]:
    """Yield the offsets of a statement that counts the attribute up, or only shows something."""
    is_shown = statement.only_shows()
    if statement.is_condition:
        decided = read.shown_by(statement)
        is_shown &= decided is not None and not any(_passed_on(one, read) for one in decided)
    elif passed := _passed_on(statement, read):
        is_shown &= all(one.opname == "STORE_ATTR" and one.argval == attribute for one in passed)
    else:
        is_shown &= bool(statement.functions | statement.methods)
    if is_shown:
        yield from (one.offset for one in read.between(statement.first, statement.last))


def _passed_on(statement: Statement, read: Bytecode) -> list[dis.Instruction]:
    """Return the instructions that give a value of the statement to a variable, or to the caller."""
    instructions = read.between(statement.first, statement.last)
    return [one for one in instructions if one.opname.startswith(_PASSES_ON)]
