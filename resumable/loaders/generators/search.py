"""Finds the random generators that hang off an object, or that its code names."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from types import BuiltinMethodType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, TypeVar

import numpy as np
import torch

from ...processes.signals import is_of_a_handler
from . import code_names, rng, stages
from .code_names import GENERATORS, Generator, is_generator

T = TypeVar("T")
# How deep to search: enough for a transform of a subset of a concatenation.
_DEEPEST = 16
WIDEST = 256
_MOST = 10_000
_PLAIN = code_names.PLAIN
_OF_MODULES = frozenset(vars(torch.nn.Module()))
_TENSORS = ("_parameters", "_buffers")
_CONTAINERS = {dict, list, tuple, set, deque, OrderedDict}

Way = tuple[tuple[object, str, object], ...]
"""The path to an object: each object on it, the name of its child, and the child."""


Step = tuple[str, object, Way]
"""An object's path as text, the object, and the way to it."""


def plant(root: object, path: str, state: Any) -> Generator | None:
    """Make a generator where an object still has None: many make theirs at the first sample.

    `state` is the state of the generator that was there. Return None if the place is taken, but a
    generator in a module as it is: by now another path may lead to it.
    """
    if not is_free(root, path):
        return None
    owner, last = _owner(root, path)
    if is_generator(there := _held(owner, last)):
        return there
    made = rng.made_for(state)
    if isinstance(owner, dict):
        # Many keep a generator for each worker, under its number.
        key = int(last) if last.removeprefix("-").isdigit() else last
        owner[key if last not in owner else last] = made
    else:
        setattr(owner, last, made)
    return made


def is_free(root: object, path: str) -> bool:
    """Whether an object is there that has None, or nothing, where the path ends; or a module's generator."""
    _import_as_code_does(root, path)
    owner, last = _owner(root, path)
    # The variables of a function are its own: nothing can be set there.
    can_have = isinstance(owner, dict) or (
        hasattr(owner, "__dict__") and not isinstance(owner, (FunctionType, partial))
    )
    if can_have and (isinstance(owner, type) or is_in_module(path)):
        # The name has to be there: code may mean a builtin by one that is not, and a class inherits.
        variables = vars(owner) if isinstance(owner, type) else owner
        return last in variables and (variables[last] is None or is_generator(variables[last]))
    return can_have and _held(owner, last) is None


def _import_as_code_does(root: object, path: str) -> None:
    """Import the module of a path, if it is not there yet and code imports it as it runs.

    No other module is imported: the path is what a checkpoint says.
    """
    module, colon, _ = path.partition(":")
    if colon and module not in sys.modules:
        codes = [one.__code__ for one in inside_code(root) if code_names.is_own(str(one.__module__))]
        if any(module in code_names.imports(code) for code in codes):
            with contextlib.suppress(ImportError):
                importlib.import_module(module)


def renamed(states: Mapping[str, T], now: Collection[str]) -> dict[str, T]:
    """Return states by the paths of `now`: the module that is the script may have run under another name."""
    new = [path for path in now if path not in states and is_in_module(path)]
    found = {}
    for path, state in states.items():
        module, colon, name = path.partition(":")
        alike = [one for one in new if colon and one.endswith(f":{name}")]
        is_script = "__main__" in (module, *(one.partition(":")[0] for one in alike))
        is_there = module in sys.modules and is_generator(vars(sys.modules[module]).get(name))
        found[alike[0] if len(alike) == 1 and is_script and not is_there else path] = state
    return found


def is_in_module(path: str) -> bool:
    """Whether a path begins in a module, and not at an object.

    >>> is_in_module("random:_inst"), is_in_module("dataset.random")
    (True, False)
    """
    module, colon, _ = path.partition(":")
    return bool(colon) and module in sys.modules


def _owner(root: object, path: str) -> tuple[Any, str]:
    """Return the object at which the last name of a path is looked up, and that name."""
    if not is_in_module(path):
        *names, last = path.split(".")
        for name in names:
            root = dict(_children(root)).get(name)
        return root, last
    module, _, inside = path.partition(":")
    above, _, last = inside.rpartition(".")
    if above:
        return next((value for at, value, _ in walk(root) if at == f"{module}:{above}"), None), last
    for code in inside_code(root):
        for scope, variables, used in code_names.scopes(code):
            if scope == module and last in used:
                return variables, last
    # The object that leads to it may not exist yet. Make nothing there: a checkpoint could name any place.
    variables = vars(sys.modules[module]) if code_names.is_own(module) else {}
    return variables if is_generator(variables.get(last)) else None, last


