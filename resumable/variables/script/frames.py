"""The script's running functions: which they are, and how their variables are read and bound."""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType, ModuleType
from typing import Any

from ...objects import own, walks
from ...objects.kinds import Step

_STEPS, _MOST = 4, 1000


def own_frames(frame: FrameType | None) -> list[FrameType]:
    """Return the frames of the script that have led to a frame, the outermost first."""
    found = []
    while frame is not None:
        if own.is_own_code(frame.f_code):
            found.append(frame)
        frame = frame.f_back
    return found[::-1]


def is_function(frame: FrameType) -> bool:
    """Whether a frame has variables of its own, unlike that of a module or of a class's body."""
    return bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)


def is_generator(code: CodeType) -> bool:
    """Whether a function may go on after another one has run."""
    return bool(code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR))


def name_of(code: CodeType) -> str:
    """Return the name of a function, with that of its class from Python 3.11 on."""
    return str(getattr(code, "co_qualname", code.co_name))


def names(frame: FrameType) -> frozenset[str]:
    """Return the names that a frame's variables can have."""
    code = frame.f_code
    return frozenset((*code.co_varnames, *code.co_cellvars, *code.co_freevars))


def variables(frame: FrameType) -> dict[str, Any]:
    """Return the variables of a frame that have a value."""
    held = frame.f_locals
    found = dict(held)
    # Before Python 3.13 the frame keeps what it has shown, a batch and its graph among it. Where the script
    # has it too, it is what locals() returned.
    if sys.version_info < (3, 13) and is_function(frame) and sys.getrefcount(held) <= 3:
        held.clear()
    return found


def instances(*of: type) -> list[Any]:
    """Return the objects of some classes that variables of the script lead to in a few steps."""
    modules = [one for one in [*sys.modules.values()] if type(one) is ModuleType and own.is_own_module(one)]
    held = [*map(vars, modules), *map(variables, own_frames(inspect.currentframe()))]
    roots = [(Step("", name), one) for some in held for name, one in some.items()]
    wanted = {*map(id, of)}
    return [node.value for node in walks.walk(roots, _is_far) if id(type(node.value)) in wanted]


def _is_far(node: walks.Node) -> bool:
    is_long = type(node.value) in (list, tuple, dict) and len(node.value) > _MOST
    return is_long or node.kind in ("class", "function") or len(node.path) > _STEPS


def bind(frame: FrameType, values: Mapping[str, Any]) -> None:
    """Bind variables of a function that is running; names that it does not have are left out."""
    there = frame.f_locals
    there.update({name: value for name, value in values.items() if name in names(frame)})
    if sys.version_info < (3, 13) and is_function(frame):
        # The 0 leaves a variable alone that the dict does not have: nothing is ever unbound.
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
        if sys.getrefcount(there) <= 3:
            there.clear()


def code_names(frame: FrameType) -> Iterator[str]:
    """Yield the names that functions, classes and comprehensions inside of a frame's code use."""
    waiting = [frame.f_code]
    while waiting:
        inner = [one for one in waiting.pop().co_consts if inspect.iscode(one)]
        waiting += inner
        for code in inner:
            yield from (*code.co_names, *code.co_freevars)
