"""Finds the functions that the script's loops call, and the variables outside of them that these access."""

from __future__ import annotations

import builtins
import dis
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

from ...loaders.generators import code_names, rng, search
from .bytecode import loops_around
from .carried import Carried, summary_of
from .events import Calls, Name, call_of, codes_in, instructions_of, is_method
from .statements import SHOWS

_DEEPEST = 3
_LOOKS = {4**number for number in range(16)}
NO_VALUES = (ModuleType, FunctionType, BuiltinFunctionType, MethodType, type, torch.optim.Optimizer)
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_CALLERS = ("step", "map", "filter")
"""Functions and methods that call the function that they are given first."""
Path = tuple[str, ...]


@dataclass
class Found:
    """The functions that a function of the script calls."""

    calls: Calls = ()
    places: dict[Name, tuple[Any, str]] = field(default_factory=dict)
    """Where a variable has its value: the variables of a module and its name there, or a closure's cell."""
    installed: list[FunctionType] = field(default_factory=list)
    """Those of installed packages."""
    carried: dict[tuple[int, frozenset[Name]], Carried] = field(default_factory=dict)
    """What the loops around a place carry, given the names of the RunState."""


class Called:
    """Finds the functions that running functions call, ever more rarely: they seldom change."""

    def __init__(self) -> None:
        self._looks = 0
        self._found: dict[tuple[CodeType, tuple[int, int] | None], Found] = {}

    def look(self) -> None:
        """Note that the script is looked at again."""
        self._looks += 1
        if self._looks in _LOOKS:
            self._found = {}

    def by(self, frame: FrameType, variables: Mapping[str, Any], states: frozenset[Name]) -> Found:
        """Return the functions that a running function calls."""
        loop = min(loops_around(frame.f_code, frame.f_lasti), default=None)
        key = frame.f_code, loop
        if key not in self._found:
            self._found[key] = _Search(frame, loop, variables, states).found if loop else Found()
        return self._found[key]


class _Scope(NamedTuple):
    """A function, with its variables."""

    code: CodeType
    values: Mapping[str, Any]
    names: Mapping[str, Name]
    """Their names in the script, if they are others; "<name>" if it is the function's own, or no value."""


class _Search:
    """The search for what one running function calls."""

    def __init__(
        self,
        frame: FrameType,
        loop: tuple[int, int],
        variables: Mapping[str, Any],
        states: frozenset[Name],
    ) -> None:
        self.found, self._loop = Found(), loop
        self._frame, self._variables, self._states = frame, variables, states
        self._local = {*frame.f_code.co_varnames, *frame.f_code.co_cellvars, *frame.f_code.co_freevars}
        running = _Scope(frame.f_code, {**frame.f_globals, **variables}, {})
        self.found.calls = self._calls_in(running, ())

    def _calls_in(self, scope: _Scope, around: tuple[CodeType, ...]) -> Calls:
        """Return the calls in a function's code; `around`: the functions that have called it."""
        calls, ways, codes = [], dict[Path, list[Any]](), (*around, scope.code)
        begin, last = (0, len(scope.code.co_code)) if around else self._loop
        for at, end, path, is_dropped in _paths(scope.code):
            if at > last:
                break
            if path not in ways:
                ways[path] = _way(scope.values.get(path[0]), path[1:])
            way = ways[path]
            function = way[-1] if way else None
            if is_object := type(function) is not FunctionType:
                # What an object returns that only shows something, such as a bar, is dropped.
                function = None if is_dropped else _called_as_function(function)
            if type(function) is not FunctionType or function.__code__ in codes:
                continue
            if at < begin and not self._may_restore(function):
                continue
            if not code_names.is_own_code(function.__code__, function.__globals__):
                if path[-1] not in SHOWS and not code_names.is_known(str(function.__module__)):
                    self.found.installed.append(function)
                continue
            owners, steps = (way, path[1:]) if is_object else (way[:-1], path[1:-1])
            owner = owners[-1] if owners and type(owners[-1]) is not ModuleType else None
            name = scope.names.get(path[0], path[0])
            of_owner = "" if name.startswith("<") else ".".join((name, *steps))
            inner = self._scope(function, None if isinstance(owner, type) else owner, of_owner)
            deeper = self._calls_in(inner, codes) if len(codes) < _DEEPEST else ()
            calls.append((at, end, summary_of(inner.code, deeper, tuple(inner.names.items()), self._states)))
        return tuple(calls)

    def _may_restore(self, function: FunctionType) -> bool:
        """Whether a function that is called before the loop may restore something."""
        code = function.__code__
        return not self._states.isdisjoint((*code.co_names, *code.co_varnames))

    def _scope(self, function: FunctionType, bound: Any, name_of_bound: Name) -> _Scope:
        """Return the scope of a function; `bound` is the object whose method it is."""
        code, variables = function.__code__, function.__globals__
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        own = {*code.co_varnames, *code.co_cellvars}
        values, names = dict[str, Any](), dict[str, Name]()
        for name in sorted({*code.co_names, *code.co_freevars, *own}):
            names[name] = f"<{name}>"
            if name == "self" and name not in cells:
                values[name], names[name] = bound, name_of_bound or names[name]
                continue
            place: tuple[Any, str]
            if name in cells:
                value, place = search.content_of(cells[name]), (cells[name], "")
                is_of_frame = name in self._local and self._variables.get(name) is value
                label = name if is_of_frame else f"{code.co_name}:{name}"
            elif name in own or name not in variables:
                continue
            else:
                value, place = variables[name], (variables, name)
                is_of_frame = variables is self._frame.f_globals and name not in self._local
                label = name if is_of_frame else f"{variables.get('__name__')}:{name}"
            values[name] = value
            if not isinstance(value, NO_VALUES) or _has_own_values(value):
                names[name] = label
                if not is_of_frame:
                    self.found.places[label] = place
        return _Scope(code, values, names)


