"""Reads the functions of the script that are running: their variables, and what their loops carry along."""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType, MemberDescriptorType
from typing import Any

from . import bytecode, script_frames
from .carried import Carried, carried_in
from .events import Name

SEQUENCES = (list, deque)
DICTS = (dict, OrderedDict)
TOP = __name__.partition(".")[0]


@dataclass(frozen=True)
class Running:
    """A function of the script that is running."""

    variables: dict[str, Any]
    others: Mapping[str, Any]
    """The variables of its module."""
    carried: Carried
    """What the loops around the place where it is carry from one body to the next."""
    key: object
    """What is the same when the function is looked at again."""

    def root(self, name: Name) -> Any:
        """Return the variable that a name begins with, such as `self` of "self.best", or None."""
        name = name.partition("[")[0].partition(".")[0]
        return self.variables.get(name, self.others.get(name))

    def way_to(self, name: Name) -> dict[Name, Any]:
        """Return the values from a variable to the attribute or item that a name means, or {}."""
        path, bracket, key = name.partition("[")
        root, _, attribute = path.partition(".")
        value = self.root(root)
        way = {root: value}
        if attribute:
            if attribute not in (own := attributes(value)):
                return {}
            way[path] = value = own[attribute]
        if bracket and type(value) in (*SEQUENCES, *DICTS):
            index = key[1:-2] if key[0] in "'\"" else int(key[:-1])
            try:
                way[name] = value[index]
            except (LookupError, TypeError):
                return {}
        return way


def running() -> list[Running]:
    """Return the functions of the script that are running, the innermost first."""
    found = []
    for frame in script_frames.of_script(sys._getframe()):
        variables = variables_of(frame)
        carried = carried_in(frame.f_code, frame.f_lasti, states_in(variables, frame))
        found.append(Running(variables, frame.f_globals, carried, frame.f_code))
    return found


def variables_of(frame: FrameType) -> dict[str, Any]:
    """Return the local variables of a frame; none where to read them would change what the script has."""
    if sys.version_info < (3, 13) and bytecode.reads_global(frame.f_code, frozenset({"locals", "vars"})):
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


def states_in(variables: Mapping[str, Any], frame: FrameType) -> frozenset[Name]:
    """Return the names of RunState, and of its object, in a frame."""
    seen = {**{name: frame.f_globals.get(name) for name in frame.f_code.co_names}, **variables}
    seen |= {f"self.{name}": value for name, value in getattr(seen.get("self"), "__dict__", {}).items()}
    kinds = {name: value if isinstance(value, type) else type(value) for name, value in seen.items()}
    ours = [name for name, kind in kinds.items() if kind.__name__ == "RunState"]
    return frozenset(name for name in ours if kinds[name].__module__.startswith(TOP))


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, those in slots too."""
    members = [(name, one) for kind in type(value).__mro__ for name, one in vars(kind).items()]
    slots = [name for name, one in members if type(one) is MemberDescriptorType and hasattr(value, name)]
    return {**{name: getattr(value, name) for name in slots}, **getattr(value, "__dict__", {})}
