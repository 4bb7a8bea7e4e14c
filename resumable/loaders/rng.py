"""Every random generator of this process, read and put back."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from types import BuiltinMethodType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, TypeGuard, TypeVar

import numpy as np
import torch
import xxhash

from . import named

Generator = random.Random | np.random.Generator | np.random.RandomState | torch.Generator
T = TypeVar("T")
GENERATORS = named.GENERATORS

_BACKENDS = ("cuda", "xpu", "mps")
_GPU_STATE = 16  # bytes: a seed and an offset
# Where generators are looked for: deep enough for a transform of a subset of a concatenation.
_DEEPEST = 16
WIDEST = 256
_MOST = 10_000
_PLAIN = named.PLAIN
_OF_MODULES = frozenset(vars(torch.nn.Module()))
_TENSORS = ("_parameters", "_buffers")
_CONTAINERS = {dict, list, tuple, set, deque, OrderedDict}


def collect(devices: bool = True) -> dict[str, Any]:
    """Return the state of every global generator, as plain values, arrays and tensors.

    Devices that this process has not used are not touched: asking must not create a context. Without
    `devices` theirs are left out, unless loaders too draw on one (`torch.set_default_device`).
    """
    found: dict[str, Any] = {
        "python": _python_out(random.getstate()),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if devices or torch.get_default_device().type != "cpu":
        found |= {name: states for name in _BACKENDS if (states := _read_devices(name))}
    return found


def restore(state: Mapping[str, Any]) -> None:
    """Put back what `collect` returned. A device that this process does not have is left out."""
    random.setstate(_python_in(state["python"]))
    np.random.set_state(state["numpy"])
    # torch reads from where the memory of a view begins, which is not where the view does.
    torch.set_rng_state(state["torch"].clone())
    for name in _BACKENDS:
        _write_devices(name, state.get(name, []))


def is_same(one: Any, other: Any) -> bool:
    """Whether two states that were read are the same.

    >>> is_same(collect(), collect())
    True
    """
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)


def digest(states: Any) -> str:
    """Return a digest of what `read` or `collect` returned, or of containers of it."""
    found = xxhash.xxh3_128()
    for path, value in _leaves("", states):
        content = value.cpu().numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
        found.update(path.encode() + b"\0" + content)
    return found.hexdigest()


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in sorted(value.items()):
            yield from _leaves(f"{path}/{name}", inner)
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from _leaves(f"{path}/{number}", inner)
    else:
        yield path, value.tolist() if isinstance(value, np.ndarray) else value


def begin_anew(seed: str) -> None:
    """Begin a stream of their own for all global generators, on all devices."""
    begin(seed_of(seed))


def begin(number: int) -> None:
    """Seed all global generators; those of a device that is not in use yet get it when it is."""
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def begin_own(generator: Generator, seed: str) -> None:
    """Begin a stream of its own for one generator."""
    number = seed_of(seed)
    if isinstance(generator, random.Random):
        generator.seed(number)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(number).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(number % 2**32)
    else:
        generator.manual_seed(number)


def seed_of(text: str) -> int:
    """Return a number of 63 bits that is always the same for a text.

    >>> seed_of("7/0") == seed_of("7/0") != seed_of("7/1")
    True
    """
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def is_generator(value: object) -> TypeGuard[Generator]:
    """Whether the value is a random generator with a state; the operating system's has none."""
    return named.has_state(value)


def read(generator: Generator) -> Any:
    """Return the state of one generator."""
    if isinstance(generator, random.Random):
        return _python_out(generator.getstate())
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.get_state()


def write(generator: Generator, state: Any) -> None:
    """Put one generator into a state that `read` returned."""
    if isinstance(generator, random.Random):
        generator.setstate(_python_in(state))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.set_state(torch.as_tensor(state, device="cpu").clone())


def plant(root: object, path: str, state: Any) -> Generator | None:
    """Make a generator where an object has None yet: many make theirs at the first sample.

    `state` is what `read` returned of the one that was there; return None if the place is taken. What a
    module has is returned as it is: another path may lead to it by now.
    """
    if not is_free(root, path):
        return None
    owner, last = _owner(root, path)
    if is_generator(there := _held(owner, last)):
        return there
    made = _made_for(state)
    if isinstance(owner, dict):
        # (a number was a number: many have a generator for each worker)
        key = int(last) if last.removeprefix("-").isdigit() else last
        owner[key if last not in owner else last] = made
    else:
        setattr(owner, last, made)
    return made


