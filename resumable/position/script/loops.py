"""Reads the functions of the script that are running: their variables, and what their loops carry along."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from functools import cache
from types import CodeType, FrameType, FunctionType, GeneratorType, MemberDescriptorType
from typing import Any, NamedTuple

from . import bytecode, script_frames
from .called import NO_VALUES, Called, Found, content, own_of
from .carried import Carried, carried_in, states_of
from .events import Name, root_of

SEQUENCES = (list, deque)
DICTS = (dict, OrderedDict, defaultdict, Counter)
TOP = __name__.partition(".")[0]


class Running(NamedTuple):
    """A function of the script that is running."""

    variables: dict[str, Any]
    others: Mapping[str, Any]
    """The variables of its module."""
    carried: Carried
    """What the loops around the place where it is carry from one body to the next."""
    key: CodeType
    """What is the same when the function is looked at again."""
    found: Found
    """The functions that it calls."""

    def root(self, name: Name) -> Any:
        """Return the variable that a name begins with, such as `self` of "self.best", or None."""
        name = root_of(name)
        if name in self.found.places:
            return content(self.found.places[name])
        return self.variables.get(name, self.others.get(name))

    def may_change(self, name: Name) -> bool:
        """Whether a name means a value, or nothing yet."""
        way = [*self.way_to(name).values()]
        return not (way and isinstance(way[-1], NO_VALUES))

    def shown(self, name: Name) -> str:
        """Return a name as a message says it: a closure's variable is an attribute of the function."""
        owner, _ = self.found.places.get(root_of(name), ({}, ""))
        return name if isinstance(owner, dict) else name.replace(":", ".", 1)

    @property
    def hidden(self) -> list[Name]:
        """The variables that decide and whose values cannot be read."""
        code = self.key
        if not _is_hidden(code):
            return []
        local = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
        return [name for name in self.carried.assigned if root_of(name) in local]

    def way_to(self, name: Name) -> dict[Name, Any]:
        """Return the values from a variable to the attribute or item that a name means, or {}."""
        path, bracket, key = name.partition("[")
        reached = root_of(name)
        value = self.root(reached)
        way = {reached: value}
        for attribute in path.removeprefix(reached).split(".")[1:]:
            try:
                value = _attribute(value, attribute)
            except LookupError:
                return {}
            reached = f"{reached}.{attribute}"
            way[reached] = value
        is_tuple = issubclass(type(value), tuple)
        if bracket and (is_tuple or type(value) in (*SEQUENCES, *DICTS)):
            index: Any = key[1:-2] if key[0] in "'\"" else int(key[:-1])
            if type(value) in DICTS and index not in value:
                # A defaultdict would add it.
                return {}
            try:
                way[name] = tuple.__getitem__(value, index) if is_tuple else value[index]
            except (LookupError, TypeError):
                return {}
        return way


def running(called: Called) -> list[Running]:
    """Return the functions of the script that are running, the innermost first."""
    found = []
    called.look()
    for frame in script_frames.of_script(sys._getframe()):
        variables = variables_of(frame)
        states = states_in(variables, frame)
        if _is_hidden(frame.f_code):
            states |= states_of(frame.f_code, states)
        functions = called.by(frame, variables, states)
        if (place := (frame.f_lasti, states)) not in functions.carried:
            carried = carried_in(frame.f_code, frame.f_lasti, states, functions.calls)
            one = Running(variables, frame.f_globals, carried, frame.f_code, functions)
            # A function or a module stays what it is: leave it out of the looks that follow.
            kept = frozenset(name for name in carried.kept if one.may_change(name))
            functions.carried[place] = carried._replace(kept=kept)
        carried = functions.carried[place]
        found.append(Running(variables, frame.f_globals, carried, frame.f_code, functions))
    return found


def variables_of(frame: FrameType) -> dict[str, Any]:
    """Return the local variables of a frame; none where to read them would change what the script has."""
    if _is_hidden(frame.f_code):
        # A read would write all of them into the dict that locals() has returned.
        return {}
    variables = frame.f_locals
    found = dict(variables)
    # Before Python 3.13 the frame keeps what it has shown, a batch and its graph among it. Where the script
    # has it too, it is what locals() returned.
    is_kept = sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if is_kept and sys.getrefcount(variables) <= 3:
        variables.clear()
    return found


def generators_in(frame: FrameType) -> list[GeneratorType[Any, Any, Any]]:
    """Return the generators in the variables that a frame of the script sees."""
    seen = [*frame.f_globals.copy().values(), *variables_of(frame).values()]
    return [one for one in seen if type(one) is GeneratorType]


@cache
def _is_hidden(code: CodeType) -> bool:
    return sys.version_info < (3, 13) and bytecode.reads_own_variables(code)


def states_in(variables: Mapping[str, Any], frame: FrameType) -> frozenset[Name]:
    """Return the names of RunState, and of its object, in a frame."""
    seen = {**{name: frame.f_globals.get(name) for name in frame.f_code.co_names}, **variables}
    seen |= {f"self.{name}": value for name, value in [*own_of(seen.get("self")).items()]}
    found = set[Name]()
    for name, value in seen.items():
        kind = value if isinstance(value, type) else type(value)
        if kind.__name__ == "RunState" and kind.__module__.startswith(TOP):
            found.add(name)
    return frozenset(found)


def _attribute(value: Any, name: str) -> Any:
    """Return one of the attributes of an object."""
    return attributes(value)[name]


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, those in slots too, and of a class, those it inherits too."""
    found: dict[str, Any] = {}
    if isinstance(value, FunctionType):
        return dict(own_of(value))
    if isinstance(value, type):
        for kind in value.__mro__:
            found = {**vars(kind), **found}
        return found
    for kind in type(value).__mro__:
        for name, one in vars(kind).items():
            if type(one) is MemberDescriptorType:
                with contextlib.suppress(AttributeError):  # it has no value yet
                    found.setdefault(name, one.__get__(value))
    if issubclass(type(value), tuple):
        # Only named tuples have fields.
        found |= zip(getattr(type(value), "_fields", ()), tuple.__iter__(value), strict=False)
    return {**found, **own_of(value)}
