"""Variables of the script that its loop carries from one body to the next, and that no checkpoint has."""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from types import CodeType, FrameType
from typing import Any

import torch

from ..loaders import rng
from . import bytecode
from .bytecode import Name

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_SEQUENCES = (list, deque)
_LIBRARY = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_PYTHON = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib"))
_TOP = __name__.partition(".")[0]
_INSTALLED = ("site-packages", "dist-packages")


class LoopVariables:
    """The variables that decide how the training goes on, and that change from one save to the next.

    `given` returns the objects that a checkpoint has.
    """

    def __init__(self, given: Callable[[], Collection[Any]]) -> None:
        self._given = given
        self._seen: dict[CodeType, dict[Name, Any]] = {}

    def saved(self) -> list[Name]:
        """Look at the loops around a save; return the variables that have changed since the last save."""
        changed = []
        for frame in _frames_of_script():
            now, before = self._values(frame), self._seen.get(frame.f_code, {})
            changed += [name for name in now.keys() & before.keys() if now[name] != before[name]]
            self._seen[frame.f_code] = now
        return sorted(changed)

    def _values(self, frame: FrameType) -> dict[Name, Any]:
        variables = variables_of(frame)
        states = frozenset(_states(variables, frame))
        saved = {id(one) for one in self._saved()}
        found: dict[Name, Any] = {}
        carried = bytecode.carried(frame.f_code, frame.f_lasti, states)
        for name in carried.assigned | carried.kept:
            root, _, attribute = name.partition(".")
            value = variables.get(root, frame.f_globals.get(root))
            if attribute and _is_of_user(value) and id(value) not in saved:
                value = getattr(value, "__dict__", {}).get(attribute)
            elif attribute:
                continue
            if id(value) not in saved and (
                name in carried.assigned or "." in name or type(value) not in _PLAIN
            ):
                found |= _glance(name, value)
        return found

    def _saved(self) -> Iterator[Any]:
        for live in self._given():
            yield live
            yield from live.values() if isinstance(live, dict) else ()


class LoopGenerators:
    """The random generators that the script's loop draws from, and that no checkpoint has.

    `known` returns those that a checkpoint has.
    """

    def __init__(self, known: Callable[[], Collection[rng.Generator]]) -> None:
        self._known = known
        self._is_first = True
        self._seen: dict[str, tuple[rng.Generator, str]] = {}

    def saved(self) -> list[str]:
        """Look at the generators around a save; return those that have moved since the last save."""
        moved = [name for name, (generator, then) in self._seen.items() if _digest(generator) != then]
        if self._is_first:
            # (this walks through all objects that the loop uses)
            self._is_first, self._seen = False, {name: (one, "") for name, one in self._find().items()}
        self._seen = {name: (one, _digest(one)) for name, (one, _) in self._seen.items()}
        return sorted(moved)

    def _find(self) -> dict[str, rng.Generator]:
        roots: dict[str, Any] = {}
        for frame in _frames_of_script():
            variables = variables_of(frame)
            states = frozenset(_states(variables, frame))
            for name in bytecode.carried(frame.f_code, frame.f_lasti, states).used:
                root, _, attribute = name.partition(".")
                owner = variables.get(root, frame.f_globals.get(root))
                roots.setdefault(name, getattr(owner, "__dict__", {}).get(attribute) if attribute else owner)
        known = {id(one) for one in self._known()}
        return {name: one for name, one in rng.find(roots).items() if id(one) not in known}


def _digest(generator: rng.Generator) -> str:
    return rng.digest(rng.read(generator))


def variables_of(frame: FrameType) -> dict[str, Any]:
    """Return the local variables of a frame, which is left as it was."""
    found = dict(frame.f_locals)
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        # Before Python 3.13 the frame would keep this copy, and a batch and its graph with it.
        getattr(frame.f_locals, "clear", dict)()
    return found


def _frames_of_script() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame:
        if _is_users(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


@cache
def _is_users(filename: str) -> bool:
    """Whether code is the user's: neither Python's, nor installed, nor of this library."""
    is_installed = any(name in filename for name in _INSTALLED)
    return not is_installed and not filename.startswith((_LIBRARY, *_PYTHON, "<frozen"))


def _states(variables: Mapping[str, Any], frame: FrameType) -> Iterator[Name]:
    """Yield the names of RunState, and of its object, in a frame."""
    seen = {**{name: frame.f_globals.get(name) for name in frame.f_code.co_names}, **variables}
    for name, value in seen.items():
        if _is_ours(value):
            yield name
        for attribute, inner in getattr(value, "__dict__", {}).items() if name == "self" else ():
            if _is_ours(inner):
                yield f"{name}.{attribute}"


def _is_ours(value: Any) -> bool:
    kind = value if isinstance(value, type) else type(value)
    return kind.__name__ == "RunState" and kind.__module__.startswith(_TOP)


def _glance(name: Name, value: Any) -> dict[Name, Any]:
    """Return what tells whether a value has changed, by its name; nothing for what is not looked at."""
    if type(value) in _PLAIN:
        # (nan is not equal to itself)
        return {name: value if value == value else "nan"}
    if type(value) is torch.Tensor:
        # To read it would wait for a GPU.
        return {} if value.ndim or value.requires_grad else {name: (id(value), value._version)}
    if type(value) in _SEQUENCES:
        return {name: (len(value), *[one for one in [*value][-1:] if type(one) in _PLAIN])}
    if _is_of_user(value):
        own = getattr(value, "__dict__", {}).items()
        return {f"{name}.{key}": one for key, one in own if type(one) in _PLAIN}
    return {}


def _is_of_user(value: Any) -> bool:
    is_torchs = isinstance(value, (torch.nn.Module, torch.optim.Optimizer))
    return not is_torchs and _is_users_module(type(value).__module__)


@cache
def _is_users_module(name: str) -> bool:
    filename = getattr(sys.modules.get(name), "__file__", None)
    return name == "__main__" or (filename is not None and _is_users(filename))