def is_free(root: object, path: str) -> bool:
    """Whether an object is there that has None, or nothing, where the path ends; or a module's generator."""
    _import_as_code_does(root, path)
    owner, last = _owner(root, path)
    # What hangs off a function is in its variables, which are its own.
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
        codes = [one.__code__ for one in inside_code(root) if named.is_own(str(one.__module__))]
        if any(module in named.imports(code) for code in codes):
            with contextlib.suppress(ImportError):
                importlib.import_module(module)


def is_in_module(path: str) -> bool:
    """Whether a path begins in a module, and not at an object.

    >>> is_in_module("random:_inst"), is_in_module("dataset.random")
    (True, False)
    """
    module, colon, _ = path.partition(":")
    return bool(colon) and module in sys.modules


def _owner(root: object, path: str) -> tuple[Any, str]:
    """Return what the end of a path hangs off, and its name there."""
    if not is_in_module(path):
        *names, last = path.split(".")
        for name in names:
            root = dict(_children(root)).get(name)
        return root, last
    module, _, inside = path.partition(":")
    above, _, last = inside.rpartition(".")
    if above:
        return next((value for at, value, _ in _walk(root) if at == f"{module}:{above}"), None), last
    for code in inside_code(root):
        for scope, variables, used in named.scopes(code):
            if scope == module and last in used:
                return variables, last
    # What led to it may not be made yet. (Nothing is made there: a checkpoint could name any place.)
    variables = vars(sys.modules[module]) if named.is_own(module) else {}
    return variables if is_generator(variables.get(last)) else None, last


def _held(owner: Any, name: str) -> Any:
    held = vars(owner) if isinstance(owner, type) else owner if isinstance(owner, dict) else {}
    return held[name] if name in held else dict(_children(owner)).get(name)


def _made_for(state: Any) -> Generator:
    if not isinstance(state, Mapping):
        is_for_gpu = torch.as_tensor(state, device="cpu").numel() == _GPU_STATE and torch.cuda.is_available()
        return torch.Generator("cuda" if is_for_gpu else "cpu")
    if "words" in state:
        return random.Random()
    bits = _BIT_GENERATORS[state["bit_generator"]]()
    return np.random.RandomState(bits) if "has_gauss" in state else np.random.Generator(bits)


_BIT_GENERATORS = {
    kind.__name__: kind
    for kind in (
        np.random.MT19937,
        np.random.PCG64,
        np.random.PCG64DXSM,
        np.random.Philox,
        np.random.SFC64,
    )
}


def find(root: object) -> dict[str, Generator]:
    """Return the generators that hang off an object, or that its code names, by their path from it."""
    return {path: value for path, value, _ in _walk(root) if is_generator(value)}


def inside(root: object, kind: type[T]) -> list[T]:
    """Return the objects of a kind that hang off an object."""
    return [value for _, value, _ in _through_objects(root, set()) if isinstance(value, kind)]


def inside_code(root: object) -> list[FunctionType]:
    """Return the functions that hang off an object, and those that its code names."""
    return [value for _, value, _ in _walk(root) if isinstance(value, FunctionType)]


def overlong(root: object) -> Iterator[tuple[str, int]]:
    """Yield the path and the length of each container of generators that is too long to be looked into."""
    reached = list(_walk(root))
    known = {id(value) for _, value, _ in reached if is_generator(value)} | global_ones()
    for path, value, _ in reached:
        if (held := _long(value)) and any(id(own) not in known for own in find(_ends(held)).values()):
            yield path, len(held)


