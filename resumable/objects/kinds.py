"""What an object is made of: its kind, and the objects in it with the step that leads to each."""

from __future__ import annotations

import array
import collections
import contextlib
import datetime
import enum
import functools
import itertools
import pathlib
import random
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from . import own, slots

Kind = str
"""One of the words that `kind_of` returns."""


class Step(NamedTuple):
    """How a path goes on from an object: by which of its parts, and by which name."""

    how: str
    name: Any

    def __str__(self) -> str:
        # That of a root names where the variable is.
        other = "{}" if ":" in self.how else "." + self.how + "[{!r}]"
        return _TEXTS.get(self.how, other).format(self.name)


_TEXTS = {
    **dict.fromkeys(("attribute", "_parameters", "_buffers", "_modules", "method"), ".{}"),
    **{"": "{}", "key": "[{!r}]", "item": "[{}]", "cell": ".<{}>", "value": ".values()[{}]"},
}
T = TypeVar("T")
_BASES: tuple[Any, ...] = (list, collections.deque, tuple, set, frozenset)
ATOMS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, range, slice, type(...), type(NotImplemented)}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format}
    | {datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone}
    | {pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PurePosixPath}
)
"""What has no objects in it, and never changes."""
_KEYS = (bool, int, float, str, bytes, type(None))
_BY_TYPE: dict[type, Kind] = {
    **dict.fromkeys(ATOMS, "atom"),
    **dict.fromkeys((list, collections.deque), "list"),
    **dict.fromkeys((tuple, torch.Size), "tuple"),
    **dict.fromkeys((dict, collections.OrderedDict, collections.defaultdict, collections.Counter), "dict"),
    **dict.fromkeys((set, frozenset), "set"),
    **dict.fromkeys((bytearray, array.array), "buffer"),
    **dict.fromkeys(
        (random.Random, np.random.Generator, np.random.RandomState, torch.Generator), "generator"
    ),
    np.ndarray: "array",
    itertools.count: "count",
    types.FunctionType: "function",
    types.MethodType: "method",
    functools.partial: "partial",
    types.ModuleType: "module",
    types.SimpleNamespace: "object",
}
_BY_ID = {id(of): kind for of, kind in _BY_TYPE.items()}
"""By the identity of the class: a metaclass may have a hash of its own."""
_BY_BASE: tuple[tuple[type, Kind], ...] = (
    # They have no shape yet.
    (torch.nn.UninitializedParameter, "library"),
    (torch.nn.UninitializedBuffer, "library"),
    (torch.Tensor, "tensor"),
    (torch.nn.Module, "network"),
    (np.generic, "atom"),
    (np.ndarray, "array"),
    (enum.Enum, "enum"),
    (type, "class"),
    (types.ModuleType, "module"),
    (tuple, "tuple"),
)
_HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OF_NETWORKS = frozenset(vars(torch.nn.Module()))
_TENSORS = ("_parameters", "_buffers", "_modules")
_ATTRIBUTES = {"method": ("__self__", "__func__"), "partial": ("func", "args", "keywords")}


def kind_of(value: object) -> Kind:
    """Return the kind of an object; "library" if its class is neither listed here nor the script's.

    >>> kind_of([1]), kind_of(1), kind_of(torch.zeros(1)), kind_of(len)
    ('list', 'atom', 'tensor', 'library')
    """
    # The class is asked, not the object: a proxy may refuse to answer.
    return _BY_ID.get(id(type(value))) or _kind_of_class(type(value))


@own.by_class
def _kind_of_class(of: type) -> Kind:
    other = "object" if own.is_own_class(of) else "library"
    return next((kind for base, kind in _BY_BASE if issubclass(of, base)), other)


def children(value: Any, kind: Kind | None = None) -> list[tuple[Step, Any]]:
    """Return the objects in an object, each with its step; none of what is an atom.

    No code of the script runs. Containers are copied by the methods of Python's own classes, in one call that
    no other thread interrupts. Of a library only the objects are looked into, not its classes and modules.

    >>> [(str(step), child) for step, child in children({"a": 1, "b": [2]})]
    [("['b']", [2])]
    """
    kind = kind or kind_of(value)
    if kind in ("object", "library"):
        held = {name: one for name, one in slots.attributes(value).items() if not is_atom(one)}
        return [*_named(held), *(one for one in _inherited(value) if not is_atom(one[1])), *_own_class(value)]
    return [(step, child) for step, child in everything(value, kind) if not is_atom(child)]


def is_atom(value: object) -> bool:
    """Whether a value has no objects in it, and never changes; a tuple of atoms is one."""
    of = type(value)
    if of is tuple:
        return all(map(is_atom, value))  # type: ignore[call-overload]
    return of in ATOMS or issubclass(of, np.generic)


def everything(value: Any, kind: Kind) -> Iterable[tuple[Step, Any]]:
    """Return what is in an object with its steps; the atoms of a container may be left out."""
    if kind in ("list", "tuple"):
        return _inside(held_in(value))
    if kind == "dict":
        return _entries(value)
    if kind == "array":
        return _inside(flat(value).tolist() if value.dtype.hasobject else [])
    if kind == "tensor":
        return [*_named(slots.attributes(value) | _hooks_of_tensor(value)), *_own_class(value)]
    if kind == "function":
        return _of_function(value)
    if kind in _ATTRIBUTES:
        return _named({name: getattr(value, name) for name in _ATTRIBUTES[kind]})
    if kind == "class":
        return _of_class(value) if own.is_own_class(value) else ()
    if kind == "module":
        held = vars(value) if own.is_own_module(value) else {}
        return _named({name: one for name, one in [*held.items()] if not name.startswith("__")})
    if kind == "network":
        return [*_of_network(value), *_own_class(value)]
    if kind in ("object", "library"):
        return [*_named(slots.attributes(value)), *_inherited(value), *_own_class(value)]
    return ()


