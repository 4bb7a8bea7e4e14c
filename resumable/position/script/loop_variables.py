"""Finds variables and generators that the script's loop carries along, and that no checkpoint has."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import islice
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from ...loaders.generators import code_names, rng, search
from . import called, loader_data, loops
from .events import Name, owner_of, root_of
from .loops import DICTS, SEQUENCES, Running

PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MOST_ITEMS = 256
_ARRAYS = (torch.Tensor, np.ndarray)
_LARGEST_ARRAY = 1 << 16
_SAMPLED = 1024
_ELEMENTS = 8
_SEARCHES = {4**number for number in range(16)}


@dataclass(frozen=True, eq=False)
class _Tensor:
    """What differs if a tensor has changed; to be moved to another device is no change."""

    number: int
    version: int
    sample: str
    """Some of its elements: a new tensor may be where an old one was."""
    device: torch.device

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Tensor):
            return False
        is_moved = self.device != other.device
        seen = [(one.number, one.version, one.sample) for one in (self, other)]
        return is_moved or seen[0] == seen[1]

    __hash__ = None  # type: ignore[assignment]


class LoopVariables:
    """The variables that affect the rest of the training, and that change from one save to the next.

    `given` returns the objects that a checkpoint has, `loaders` those over which the script loops.
    """

    def __init__(
        self, given: Callable[[], Collection[Any]], loaders: Callable[[], Collection[Any]] = tuple
    ) -> None:
        self._given, self._loaders = given, loaders
        self._seen: dict[object, dict[Name, Any]] = {}
        self._named: set[Name] = set()

    def begin(self, functions: Collection[Running]) -> None:
        """Look at the loops around the first batch or body, which the first save is compared with.

        Only at what a loop computes: a count, a flag or a list may change once, where it is first used.
        """
        saved = self._saved()
        for one in functions:
            now = self._values(one, saved).items()
            # What a loss keeps, such as a window, it may make at its first batch.
            computed = {
                name: value
                for name, value in now
                if _is_computed(value) and not issubclass(type(one.root(name)), torch.nn.Module)
            }
            self._seen[one.key] = computed | self._seen.get(one.key, {})

    def changed(self, functions: Collection[Running]) -> list[Name]:
        """Look at the loops around a save; return the variables that have changed for the first time."""
        saved, changed = self._saved(), set[Name]()
        for one in functions:
            now, before = self._values(one, saved), self._seen.get(one.key, {})
            changed |= {name for name in now.keys() & before.keys() if now[name] != before[name]}
            # Another place in the same loops need not carry all of them.
            owners = set(map(owner_of, now))
            others = {name: value for name, value in before.items() if owner_of(name) not in owners}
            self._seen[one.key] = others | now
        # An element goes without saying beside its container.
        changed = {name for name in changed if owner_of(name) == name or owner_of(name) not in changed}
        new = sorted(changed - self._named)
        self._named.update(new)
        return new

    def _values(self, function: Running, saved: Collection[int]) -> dict[Name, Any]:
        found = _values(function, saved)
        for name, value in loader_data.changed_in(function, self._loaders()).items():
            if id(value) not in saved:
                found |= {function.shown(name): _contents(value)}
        return found

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
        owner = [*way.values()][:1]
        if is_attribute and not all(map(_may_carry, owner)):
            continue
        if name not in carried.renewed and any(issubclass(type(one), torch.nn.Module) for one in owner):
            # A mask that is made again where it does not fit, or what is only shown.
            continue
        for reached, value in [*way.items()][-1:]:
            # A tensor or array that is only written into is mostly a buffer that each body fills.
            is_filled = issubclass(type(value), (*_ARRAYS, tuple)) or reached in carried.filled
            is_buffer = is_filled and reached not in carried.assigned
            found |= {} if is_buffer else glance(reached, value)
            if reached in carried.written and type(value) in SEQUENCES:
                found[reached] = [*map(_element, [*islice(value, _MOST_ITEMS)]), len(value)]
            elif reached in carried.written and type(value) in DICTS:
                items = [*islice(value.items(), _MOST_ITEMS)]
                found |= {f"{reached}[{key!r}]": _element(one) for key, one in items if type(key) in PLAIN}
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
        return {} if _is_parameter(value) else {name: _tensor(value)}
    if issubclass(type(value), tuple):
        return {name: _element(value)}
    if type(value) in SEQUENCES:
        last = [value[-1]] if value else []
        # Its tensors may be buffers that each body fills.
        return {name: [len(value), *[id(one) if type(one) in _ARRAYS else _element(one) for one in last]]}
    if type(value) is np.ndarray:
        return {name: _array(value)}
    if type(value) in DICTS:
        return {
            f"{name}[{key!r}]": _comparable(one) for key, one in _plain_items(value) if type(key) in PLAIN
        }
    own = loops.attributes(value) if _has_own_attributes(value) else {}
    # An object may have keys that are no text among its attributes.
    found = {f"{name}.{key}": _comparable(one) for key, one in _plain_items(own)}
    return {reached: one for reached, one in found.items() if not reached.startswith(f"{name}.__")}


def _is_computed(value: Any) -> bool:
    is_inside = isinstance(value, tuple) and any(map(_is_computed, value))
    return is_inside or isinstance(value, (float, _Tensor, bytes))


def _contents(value: Any) -> Any:
    """Return what a loader may load from in a form to compare."""
    if type(value) in SEQUENCES:
        return [len(value), *map(_element, islice(value, _MOST_ITEMS))]
    return _element(value)


def _element(value: Any) -> Any:
    """Return one of several values in a form to compare."""
    if type(value) in PLAIN:
        return _comparable(value)
    if type(value) is torch.Tensor:
        return id(value) if _is_parameter(value) else _tensor(value)
    if type(value) is np.ndarray:
        return _array(value)
    if issubclass(type(value), tuple):
        return tuple(map(_element, islice(tuple.__iter__(value), _MOST_ITEMS)))
    return id(value)


def _is_parameter(tensor: torch.Tensor) -> bool:
    return tensor.is_leaf and tensor.requires_grad


def _tensor(tensor: torch.Tensor) -> _Tensor:
    version = 0 if tensor.is_inference() else tensor._version
    # To read a value would wait for a GPU.
    return _Tensor(id(tensor), version, sample(tensor) if tensor.is_cpu else "", tensor.device)


def sample(tensor: torch.Tensor) -> str:
    """Return some elements of a tensor, as text: nan is not equal to itself."""
    if tensor.layout is not torch.strided or tensor.is_quantized or not tensor.numel():
        return ""
    row = tensor.detach()[(0,) * (tensor.dim() - 1)]
    return str((row[:_ELEMENTS] if row.dim() else row).tolist())


def _array(array: np.ndarray) -> Any:
    is_small = array.nbytes <= _LARGEST_ARRAY and not array.dtype.hasobject
    return array.tobytes() if is_small else _sample(array)


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


def _may_carry(value: Any) -> bool:
    """Whether an attribute of an object may be what a loop carries along."""
    if issubclass(type(value), torch.nn.Module):
        # A loss: those of a model are looked at with its weights.
        return code_names.is_own(str(type(value).__module__)) and not called.has_parameters(value)
    return _has_own_attributes(value)


def _has_own_attributes(value: Any) -> bool:
    """Whether the script itself gives the object its attributes."""
    if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
        return False
    if isinstance(value, (type, FunctionType)):
        return code_names.is_own_definition(value)
    return isinstance(value, (SimpleNamespace, Namespace)) or code_names.is_own(str(type(value).__module__))