def _held(owner: Any, name: str) -> Any:
    held = vars(owner) if isinstance(owner, type) else owner if isinstance(owner, dict) else {}
    return held[name] if name in held else dict(_children(owner)).get(name)


def find(root: object) -> dict[str, Generator]:
    """Return the generators that hang off an object, or that its code names, by their path from it."""
    return {path: value for path, value, _ in _generators(root)}


def _generators(root: object) -> list[tuple[str, Generator, Way]]:
    # A search meets a thousand other objects: a call for each of them takes longer than the rest.
    kinds = (*GENERATORS, *stages.kinds())
    found: list[tuple[str, Any, Way]] = [step for step in walk(root) if issubclass(type(step[1]), kinds)]
    return [(path, value, way) for path, value, way in found if is_generator(value) or stages.is_stage(value)]


def inside(root: object, kind: type[T]) -> list[T]:
    """Return the objects of a kind that hang off an object."""
    return [value for _, value, _ in _through_objects(root, set()) if isinstance(value, kind)]


def inside_code(root: object) -> list[FunctionType]:
    """Return the functions that hang off an object, and those that its code names."""
    return functions(walk(root))


def functions(steps: Iterable[Step]) -> list[FunctionType]:
    """Return the functions among the objects that a walk has reached."""
    return [value for _, value, _ in steps if isinstance(value, FunctionType)]


def overlong(steps: Sequence[Step]) -> Iterator[tuple[str, int]]:
    """Yield the path and the length of each container of generators that is too long to search."""
    known = {id(value) for _, value, _ in steps if is_generator(value)} | rng.global_ones()
    for path, value, _ in steps:
        if (held := _long(value)) and any(id(own) not in known for own in find(_ends(held)).values()):
            yield path, len(held)


class Found:
    """The generators that hang off an object, by their paths, and the ways that led to them."""

    def __init__(self, root: object) -> None:
        self._root = root
        self.generators: dict[str, Generator] = {}
        self._ways: dict[int, tuple[object, set[tuple[str, int]]]] = {}
        """The objects on the ways to generators, each with its children on these ways."""
        for path, value, way in _generators(root) if root is not None else ():
            self.generators[path] = value
            for owner, name, child in way:
                self._ways.setdefault(id(owner), (owner, set()))[1].add((name, id(child)))

    def are_in_place(self, root: object) -> bool:
        """Whether the same ways lead to them from the object, which may be another dict of its attributes."""
        for owner, children in self._ways.values():
            now = root if owner is self._root else owner
            if not children <= {(name, id(child)) for name, child in chain(_children(now), *_behind([now]))}:
                return False
        return True


class Reader:
    """Reads the generators that hang off an object repeatedly, and seldom searches for them.

    It searches if one has moved, and before every read whose number is a power of two: many objects make
    their generators with their first sample.
    """

    def __init__(self, root: object) -> None:
        self._root = root
        self._reads = 0
        self._found = Found(None)

    def read(self) -> dict[str, Any]:
        """Return the states of all generators, by their paths."""
        if not self._reads & (self._reads - 1) or not self._found.are_in_place(self._root):
            self._found = Found(self._root)
        self._reads += 1
        return {path: rng.read(generator) for path, generator in self._found.generators.items()}


def walk(root: object) -> list[Step]:
    """Return everything that hangs off an object, or that its code names, each with its path."""
    seen: set[int] = set()
    reached = _through_objects(root, seen)
    # Code comes last, so that an object keeps the path from its owner even if code names it too.
    seen |= rng.global_ones()
    waiting: deque[Step] = deque()
    for step, named in zip(reached, _behind([value for _, value, _ in reached]), strict=True):
        waiting += _further(step, seen, named, hangs=False)
    return reached + _steps(waiting, seen, len(seen) + _MOST, is_code=True)


def _through_objects(root: object, seen: set[int]) -> list[Step]:
    return _steps(deque([("", root, ())]), seen, _MOST)


def _steps(waiting: deque[Step], seen: set[int], most: int, *, is_code: bool = False) -> list[Step]:
    # Breadth first: if there are too many objects, the near ones are still found.
    reached = []
    while waiting and len(seen) < most:
        step = waiting.popleft()
        if id(step[1]) not in seen:
            seen.add(id(step[1]))
            reached.append(step)
            waiting += _further(step, seen, _behind(step[1:2])[0] if is_code else ())
    return reached


