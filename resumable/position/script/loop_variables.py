"""Finds variables and generators that the script's loop carries along, and that no checkpoint has."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ...loaders.generators import code_names, rng, search
from . import called, loops
from .events import Name, owner_of, root_of
from .loops import DICTS, SEQUENCES, Running

PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MOST_ITEMS = 256
_ARRAYS = (torch.Tensor, np.ndarray)
_LARGEST_ARRAY = 1 << 16
_SAMPLED = 1024
_SEARCHES = {4**number for number in range(16)}


@dataclass(frozen=True, eq=False)
class _Tensor:
    """What differs if a tensor has changed; to be moved to another device is no change."""

    number: int
    version: int
    device: torch.device

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Tensor):
            return False
        is_moved = self.device != other.device
        return is_moved or (self.number, self.version) == (other.number, other.version)

    __hash__ = None  # type: ignore[assignment]


class LoopVariables:
    """The variables that affect the rest of the training, and that change from one save to the next.

    `given` returns the objects that a checkpoint has.
    """

    def __init__(self, given: Callable[[], Collection[Any]]) -> None:
        self._given = given
        self._seen: dict[object, dict[Name, Any]] = {}
        self._named: set[Name] = set()

    def begin(self, functions: Collection[Running]) -> None:
        """Look at the loops around the first batch or body, which the first save is compared with.

        Only at what a loop computes: a count, a flag or a list may change once, where it is first used.
        """
        saved = self._saved()
        for one in functions:
            now = _values(one, saved).items()
            computed = {name: value for name, value in now if isinstance(value, (float, _Tensor, bytes))}
            self._seen[one.key] = computed | self._seen.get(one.key, {})

    def changed(self, functions: Collection[Running]) -> list[Name]:
        """Look at the loops around a save; return the variables that have changed for the first time."""
        saved, changed = self._saved(), set[Name]()
        for one in functions:
            now, before = _values(one, saved), self._seen.get(one.key, {})
            changed |= {name for name in now.keys() & before.keys() if now[name] != before[name]}
            self._seen[one.key] = now
        # An element goes without saying beside its container.
        changed = {name for name in changed if owner_of(name) == name or owner_of(name) not in changed}
        new = sorted(changed - self._named)
        self._named.update(new)
        return new

    def summed(self, functions: Collection[Running]) -> set[Name]:
        """Return the variables that each epoch begins again, and that are only saved as metrics."""
        return {one.shown(name) for one in functions for name in one.carried.summed}

    def hidden(self, functions: Collection[Running]) -> list[Name]:
        """Return the variables that could not be compared, for the first time."""
        new = sorted({name for one in functions for name in one.hidden} - self._named)
        self._named.update(new)
        return new

    def _saved(self) -> set[int]:
        """Return the ids of the objects that a checkpoint has, and of what they hold."""
        found: list[Any] = []
        for live in self._given():
            found += [live, *(live.values() if isinstance(live, dict) else ())]
            if not isinstance(live, torch.nn.Module):
                found += getattr(live, "__dict__", {}).values()
        return {id(one) for one in found if type(one) not in PLAIN}


def _values(function: Running, saved: Collection[int]) -> dict[Name, Any]:
    """Return what the loops of a function carry along and no checkpoint has, in a form to compare."""
    carried, found = function.carried, dict[Name, Any]()
    for name in carried.assigned | carried.kept:
        way = function.way_to(name)
        if any(id(one) in saved or id(getattr(one, "__dict__", None)) in saved for one in way.values()):
            continue
        is_attribute = "." in name.partition("[")[0][len(root_of(name)) :]
        if is_attribute and not all(map(_has_own_attributes, [*way.values()][:1])):
            continue
        for reached, value in [*way.items()][-1:]:
            # A tensor or array that is only written into is mostly a buffer that each body fills.
            is_filled = type(value) in _ARRAYS or reached in carried.filled
            is_buffer = is_filled and reached not in carried.assigned
            found |= {} if is_buffer else glance(reached, value)
            if reached in carried.written and type(value) in SEQUENCES:
                found[reached] = [*map(_element, [*islice(value, _MOST_ITEMS)]), len(value)]
    return {function.shown(name): value for name, value in found.items() if name not in carried.made}


class LoopGenerators:
    """The random generators that the script's loop draws from, and that no checkpoint has.

    `known` returns those that a checkpoint has.
    """

    def __init__(self, known: Callable[[], Collection[rng.Generator]]) -> None:
        self._known = known
        self._saves = 0
        self._seen: dict[str, tuple[rng.Generator, str]] = {}
        self._named: set[str] = set()

    def begin(self, functions: Collection[Running]) -> None:
        """Look at the generators that the loops around the first batch or body draw from."""
        self._seen = {name: (one, _digest(one)) for name, one in self._find(functions).items()} | self._seen

    def moved(self, functions: Collection[Running]) -> list[str]:
        """Look at the generators around a save; return those that have moved for the first time."""
        moved = [name for name, (generator, then) in self._seen.items() if _digest(generator) != then]
        self._saves += 1
        if self._saves in _SEARCHES:
            # The walk through all objects that the loop uses is slow: repeat it ever more rarely.
            self._seen = {name: (one, "") for name, one in self._find(functions).items()}
        self._seen = {name: (one, _digest(one)) for name, (one, _) in self._seen.items()}
        new = sorted(set(moved) - self._named)
        self._named.update(new)
        return new

    def _find(self, functions: Collection[Running]) -> dict[str, rng.Generator]:
        roots: dict[str, Any] = {}
        for one in functions:
            for name in one.carried.used:
                for reached, value in [*one.way_to(name).items()][-1:]:
                    roots.setdefault(one.shown(reached), value)
        known = {id(one) for one in self._known()} | rng.global_ones()
        found = search.find(roots)
        for function in {inner for one in functions for inner in one.found.installed}:
            found = called.generators_of(function) | found
        return {name: one for name, one in found.items() if id(one) not in known}


def _digest(generator: rng.Generator) -> str:
    return rng.digest(rng.read(generator))


def glance(name: Name, value: Any) -> dict[Name, Any]:
    """Return a value, or what is in it, in a form to compare, by name; {} for kinds that are skipped."""
    if issubclass(type(value), np.generic):
        value = value.item()
    if type(value) in PLAIN:
        return {name: _comparable(value)}
    if type(value) is torch.Tensor:
        # A leaf that needs a gradient is a parameter. To read a value would wait for a GPU.
        version = 0 if value.is_inference() else value._version
        is_parameter = value.is_leaf and value.requires_grad
        return {} if is_parameter else {name: _Tensor(id(value), version, value.device)}
    if type(value) in SEQUENCES:
        last = [value[-1]] if value else []
        return {name: (len(value), *[_comparable(one) for one in last if type(one) in PLAIN])}
    if type(value) is np.ndarray:
        return {
            name: value.tobytes()
            if value.nbytes <= _LARGEST_ARRAY and not value.dtype.hasobject
            else _sample(value)
        }
    if type(value) in DICTS:
        return {
            f"{name}[{key!r}]": _comparable(one) for key, one in _plain_items(value) if type(key) in PLAIN
        }
    own = loops.attributes(value) if _has_own_attributes(value) else {}
    return {f"{name}.{key}": _comparable(one) for key, one in _plain_items(own)}


def _element(value: Any) -> Any:
    return _comparable(value) if type(value) in PLAIN else id(value)


def _sample(array: np.ndarray) -> object:
    """Return elements that are mostly among those that a write changes."""
    if array.dtype.hasobject or not array.flags.c_contiguous:
        return id(array)
    flat = array.reshape(-1)
    return id(array), flat[:_SAMPLED].tobytes(), flat[:: max(1, len(flat) // _SAMPLED)].tobytes()


def _plain_items(values: dict[Any, Any]) -> list[tuple[Any, Any]]:
    # The list is made first: another thread of the script may add items meanwhile.
    return [(key, one) for key, one in [*islice(values.items(), _MOST_ITEMS)] if type(one) in PLAIN]


def _comparable(value: Any) -> Any:
    # nan is not equal to itself.
    return value if value == value else "nan"


def _has_own_attributes(value: Any) -> bool:
    """Whether the script itself gives the object its attributes."""
    if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
        return False
    return isinstance(value, (SimpleNamespace, Namespace)) or code_names.is_own(str(type(value).__module__))
