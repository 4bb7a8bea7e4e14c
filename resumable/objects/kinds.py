"""What an object is made of: one table of kinds, with how each is looked into."""

from __future__ import annotations

import array
import collections
import contextlib
import enum
import functools
import itertools
import random
import types
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from ..files import fingerprint
from . import contents, own, slots
from .contents import ATOMS, Content, Held, is_atom, mark, row

Kind = str
"""The first word of a row of the table."""


class Step(NamedTuple):
    """How a path goes on from an object: by which of its parts, and by which name."""

    how: str
    name: Any

    def __str__(self) -> str:
        # That of a root names where the variable is.
        other = "{}" if ":" in self.how else "." + self.how + "[{!r}]"
        return _TEXTS.get(self.how, other).format(self.name)


_TEXTS = {
    **dict.fromkeys(("attribute", "_parameters", "_buffers", "_modules", "method", "function"), ".{}"),
    **{
        "": "{}",
        "__class__": ".{}",
        "key": "[{!r}]",
        "item": "[{}]",
        "cell": ".<{}>",
        "value": ".values()[{}]",
    },
}
_PYTHONS = "__", "_abc_"
"""What names in a class begin with that are not the script's."""
_NOT_ENTERED = "function"
"""How a path goes on to functions of a class that no walk enters."""
KEYS = frozenset({bool, int, float, str, bytes, type(None)})
"""The types of keys that a path can have."""
_HOOKS = collections.OrderedDict
_CONTAINERS = (collections.OrderedDict, dict, list, collections.deque, tuple, set, frozenset)
_OF_NETWORKS = frozenset(vars(torch.nn.Module())) - {"training"}
_TENSORS = ("_parameters", "_buffers", "_modules")
_METHODS = (types.FunctionType, property, classmethod, staticmethod, *slots.DESCRIPTORS)


