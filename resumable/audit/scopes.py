"""The variables of the user's script: those of its modules and of its running functions."""

from __future__ import annotations

import ctypes
import dis
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FrameType, FunctionType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any

from ..loaders.generators import code_names
from ..position.script import bytecode, loops
from ..position.script.carried import Carried, carried_in

STATE, NOTE, FRESH = "state", "note", "fresh"
"""Whether a training carries the value from body to body, may not depend on it, or makes it in each body."""

PLAIN = (bool, int, float, complex, str, bytes, type(None))
_NOTEBOOKS_OWN = re.compile(r"_(i?\d*|i{2,3}|_|__|ih|oh|dh)|In|Out|exit|quit|get_ipython")
_MAKERS = ("__init__", "__post_init__", "__new__", "load_state_dict", "__setstate__")


@dataclass
class Scope:
    """The variables of one module, or of one running function."""

    prefix: str
    """The prefix of their names, which distinguishes functions."""
    variables: Mapping[str, Any]
    assign: Callable[[str, Any], None]
    """Assigns a value to a variable."""
    code: CodeType | None = None
    carried: Carried = field(default_factory=Carried)
    used_elsewhere: frozenset[str] = frozenset()
    """The variables of a module that its functions use."""
    is_inner: bool = False
    """Whether a loop of the script calls this function: then its variables are new in each body."""

    def weight(self, name: str) -> str:
        """Return what the loops do with a variable, as far as their bytecode shows."""
        carried = self.carried
        if self.is_inner:
            is_given = name in _arguments(self.code) and type(self.variables[name]) not in PLAIN
            return NOTE if carried.named or is_given else FRESH
        if name in carried.restarted:
            return NOTE
        if name in carried.assigned | carried.kept:
            return STATE
        if name in carried.made:
            return FRESH
        if name in self.used_elsewhere:
            return STATE
        return NOTE if name in carried.named else STATE

    def use(self, name: str) -> str:
        """Return whether the loops assign a variable or reset it in each epoch."""
        carried = self.carried
        if name in carried.restarted or self.is_inner:
            return "restarted"
        return "rebound" if name in carried.assigned else ""

    def where(self, name: str) -> str:
        """Return the first line that assigns a variable, such as "train.py:31"; "" if that is not known."""
        return first_line(self.code, "STORE", name) if self.code else ""


def _arguments(code: CodeType | None) -> tuple[str, ...]:
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if code else ()


@cache
def first_line(code: CodeType, how: str, name: str) -> str:
    """Return the first line of code with an instruction for a name, such as "train.py:31"."""
    lines, line = dict(dis.findlinestarts(code)), 0
    for step in dis.get_instructions(code):
        line = lines.get(step.offset) or line
        if step.opname.startswith(how) and name in (step.argval, *_names(step.argval)):
            return f"{os.path.basename(code.co_filename)}:{line}"
    return ""


def _names(argument: object) -> tuple[object, ...]:
    # From Python 3.12 on one instruction may store two variables.
    return argument if isinstance(argument, tuple) else ()


def of_modules(frame: FrameType | None) -> list[Scope]:
    """Return the variables of the script, and of the user's modules that it has imported."""
    found: dict[int, Scope] = {}
    for running in _running(frame):
        if running.f_code.co_name == "<module>":
            found.setdefault(id(running.f_globals), _of_module(running.f_globals, "", running))
    # The script's own variables have the shorter names.
    for name, module in sorted(_users_modules(), key=lambda one: one[0] != "__main__"):
        variables = ModuleType.__getattribute__(module, "__dict__")
        prefix = "" if name == "__main__" else f"{name.rpartition('.')[2]}."
        found.setdefault(id(variables), _of_module(variables, prefix))
    return [*found.values()]


def _running(frame: FrameType | None) -> Iterator[FrameType]:
    while frame:
        # An example in a docstring is a script, whatever module it is in.
        is_example = frame.f_code.co_filename.startswith("<doctest")
        if is_example or code_names.is_own_code(frame.f_code, frame.f_globals):
            yield frame
        frame = frame.f_back


def _users_modules() -> Iterator[tuple[str, ModuleType]]:
    for name, module in [*sys.modules.items()]:
        # A package without an __init__.py has no file that shows whose it is.
        is_ours = ModuleType in type(module).__mro__ and getattr(module, "__file__", None)
        if name == "__main__" or (is_ours and code_names.is_own(name)):
            yield name, module