def _further(
    step: Step, seen: set[int], named: Iterable[tuple[str, object]], *, hangs: bool = True
) -> list[Step]:
    """Return the steps from an object to what `hangs` off it, and to what is `named` by its code."""
    path, value, way = step
    if len(way) >= _DEEPEST or (issubclass(type(value), GENERATORS) and is_generator(value)):
        return []
    further: list[Step] = []
    for name, child in _children(value) if hangs else ():
        # Ask the class: isinstance() would ask a proxy, which may refuse to answer.
        if not issubclass(type(child), _PLAIN) and id(child) not in seen:
            further.append((f"{path}.{name}" if path else name, child, (*way, (value, name, child))))
    for name, child in named:
        if id(child) not in seen:
            further.append((name, child, (*way, (value, name, child))))
    return further


def _behind(values: Iterable[object]) -> list[list[tuple[str, object]]]:
    """Return what the code of each value names."""
    groups = []
    for value in values:
        own = [] if type(value) in _CONTAINERS else [value]
        # The items of a long container are skipped, but the code of its ends counts.
        groups.append([*own, *_ends(held)] if (held := _long(value)) else own)
    return code_names.behind(groups)


def _long(value: object) -> Any:
    """Return a value, or its attributes, if that is a container too long to search."""
    held = value if isinstance(value, (dict, list, tuple, deque)) else getattr(value, "__dict__", None)
    return held if isinstance(held, (dict, list, tuple, deque)) and len(held) > WIDEST else None


def _ends(held: Any) -> list[Any]:
    try:
        if isinstance(held, dict):
            return [next(iter(dict.values(held))), next(reversed(dict.values(held)))]
        return [held[0], held[-1]]
    except (IndexError, StopIteration, RuntimeError):
        # Another thread has changed it meanwhile.
        return []


def _children(value: object) -> list[tuple[str, object]]:
    # Containers are copied in one go: while they are looked through, other threads may change them.
    # A long one is data, not configuration: looking at each of its items takes too long.
    if isinstance(value, (dict, list, tuple, deque)) and len(value) > WIDEST:
        return []
    if isinstance(value, dict):
        # Only a dict: another mapping may load its items, and draw for it. A tensor as a key is not printed,
        # since that would read its values.
        items = [
            (key if type(key) is str else _text(key), item)
            for key, item in dict.items(dict.copy(value))
            if not issubclass(type(key), torch.Tensor)
        ]
    elif isinstance(value, (list, tuple, deque)):
        # A list by its own method: that of a subclass may load its items, and draw for it.
        held = list.copy(value) if isinstance(value, list) else [*value]
        items = [(str(i), item) for i, item in enumerate(held)]
    elif isinstance(value, (torch.Tensor, np.ndarray, type, ModuleType)):
        items = []
    elif isinstance(value, partial):
        items = [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    elif isinstance(value, (MethodType, BuiltinMethodType)):
        items = [("__self__", value.__self__)]
    elif isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, map(content_of, value.__closure__ or ()), strict=True)
        defaults = ("__defaults__", value.__defaults__), ("__kwdefaults__", value.__kwdefaults__)
        items = [*cells, *defaults, *vars(value).items()]
    else:
        slots = _slots(type(value))
        in_slots = [(name, getattr(value, name)) for name in slots if hasattr(value, name)] if slots else []
        attributes = [*getattr(value, "__dict__", {}).items()]
        if isinstance(value, torch.nn.Module):
            # A model has thousands: no tensor leads to a generator, and most of these are empty.
            attributes = [(n, v) for n, v in attributes if n not in _OF_MODULES or (v and n not in _TENSORS)]
        items = [*attributes, *in_slots]
    return items if len(items) <= WIDEST else []


def _text(key: object) -> str:
    try:
        return str(key)
    except Exception as exc:
        if is_of_a_handler(exc):
            raise
        # It is code of the script, which may fail.
        return f"<{type(key).__name__}>"


def _slots(kind: type) -> list[str]:
    # Not cached: a cache would keep the classes of a script, and with them all its variables.
    found: list[str] = []
    for held in map(vars, kind.__mro__):
        if "__slots__" in held:
            found += [name for name, one in held.items() if type(one) is MemberDescriptorType]
    return found


def content_of(cell: Any) -> Any:
    """Return the value of a variable that a nested function reads, or None."""
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return None