class Inside(NamedTuple):
    """What is in an object, as it is just now."""

    groups: Mapping[str, Mapping[Any, Any]]
    """What is in it by name, for each way in which a path goes on."""
    whole: Callable[[], Hashable] | None = None
    """Returns what counts beside the groups: it may take long."""
    of: type = object
    """Its class, where that may become another."""

    def steps(self) -> Iterator[tuple[Step, Any]]:
        """Yield what is in it with the steps that lead there; the atoms of a list may be left out."""
        for how, held in self.groups.items():
            yield from ((Step(how, name), one) for name, one in held.items())

    def children(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield the objects that are in it, each behind the step that leads there; none that is an atom."""
        for how, held in self.groups.items():
            # Millions of numbers are no steps: their types are found in one call.
            if held and how != _NOT_ENTERED and not ATOMS.issuperset(map(type, held.values())):
                for name, one in held.items():
                    if type(one) not in ATOMS and not is_atom(one):
                        yield how, name, one

    def content(self) -> Content:
        """Return what of it counts: by name, where these are not too many."""
        named: dict[str, Held] = {}
        whole: tuple[Hashable, ...] = (id(self.of), self.whole and self.whole())
        for how, held in self.groups.items():
            if how == "item":
                continue
            if len(held) > contents.MOST_ITEMS:
                whole += row([*held]), row([*held.values()])
            else:
                named[how] = Held(held)
        return Content(whole, named)

    def without(self, names: Collection[str]) -> Inside:
        """Return it without some of its attributes."""
        held = {name: one for name, one in self.groups["attribute"].items() if name not in names}
        return self._replace(groups={**self.groups, "attribute": held})


def kind_of(value: object) -> Kind:
    """Return the kind of an object; "library" if its class is neither in the table nor the script's.

    >>> kind_of([1]), kind_of(1), kind_of(torch.zeros(1)), kind_of(len)
    ('list', 'atom', 'tensor', 'library')
    """
    # The class is asked, not the object: a proxy may refuse to answer.
    return row_of(type(value))[0]


def look_into(value: Any) -> Inside:
    """Return what is in an object. No code of the script runs.

    Containers are copied by the methods of Python's own classes, in one call that no other thread interrupts.
    Of a library only the objects are looked into, not its classes and modules.

    >>> [*look_into({"a": 1, "b": [2]}).children()]
    [('key', 'b', [2])]
    """
    return row_of(type(value))[1](value)


def content(value: Any) -> Content:
    """Return what of an object counts.

    >>> before, same, other = content([1, 2.0]), content([1, 2.0]), content([1, 2])
    >>> before == same, before == other
    (True, False)
    """
    return look_into(value).content()


def items_of(value: Any) -> list[Any]:
    """Return a copy of what is in a container, of a dict its pairs, by Python's own iterator of its base."""
    base: Any = next(one for one in _CONTAINERS if issubclass(type(value), one))
    copy = base.items if issubclass(base, dict) else base.__iter__
    for _ in range(99):
        # Another thread may change it meanwhile.
        with contextlib.suppress(RuntimeError):
            return [*copy(value)]
    return [*copy(value)]


def hooks_of(tensor: Any) -> dict[str, Any]:
    """Return what is called when a tensor gets its gradient."""
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    # A class that is derived from Tensor may have code of its own behind every attribute.
    with torch._C.DisableTorchFunctionSubclass():
        found = {name: getattr(tensor, name, None) for name in names} if tensor.is_leaf else {}
    return {name: one for name, one in found.items() if one}


def _named(held: Mapping[str, Any]) -> dict[str, Mapping[Any, Any]]:
    """Return attributes; hooks by their place: their keys number those that the process has registered."""
    found: dict[str, Mapping[Any, Any]] = {"attribute": held}
    if _HOOKS in map(type, held.values()):
        hooks = [name for name, one in held.items() if type(one) is _HOOKS and name[-6:] == "_hooks"]
        for name in hooks:
            if some := [one for _, one in items_of(held[name]) if not _is_torchs(one)]:
                found[name] = dict(enumerate(some))
        found["attribute"] = {name: one for name, one in held.items() if name not in hooks}
    return found


def _is_torchs(hook: Any) -> bool:
    """Whether a hook is PyTorch's, or this package's, and none of the script: it is registered by itself."""
    function = own.unwrapped(hook)
    # PyTorch has objects around hooks, that are made like functions with a decorator.
    while "__wrapped__" in (held := slots.dictionary(function) or {}):
        function = own.unwrapped(held["__wrapped__"])
    return type(function) is types.FunctionType and own.is_torchs_or_ours(function.__code__)


def _sequence(value: Any) -> Inside:
    items = value if type(value) is list else items_of(value)
    kinds = contents.types_of(items)
    maxlen = value.maxlen if type(value) is collections.deque else None
    held = {} if ATOMS.issuperset(kinds) else dict(enumerate(items))
    return Inside({"item": held}, lambda: (maxlen, row(items, kinds)), type(value))


def _dict(value: Any) -> Inside:
    pairs = items_of(value)
    factory = value.default_factory if type(value) is collections.defaultdict else None
    found: dict[str, dict[Any, Any]] = {"key": dict(pairs)}
    if not KEYS.issuperset(map(type, found["key"])):
        others = {at: pair for at, pair in enumerate(pairs) if type(pair[0]) not in KEYS}
        found["key"] = {key: one for key, one in pairs if type(key) in KEYS}
        found |= {
            how: {at: pair[n] for at, pair in others.items()} for n, how in ((1, "value"), (0, "key itself"))
        }
    return Inside(found, lambda: (mark(factory), row([key for key, _ in pairs])))


def _array(value: Any) -> Inside:
    held = fingerprint.flat(value).tolist() if value.dtype.hasobject else ()
    return Inside(
        {"item": dict(enumerate(held))}, lambda: (*fingerprint.of_array(value), row(held)), type(value)
    )


def _tensor(value: Any) -> Inside:
    def whole() -> Hashable:
        with torch._C.DisableTorchFunctionSubclass():
            return value.requires_grad, *fingerprint.of_tensor(value)

    return Inside(_named({**slots.attributes(value), **hooks_of(value)}), whole, type(value))


def _function(value: Any) -> Inside:
    held = vars(value)
    if own.is_torchs_or_ours(value.__code__):
        # It keeps what it was given, such as a function that it decorates.
        return Inside({"attribute": {name: one for name, one in held.items() if name == "__wrapped__"}})
    cells = {}
    for name, one in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        # A variable may not be assigned yet.
        with contextlib.suppress(ValueError):
            cells[name] = one.cell_contents
    given = {
        "__defaults__": dict(enumerate(value.__defaults__ or ())),
        "__kwdefaults__": dict(value.__kwdefaults__ or {}),
    }
    return Inside({"cell": cells, **given, **_named(dict(held))})


def _class(value: Any) -> Inside:
    if not own.is_own_class(value):
        return Inside({})
    bases = enumerate(type.__dict__["__bases__"].__get__(value))
    held = own.namespace(value)
    functions = {
        name: one
        for name, wrapped in held.items()
        if type(one := own.unwrapped(wrapped)) is types.FunctionType and type(wrapped) is not types.MethodType
    }
    kept = {name: one for name, one in functions.items() if _keeps_something(one)}
    rest = {
        name: one
        for name, one in held.items()
        if not name.startswith(_PYTHONS) and not issubclass(type(one), _METHODS)
    }
    own_bases = {at: one for at, one in bases if own.is_own_class(one)}
    others = {name: one for name, one in functions.items() if name not in kept}
    return Inside({"__bases__": own_bases, "method": kept, _NOT_ENTERED: others, **_named(rest)})


def _keeps_something(function: Any) -> bool:
    """Whether a function keeps anything from call to call: most methods do not."""
    return bool(function.__defaults__ or function.__closure__ or function.__kwdefaults__ or vars(function))


def _network(value: Any) -> Inside:
    held = slots.attributes(value)
    kept = {name: one for name, one in held.items() if name not in _OF_NETWORKS or (one and "hooks" in name)}
    parts = {how: dict(held[how]) for how in _TENSORS}
    return Inside({**_named(kept), **parts}, of=type(value))


def _object(value: Any) -> Inside:
    return Inside(_named(slots.attributes(value)), None, type(value))


def _container(look: Callable[[Any], Inside], value: Any) -> Inside:
    """Return what is in an object whose class is derived from a container's."""
    found = look(value)
    return found._replace(groups={**_object(value).groups, **found.groups}, of=type(value))


def _set(value: Any) -> Inside:
    return Inside({}, lambda: frozenset(map(mark, items_of(value))))


def _nothing(value: Any) -> Inside:
    return Inside({})


def _attributes(*names: str) -> Callable[[Any], Inside]:
    return lambda value: Inside({"attribute": {name: getattr(value, name) for name in names}})


_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_TABLE: tuple[tuple[Kind, Collection[type], Callable[[Any], Inside]], ...] = (
    ("atom", ATOMS, _nothing),
    ("list", (list, collections.deque), _sequence),
    ("dict", (dict, collections.OrderedDict, collections.defaultdict, collections.Counter), _dict),
    ("set", (set, frozenset), _set),
    (
        "buffer",
        (bytearray, array.array),
        lambda one: Inside({}, lambda: (getattr(one, "typecode", ""), xxhash.xxh3_128_digest(one))),
    ),
    ("generator", _GENERATORS, lambda one: Inside({}, lambda: contents.of_generator(one))),
    ("count", (itertools.count,), lambda one: Inside({}, lambda: repr(one))),
    ("function", (types.FunctionType,), _function),
    ("method", (types.MethodType,), _attributes("__self__", "__func__")),
    ("partial", (functools.partial,), _attributes("func", "args", "keywords")),
    ("object", (types.SimpleNamespace,), _object),
)
_DERIVED: tuple[tuple[Kind, tuple[type, ...], Callable[[Any], Inside]], ...] = (
    # They have no shape yet.
    ("library", (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer), _object),
    ("tensor", (torch.Tensor,), _tensor),
    ("network", (torch.nn.Module,), _network),
    ("atom", (np.generic, types.ModuleType), _nothing),
    ("array", (np.ndarray,), _array),
    ("enum", (enum.Enum,), lambda one: Inside({}, lambda: id(one))),
    ("class", (type,), _class),
    ("tuple", (tuple,), _sequence),
)
"""The kinds of classes and of those derived from them."""
_BASES: tuple[tuple[Any, Callable[[Any], Inside]], ...] = (
    (dict, _dict),
    ((set, frozenset), _set),
    ((list, collections.deque), _sequence),
)


@own.by_class
def row_of(of: type) -> tuple[Kind, Callable[[Any], Inside], bool]:
    """Return the kind of a class, how its objects are looked into, and whether the class is as well."""
    # By identity: a metaclass may have a hash of its own.
    rows = [(kind, look) for kind, some, look in _TABLE if any(one is of for one in some)]
    rows += [(kind, look) for kind, some, look in _DERIVED if issubclass(of, some)]
    bases = (functools.partial(_container, look) for base, look in _BASES if issubclass(of, base))
    is_own = own.is_own_class(of)
    rows.append(("object" if is_own else "library", next(bases, _object)))
    return *rows[0], is_own and rows[0][0] in ("tensor", "network", "object")