def _of_module(variables: dict[str, Any], prefix: str, frame: FrameType | None = None) -> Scope:
    hidden = _NOTEBOOKS_OWN if "get_ipython" in variables else re.compile("_")
    kept = {
        name: value
        for name, value in dict.copy(variables).items()
        if type(name) is str and not name.startswith("__") and not hidden.fullmatch(name)
    }
    used = {name for one in kept.values() for code in _codes(one) for name in _names_in(code)}
    scope = Scope(prefix, kept, variables.__setitem__, used_elsewhere=frozenset(used))
    return scope if frame is None else _in_loop(scope, frame)


def _codes(value: object) -> Iterator[CodeType]:
    inside = [*vars(value).values()] if isinstance(value, type) and is_users_class(value) else [value]
    yield from (one.__code__ for one in inside if isinstance(one, FunctionType))


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)


def of_functions(frame: FrameType | None) -> list[Scope]:
    """Return the variables of the user's functions that are running, the outermost first."""
    found, is_inner = [], False
    for running in [*_running(frame)][::-1]:
        code = running.f_code
        if code.co_name != "<module>":
            prefix = f"{code.co_name}." if code.co_name.isidentifier() else ""
            variables = loops.variables_of(running)
            kept = {name: one for name, one in variables.items() if not name.startswith(("__", "."))}
            found.append(_in_loop(Scope(prefix, kept, _local(running), is_inner=is_inner), running))
        is_inner |= bool(bytecode.loops_around(code, running.f_lasti))
    return found


def _in_loop(scope: Scope, frame: FrameType) -> Scope:
    states = frozenset(loops.states_in(scope.variables, frame))
    scope.code, scope.carried = frame.f_code, carried_in(frame.f_code, frame.f_lasti, states)
    return scope


def _local(frame: FrameType) -> Callable[[str, Any], None]:
    def assign(name: str, value: Any) -> None:
        frame.f_locals[name] = value
        if sys.version_info < (3, 13):
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))

    return assign


def attributes(value: object) -> dict[str, Any]:
    """Return the attributes of an object, without calling any code of its class."""
    found: dict[str, Any] = {}
    for kind in type(value).__mro__:
        members = vars(kind)
        # Those of a module are its variables.
        has_dict = type(members.get("__dict__")) in (GetSetDescriptorType, MemberDescriptorType)
        if has_dict and kind is not ModuleType:
            there = members["__dict__"].__get__(value)
            found |= dict.copy(there) if dict in type(there).__mro__ else {}
        for name, member in list(members.items()) if "__slots__" in members else ():
            if type(member) is MemberDescriptorType:
                try:
                    found.setdefault(name, member.__get__(value))
                except AttributeError:  # it has no value yet
                    continue
    return {name: one for name, one in found.items() if type(name) is str and not name.startswith("__")}


def assign_attribute(owner: Any, name: str, value: Any) -> None:
    """Assign an attribute without calling any code of its class."""
    there = getattr(owner, "__dict__", None)
    if type(there) is dict and name in there:
        there[name] = value
    elif isinstance(owner, type):
        type.__setattr__(owner, name, value)
    else:
        object.__setattr__(owner, name, value)


def is_users_class(kind: type) -> bool:
    """Whether a class belongs to the user's own code."""
    return code_names.is_own(str(kind.__module__))


def of_attribute(kind: type, name: str) -> tuple[str, str]:
    """Return what the methods of a class do with an attribute, and the line that first assigns it.

    One that a method reads and assigns is state, unless another method assigns it without reading it.
    """
    attribute, where = f"self.{name}", ""
    is_counted = is_set = False
    for method in (one for above in kind.__mro__ if is_users_class(above) for one in vars(above).values()):
        if not isinstance(method, FunctionType):
            continue
        read, stored = bytecode.of_method(method.__code__)
        if attribute in stored:
            where = where or first_line(method.__code__, "STORE_ATTR", name)
        if attribute in stored and method.__name__ not in _MAKERS:
            is_counted |= attribute in read
            is_set |= attribute not in read
    return (NOTE if is_set else STATE), where
