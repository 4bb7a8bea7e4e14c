"""Variables of the script that its loop carries from one body to the next, and that no checkpoint has."""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch

from ..loaders import named, rng
from . import bytecode, iteration
from .bytecode import Name

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_SEQUENCES = (list, deque)
_TOP = __name__.partition(".")[0]


class LoopVariables:
    """The variables that decide how the training goes on, and that change from one save to the next.

    `given` returns the objects that a checkpoint has.
    """

    def __init__(self, given: Callable[[], Collection[Any]]) -> None:
        self._given = given
        self._seen: dict[CodeType, dict[Name, Any]] = {}
        self._named: set[Name] = set()

    def changed(self) -> list[Name]:
        """Look at the loops around a save; return the variables that have changed for the first time."""
        changed: list[Name] = []
        for frame in iteration.of_script(sys._getframe()):
            now, before = self._values(frame), self._seen.get(frame.f_code, {})
            changed += [name for name in now.keys() & before.keys() if now[name] != before[name]]
            self._seen[frame.f_code] = now
        new = sorted(set(changed) - self._named)
        self._named.update(new)
        return new

    def _values(self, frame: FrameType) -> dict[Name, Any]:
        variables = variables_of(frame)
        states = frozenset(states_in(variables, frame))
        saved = {id(one) for one in self._saved() if type(one) not in _PLAIN}
        found: dict[Name, Any] = {}
        carried = bytecode.carried(frame.f_code, frame.f_lasti, states)
        for name in carried.assigned | carried.kept:
            root, _, attribute = name.partition(".")
            value = variables.get(root, frame.f_globals.get(root))
            if id(getattr(value, "__dict__", None)) in saved:
                continue
            if attribute and _is_of_user(value) and id(value) not in saved:
                value = getattr(value, "__dict__", {}).get(attribute)
            elif attribute:
                continue
            # A tensor that is only written into is mostly a buffer that each body fills.
            is_buffer = type(value) is torch.Tensor and name not in carried.assigned
            if id(value) not in saved and not is_buffer:
                found |= _glance(name, value)
        return found

    def _saved(self) -> Iterator[Any]:
        for live in self._given():
            yield live
            yield from live.values() if isinstance(live, dict) else ()
            if not isinstance(live, torch.nn.Module):
                yield from [*getattr(live, "__dict__", {}).values()]


class LoopGenerators:
    """The random generators that the script's loop draws from, and that no checkpoint has.

    `known` returns those that a checkpoint has.
    """

    def __init__(self, known: Callable[[], Collection[rng.Generator]]) -> None:
        self._known = known
        self._is_first = True
        self._seen: dict[str, tuple[rng.Generator, str]] = {}
        self._named: set[str] = set()

    def moved(self) -> list[str]:
        """Look at the generators around a save; return those that have moved for the first time."""
        moved = [name for name, (generator, then) in self._seen.items() if _digest(generator) != then]
        if self._is_first:
            # (this walks through all objects that the loop uses)
            self._is_first, self._seen = False, {name: (one, "") for name, one in self._find().items()}
        self._seen = {name: (one, _digest(one)) for name, (one, _) in self._seen.items()}
        new = sorted(set(moved) - self._named)
        self._named.update(new)
        return new

    def _find(self) -> dict[str, rng.Generator]:
        roots: dict[str, Any] = {}
        for frame in iteration.of_script(sys._getframe()):
            variables = variables_of(frame)
            states = frozenset(states_in(variables, frame))
            for name in bytecode.carried(frame.f_code, frame.f_lasti, states).used:
                root, _, attribute = name.partition(".")
                owner = variables.get(root, frame.f_globals.get(root))
                roots.setdefault(name, getattr(owner, "__dict__", {}).get(attribute) if attribute else owner)
        known = {id(one) for one in self._known()} | rng.global_ones()
        return {name: one for name, one in rng.find(roots).items() if id(one) not in known}


def _digest(generator: rng.Generator) -> str:
    return rng.digest(rng.read(generator))


def variables_of(frame: FrameType) -> dict[str, Any]:
    """Return the local variables of a frame; none where to read them would change what the script has."""
    if sys.version_info < (3, 13) and not {"locals", "vars"}.isdisjoint(frame.f_code.co_names):
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


def states_in(variables: Mapping[str, Any], frame: FrameType) -> Iterator[Name]:
    """Yield the names of RunState, and of its object, in a frame."""
    seen = {**{name: frame.f_globals.get(name) for name in frame.f_code.co_names}, **variables}
    for name, value in seen.items():
        if _is_ours(value):
            yield name
        for attribute, inner in [*getattr(value, "__dict__", {}).items()] if name == "self" else ():
            if _is_ours(inner):
                yield f"{name}.{attribute}"


def _is_ours(value: Any) -> bool:
    kind = value if isinstance(value, type) else type(value)
    return kind.__name__ == "RunState" and kind.__module__.startswith(_TOP)


def _glance(name: Name, value: Any) -> dict[Name, Any]:
    """Return what tells whether a value has changed, by its name; nothing for what is not looked at."""
    if issubclass(type(value), np.generic):
        value = value.item()
    if type(value) in _PLAIN:
        return {name: _comparable(value)}
    if type(value) is torch.Tensor:
        # A leaf that needs a gradient is a parameter. To read a value would wait for a GPU.
        version = 0 if value.is_inference() else value._version
        return {} if value.is_leaf and value.requires_grad else {name: (id(value), version)}
    if type(value) in _SEQUENCES:
        last = [value[-1]] if value else []
        return {name: (len(value), *[_comparable(one) for one in last if type(one) in _PLAIN])}
    if _is_of_user(value):
        # (a thread of the script's may add to them meanwhile)
        own = [*getattr(value, "__dict__", {}).items()]
        return {f"{name}.{key}": _comparable(one) for key, one in own if type(one) in _PLAIN}
    return {}


def _comparable(value: Any) -> Any:
    # (nan is not equal to itself)
    return value if value == value else "nan"


def _is_of_user(value: Any) -> bool:
    is_torchs = isinstance(value, (torch.nn.Module, torch.optim.Optimizer))
    return not is_torchs and named.is_own(str(type(value).__module__))