class Reader:
    """Reads the generators that hang off an object, again and again, and seldom looks for them.

    It looks where one is no longer where it was, and before every read whose number is a power of two: many
    objects make theirs with their first sample.
    """

    def __init__(self, root: object) -> None:
        self._root = root
        self._reads = 0
        self._found: dict[str, Generator] = {}
        self._ways: dict[int, tuple[object, set[tuple[str, int]]]] = {}
        """Each object on a way to a generator, and which of its children are on one."""

    def read(self) -> dict[str, Any]:
        """Return the states of all generators, by their paths."""
        if not self._reads & (self._reads - 1) or not self._are_in_place():
            self._find()
        self._reads += 1
        return {path: read(generator) for path, generator in self._found.items()}

    def _are_in_place(self) -> bool:
        return all(
            children <= {(name, id(child)) for name, child in chain(_children(owner), _behind(owner))}
            for owner, children in self._ways.values()
        )

    def _find(self) -> None:
        self._found, self._ways = {}, {}
        for path, value, way in _walk(self._root):
            if is_generator(value):
                self._found[path] = value
                for owner, name, child in way:
                    self._ways.setdefault(id(owner), (owner, set()))[1].add((name, id(child)))


Way = tuple[tuple[object, str, object], ...]
"""How one comes to an object: each object, the name of its child, and the child."""

Step = tuple[str, object, Way]
"""An object's path, itself, and how one comes to it."""

Children = Callable[[str, object], Iterator[tuple[str, str, object]]]
"""Yields the path of each child of an object at a path, the child's name there, and the child."""


def _walk(root: object) -> Iterator[Step]:
    seen: set[int] = set()
    reached = []
    for step in _through_objects(root, seen):
        reached.append(step)
        yield step
    # Code comes last: what objects lead to keeps its path, whatever code names it too.
    seen |= global_ones()
    with_code = (step for step in reached if type(step[1]) not in _CONTAINERS or _long(step[1]))
    waiting = deque(further for step in with_code for further in _further(step, seen, _named))
    yield from _steps(waiting, seen, len(seen) + _MOST, _hanging, _named)


def _through_objects(root: object, seen: set[int]) -> Iterator[Step]:
    return _steps(deque([("", root, ())]), seen, _MOST, _hanging)


def _steps(waiting: deque[Step], seen: set[int], most: int, *ways: Children) -> Iterator[Step]:
    # Breadth first: where there is too much to look at, what is near is found all the same.
    while waiting and len(seen) < most:
        step = waiting.popleft()
        if id(step[1]) not in seen:
            seen.add(id(step[1]))
            yield step
            waiting.extend(_further(step, seen, *ways))


def _further(step: Step, seen: set[int], *ways: Children) -> Iterator[Step]:
    path, value, way = step
    if len(way) < _DEEPEST and not is_generator(value):
        for children in ways:
            for at, name, child in children(path, value):
                if id(child) not in seen:
                    yield at, child, (*way, (value, name, child))


def _hanging(path: str, value: object) -> Iterator[tuple[str, str, object]]:
    for name, child in _children(value):
        # (of the class: a proxy may refuse to say what it stands for)
        if not issubclass(type(child), _PLAIN):
            yield f"{path}.{name}" if path else name, name, child


def _named(_: str, value: object) -> Iterator[tuple[str, str, object]]:
    for name, child in _behind(value):
        yield name, name, child


def _behind(value: object) -> Iterator[tuple[str, object]]:
    if type(value) not in _CONTAINERS:
        yield from named.behind(value)
    # (what is in a long container has no way to it, and its code is named all the same)
    for end in _ends(_long(value)):
        yield from named.behind(end)


def global_ones() -> set[int]:
    """Return the identities of the generators that `collect` reads."""
    backends = [getattr(torch, name) for name in _BACKENDS]
    devices = [one for backend in backends for one in getattr(backend, "default_generators", ())]
    found = [random.random.__self__, np.random.rand.__self__, torch.default_generator, *devices]  # type: ignore[attr-defined]
    return {id(one) for one in [*found, getattr(torch.mps, "_default_mps_generator", None)]}


def _long(value: object) -> Any:
    """Return what of a value is too long to be looked into, if anything is."""
    held = value if isinstance(value, (dict, list, tuple, deque)) else getattr(value, "__dict__", None)
    return held if isinstance(held, (dict, list, tuple, deque)) and len(held) > WIDEST else None


def _ends(held: Any) -> list[Any]:
    if isinstance(held, dict):
        return [next(iter(dict.values(held))), next(reversed(dict.values(held)))]
    return [held[0], held[-1]] if held else []


