"""The variables of the user's code: of its modules, and of the functions that are running."""

from __future__ import annotations

import inspect
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from functools import cache
from types import FrameType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any, NamedTuple

from .source import uses
from .source.uses import NOBODY_KNOWS, Fact, Script, Use

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_NOTEBOOKS_OWN = re.compile(r"_(i?\d*|i{2,3}|_|__|ih|oh|dh)|In|Out|exit|quit|get_ipython")


class Scope(NamedTuple):
    """The variables of one module, or of one running function."""

    prefix: str
    """What their names begin with, which tells those of different functions apart."""
    variables: Mapping[str, Any]
    filename: str
    function: tuple[str, int] | None
    """Its name and first line; None for a module."""
    line: int
    """Where it is running; 0 if nobody knows."""
    is_inner: bool = False
    """Whether it was called in a loop of the user's: it begins anew in each pass."""
    arguments: tuple[str, ...] = ()
    """Those of its variables that it was given."""

    def fact(self, name: str) -> Fact:
        """Return what the code does with a variable."""
        script = uses.script(self.filename)
        try:
            fact = script.variable(name, self.function, self.line) if script else NOBODY_KNOWS
        except RecursionError:  # (of an expression that a program has written)
            fact = NOBODY_KNOWS
        if self.is_inner and fact.use in (Use.CARRIED, Use.KEPT, Use.SHOWN):
            return Fact(Use.RESET, fact.line)
        return fact

    def where(self, line: int) -> str:
        """Return a place as people write it."""
        return place(self.filename, line)


def place(filename: str, line: int) -> str:
    """Return a line of a file as people write it."""
    return f"{os.path.basename(filename)}:{line}" if line else ""


@cache
def is_users(filename: str) -> bool:
    """Whether a file is the user's own, and not Python's, a library's or this package's."""
    if filename.startswith("<"):
        return filename.startswith(("<stdin>", "<string>", "<ipython-input", "<doctest"))
    path = os.path.abspath(filename)
    if any(f"{os.sep}{name}{os.sep}" in path for name in ("site-packages", "dist-packages")):
        return False
    return not path.startswith((_PACKAGE, *_pythons_own()))


@cache
def _pythons_own() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(os.path.join(os.path.abspath(paths[name]), "") for name in ("stdlib", "platstdlib"))


def of_modules(frame: FrameType | None) -> list[Scope]:
    """Return the variables of the script, and of the modules of the user's that it has imported."""
    found: dict[int, Scope] = {}
    for running in _running(frame):
        if running.f_code.co_name == "<module>":
            scope = _of_module(running.f_globals, "", running.f_code.co_filename, running.f_lineno)
            found.setdefault(id(running.f_globals), scope)
    # (the script's own variables have the shorter names)
    for name, module in sorted(_users_modules(), key=lambda one: one[0] != "__main__"):
        variables = ModuleType.__getattribute__(module, "__dict__")
        prefix = "" if name == "__main__" else f"{name.rpartition('.')[2]}."
        found.setdefault(id(variables), _of_module(variables, prefix, _text(variables.get("__file__")), 0))
    return [*found.values()]


def _users_modules() -> Iterator[tuple[str, ModuleType]]:
    foreign: dict[str, bool] = {}
    for name, module in list(sys.modules.items()):
        package = name.partition(".")[0]
        if package not in foreign:
            top = sys.modules.get(package, module)
            foreign[package] = name != "__main__" and not _is_users_module(top)
        if not foreign[package] and (name == "__main__" or _is_users_module(module)):
            yield name, module


def _is_users_module(module: object) -> bool:
    if ModuleType not in type(module).__mro__:
        return False
    variables = ModuleType.__getattribute__(module, "__dict__")
    if "__path__" in variables and not variables.get("__file__"):
        # (a package without an __init__.py, of which nobody knows whose it is)
        return True
    return bool(_text(variables.get("__file__"))) and is_users(variables["__file__"])


def _text(value: object) -> str:
    return value if type(value) is str else ""


def _of_module(variables: dict[str, Any], prefix: str, filename: str, line: int) -> Scope:
    hidden = _NOTEBOOKS_OWN if "get_ipython" in variables else re.compile("_")
    kept = {
        name: value
        for name, value in dict.copy(variables).items()
        if type(name) is str and not name.startswith("__") and not hidden.fullmatch(name)
    }
    return Scope(prefix, kept, filename, None, line)


def of_functions(frame: FrameType | None) -> list[Scope]:
    """Return the variables of the user's functions that are running, the outermost first."""
    found, is_inner = [], False
    for running in _running(frame):
        code = running.f_code
        function = None if code.co_name == "<module>" else (code.co_name, code.co_firstlineno)
        if function:
            prefix = f"{code.co_name}." if code.co_name.isidentifier() else ""
            scope = (prefix, _locals(running), code.co_filename, function, running.f_lineno)
            given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            found.append(Scope(*scope, is_inner=is_inner, arguments=given))
        script = uses.script(code.co_filename)
        is_inner |= script is not None and script.is_in_a_loop(function, running.f_lineno)
    return found


def _running(frame: FrameType | None) -> list[FrameType]:
    found = []
    while frame:
        if is_users(frame.f_code.co_filename):
            found.append(frame)
        frame = frame.f_back
    return found[::-1]


def _locals(frame: FrameType) -> dict[str, Any]:
    variables = frame.f_locals
    kept = dict(variables)
    # Before Python 3.13 the frame keeps what it has shown: a loss would stay alive, with all that led to
    # it. Where somebody else has it too, it is what locals() gave the script.
    is_shown = sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if is_shown and sys.getrefcount(variables) <= 3:
        variables.clear()
    return {name: value for name, value in kept.items() if not name.startswith(("__", "."))}


def attributes(value: object) -> dict[str, Any]:
    """Return the attributes of an object, without calling any code of its class."""
    found: dict[str, Any] = {}
    for kind in type(value).__mro__:
        members = vars(kind)
        # (of a module, its variables would be told as its attributes)
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


def is_users_class(kind: type) -> bool:
    """Whether a class is of the user's own code."""
    module = sys.modules.get(kind.__module__)
    if kind.__module__ == "__main__" or module is None:
        return True
    filename = vars(module).get("__file__") if ModuleType in type(module).__mro__ else None
    return type(filename) is str and is_users(filename)


def users_classes(kind: type) -> list[type]:
    """Return what of a class and those that it is derived from is the user's own."""
    return [one for one in kind.__mro__ if is_users_class(one)]


def scripts_of(kinds: list[type]) -> Iterator[tuple[str, Script]]:
    """Yield the files in which classes are, with their names."""
    for filename in dict.fromkeys(filter(None, map(_file_of, kinds))):
        if script := uses.script(filename):
            yield filename, script


def _file_of(kind: type) -> str | None:
    for member in list(vars(kind).values()):
        code = getattr(member, "__code__", None) if inspect.isfunction(member) else None
        if code and is_users(code.co_filename) and code.co_filename != "<string>":
            return str(code.co_filename)
    filename = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return filename if isinstance(filename, str) else None