def flat(value: Any) -> Any:
    """Return a view of an array with one dimension, or a copy, as Python's own class of arrays has it."""
    return np.ndarray.reshape(np.ndarray.view(value, np.ndarray), -1)


def has_hooks(tensor: Any) -> bool:
    """Whether something is called when a tensor gets its gradient."""
    return any(_hooks_of_tensor(tensor).values())


def _hooks_of_tensor(value: Any) -> dict[str, Any]:
    # A class that is derived from Tensor may have code of its own behind every attribute.
    with torch._C.DisableTorchFunctionSubclass():
        return {name: getattr(value, name, None) for name in _HOOKS_OF_TENSORS} if value.is_leaf else {}


def _items(values: Iterable[Any], how: str = "item") -> Iterator[tuple[Step, Any]]:
    return ((Step(how, number), one) for number, one in enumerate(values))


def _inside(values: Any) -> Iterable[tuple[Step, Any]]:
    # Millions of numbers are no steps: their types are found in one call.
    return () if ATOMS.issuperset(map(type, values)) else _items(values)


def _entries(value: Any) -> Iterator[tuple[Step, Any]]:
    held = entries_of(value)
    if all(ATOMS.issuperset(map(type, half)) for half in zip(*held, strict=True)):
        return
    for number, (key, one) in enumerate(held):
        yield Step("key", key) if type(key) in _KEYS else Step("value", number), one
        yield Step("key itself", number), key


def held_in(value: Any) -> list[Any]:
    """Return a copy of what is in a list, deque, tuple or set, by Python's own iterator of its base."""
    if type(value) in (list, collections.deque, set):
        return [*value.copy()]
    base = next(one for one in _BASES if issubclass(type(value), one))
    return _tried(lambda: [*base.__iter__(value)])


def entries_of(value: Any) -> list[tuple[Any, Any]]:
    """Return a copy of the items of a dict, by Python's own iterator of its base."""
    base: Any = collections.OrderedDict if issubclass(type(value), collections.OrderedDict) else dict
    return _tried(lambda: [*base.items(value)])


def _tried(copy: Callable[[], T]) -> T:
    for _ in range(99):
        # Another thread may change it meanwhile.
        with contextlib.suppress(RuntimeError):
            return copy()
    return copy()


def _named(held: dict[str, Any], how: str = "attribute") -> Iterator[tuple[Step, Any]]:
    for name, one in held.items():
        if name.endswith("_hooks") and issubclass(type(one), dict):
            # By their place: the key of a hook is the number of those that the process has registered.
            yield from _items([hook for hook in [*dict.values(one)] if not _is_torchs(hook)], name)
        else:
            yield Step(how, name), one


def _is_torchs(hook: Any) -> bool:
    """Whether a hook is PyTorch's, or this package's, and none of the script: it is registered by itself."""
    function = own.unwrapped(hook)
    while type(function) is types.FunctionType and "__wrapped__" in vars(function):
        function = vars(function)["__wrapped__"]
    code = function.__code__ if type(function) is types.FunctionType else None
    return code is not None and (own.is_torchs(code) or own.is_packages(code))


def _of_network(value: Any) -> Iterator[tuple[Step, Any]]:
    held = slots.attributes(value)
    for name, one in held.items():
        if name not in _OF_NETWORKS or name == "training" or (one and "hooks" in name):
            yield from _named({name: one})
    for how in _TENSORS:
        yield from ((Step(how, name), one) for name, one in [*held[how].items()])


def _of_function(value: Any) -> Iterator[tuple[Step, Any]]:
    if own.is_packages(value.__code__):
        return
    if own.is_torchs(value.__code__):
        # It keeps what it was given, such as a function that it decorates.
        yield from _named({name: one for name, one in vars(value).items() if name == "__wrapped__"})
        return
    for name, one in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        try:
            yield Step("cell", name), one.cell_contents
        except ValueError:
            # A variable that is not assigned yet.
            continue
    yield from _items(value.__defaults__ or (), "__defaults__")
    yield from _named(dict(value.__kwdefaults__ or {}), "__kwdefaults__")
    yield from _named(dict(vars(value)))


_METHODS = (types.FunctionType, property, classmethod, staticmethod, *slots.DESCRIPTORS)


def _of_class(value: type) -> Iterator[tuple[Step, Any]]:
    bases = type.__dict__["__bases__"].__get__(value)
    yield from ((step, base) for step, base in _items(bases, "__bases__") if own.is_own_class(base))
    for name, one in own.namespace(value).items():
        if type(one := own.unwrapped(one)) is types.FunctionType:
            # Most methods keep nothing from call to call.
            if one.__defaults__ or one.__closure__ or one.__kwdefaults__ or vars(one):
                yield Step("method", name), one
        elif not name.startswith("__") and not issubclass(type(one), _METHODS):
            yield from _named({name: one})


def _inherited(value: Any) -> Iterable[tuple[Step, Any]]:
    """Return what is in an object as in the container that its class is derived from."""
    if issubclass(type(value), dict):
        return _entries(value)
    return _inside(held_in(value)) if issubclass(type(value), (list, collections.deque)) else ()


def _own_class(value: object) -> list[tuple[Step, Any]]:
    of = type(value)
    return [(Step("attribute", "__class__"), of)] if own.is_own_class(of) else []