def _children(value: object) -> Iterator[tuple[str, object]]:
    # A long container is data, not configuration: even to look at each of its items takes too long.
    if isinstance(value, (dict, list, tuple, deque)) and len(value) > WIDEST:
        return
    if isinstance(value, dict):
        # (and no other mapping: one that loads its items would load them, and draw)
        # (to print a tensor would read it)
        pairs = dict.items(value)
        items = [(str(key), item) for key, item in pairs if not issubclass(type(key), torch.Tensor)]
    elif isinstance(value, (list, tuple, deque)):
        items = [(str(i), item) for i, item in enumerate(value)]
    elif isinstance(value, (torch.Tensor, np.ndarray, type, ModuleType)):
        items = []
    elif isinstance(value, partial):
        items = [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    elif isinstance(value, (MethodType, BuiltinMethodType)):
        items = [("__self__", value.__self__)]
    elif isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, map(_content, value.__closure__ or ()), strict=True)
        defaults = ("__defaults__", value.__defaults__), ("__kwdefaults__", value.__kwdefaults__)
        items = [*cells, *defaults, *vars(value).items()]
    else:
        kinds = [kind for kind in type(value).__mro__ if "__slots__" in vars(kind)]
        slots = [name for kind in kinds for name, one in vars(kind).items() if _is_slot(one)]
        in_slots = [(name, getattr(value, name)) for name in slots if hasattr(value, name)]
        attributes = getattr(value, "__dict__", {}).items()
        if isinstance(value, torch.nn.Module):
            # A model has thousands: no tensor leads to a generator, and most of these are empty.
            attributes = [(n, v) for n, v in attributes if n not in _OF_MODULES or (v and n not in _TENSORS)]
        items = [*attributes, *in_slots]
    if len(items) <= WIDEST:
        yield from items


def _is_slot(member: object) -> bool:
    return type(member) is MemberDescriptorType


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return None


def _python_out(state: tuple[Any, ...]) -> dict[str, Any]:
    version, words, gauss = state
    # 625 words: an array is read and written thirty times faster than a tuple of numbers.
    return {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss}


def _python_in(state: Mapping[str, Any]) -> tuple[Any, ...]:
    return state["version"], tuple(state["words"].tolist()), state["gauss"]


def _read_devices(name: str) -> list[torch.Tensor]:
    if name == "mps":
        return [torch.mps.get_rng_state()] if torch.backends.mps.is_available() else []
    backend = getattr(torch, name)
    # Before its first use a backend has no generators, and asking for one would start it.
    if not backend.is_initialized():
        return []
    return [generator.get_state() for generator in backend.default_generators]


def _write_devices(name: str, states: Sequence[torch.Tensor | None]) -> None:
    backend = getattr(torch, name)
    # Without a state nothing is asked: even counting devices loads a driver.
    there = _read_devices(name) if states else []
    for index, state in enumerate(states[: backend.device_count()] if states else ()):
        # Any write makes cuDNN draw a new seed for the dropout of recurrent layers.
        if state is None or (index < len(there) and torch.equal(there[index], state)):
            continue
        if name == "mps":
            backend.set_rng_state(state.clone())
        else:
            backend.set_rng_state(state.clone(), index)


def moved(saved: Mapping[str, Any], devices: Mapping[str, str]) -> dict[str, Any]:
    """Return what `collect` returned with the states of devices that have another index here.

    >>> one, other = torch.zeros(16), torch.ones(16)
    >>> moved({"cuda": [one, other]}, {"cuda:1": "cuda:0"})["cuda"][0] is other
    True
    """
    return {**saved, **{kind: _renumbered(kind, saved[kind], devices) for kind in _BACKENDS if kind in saved}}


def _renumbered(kind: str, states: Sequence[Any], devices: Mapping[str, str]) -> list[Any]:
    found: dict[int, Any] = {}
    for number, state in enumerate(states):
        there = f"{kind}:{number}"
        if there not in devices:
            found.setdefault(number, state)
        elif devices[there].startswith(f"{kind}:"):
            found[int(devices[there].partition(":")[2])] = state
    return [found.get(number) for number in range(max(found, default=-1) + 1)]