def generators_of(function: FunctionType) -> dict[str, rng.Generator]:
    """Return the random generators in modules that a function of an installed package may draw from."""
    found: dict[str, rng.Generator] = {}
    waiting, seen = [(function, 0)], {function}
    while waiting:
        one, depth = waiting.pop()
        names = {name for code in codes_in(one.__code__) for name in code.co_names}
        modules = [variables for name in names if type(variables := one.__globals__.get(name)) is ModuleType]
        for variables in [one.__globals__, *map(vars, modules)]:
            module = str(variables.get("__name__"))
            for name in [] if code_names.is_known(module) else sorted(names & variables.keys()):
                value = variables[name]
                if rng.is_generator(value):
                    found[f"{module}:{name}"] = value
                elif type(value) is FunctionType and depth < _DEEPEST and value not in seen:
                    seen.add(value)
                    waiting.append((value, depth + 1))
    return found


def _has_own_values(value: Any) -> bool:
    """Whether a function of the script has attributes, or a class is the script's."""
    if not isinstance(value, (type, FunctionType)) or not code_names.is_own_definition(value):
        return False
    return isinstance(value, type) or bool(value.__dict__)


def _way(value: Any, attributes: Path) -> list[Any]:
    """Return the values on the way to an attribute of an attribute, without running code of the script."""
    way = [value]
    for name in attributes:
        own = own_of(value)
        if type(own) is not dict and not isinstance(value, (type, ModuleType)):
            return []
        kind = value if isinstance(value, type) else type(value)
        for held in (own, *map(vars, kind.__mro__)):
            if name in held:
                value = held[name]
                break
        else:
            return []
        way.append(value)
    return way


def _called_as_function(value: Any) -> Any:
    """Return the method that a call of an object runs; None of a model, whose code may be long."""
    method = "__call__"
    if issubclass(type(value), torch.nn.Module):
        method = "" if has_parameters(value) else "forward"
    held = [vars(kind)[method] for kind in type(value).__mro__ if method in vars(kind)]
    return held[0] if held else None


def has_parameters(module: torch.nn.Module) -> bool:
    """Whether a module, or one in it, has parameters."""
    return next(module.parameters(), None) is not None


def own_of(value: Any) -> Any:
    """Return the attributes of an object without running its code."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}


def content(place: tuple[Any, str]) -> Any:
    """Return the value at a place that was found, or None."""
    owner, name = place
    return owner.get(name) if isinstance(owner, dict) else search.content_of(owner)


@cache
def _paths(code: CodeType) -> tuple[tuple[int, int, Path, bool], ...]:
    """Return the functions that code calls: between which offsets each is loaded, and by what names.

    The last value tells whether what it returns is dropped.
    """
    return tuple(_find_paths(code, instructions_of(code)))


def _find_paths(code: CodeType, instructions: list[dis.Instruction]) -> Iterator[tuple[int, int, Path, bool]]:
    for number, one in enumerate(instructions):
        if not one.opname.startswith("LOAD_") or not _is_variable(one):
            continue
        names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
        is_passed = number > 0 and instructions[number - 1].argval in _CALLERS
        name = str(names[0] if is_passed else names[-1])
        if name in vars(builtins):
            continue
        last = number
        while instructions[last + 1].opname in _ATTRIBUTES and not is_method(instructions[last]):
            last += 1
        place = call_of(instructions, code.co_consts, last + 1)
        if is_passed or place:
            attributes = (str(step.argval) for step in instructions[number + 1 : last + 1])
            # In Python 3.11 a call is two instructions.
            after = [step.opname for step in instructions[place[0] + 1 :][:2]] if place else []
            is_dropped = "POP_TOP" in after[: 1 + (after[:1] == ["CALL"])]
            yield one.offset, instructions[last].offset, (name, *attributes), is_dropped


def _is_variable(one: dis.Instruction) -> bool:
    return bool({"FAST", "NAME", "GLOBAL", "DEREF"} & {*one.opname.split("_")})
