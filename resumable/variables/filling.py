"""Objects that are there, filled in place with what a checkpoint has of them."""

from __future__ import annotations

import collections
import contextlib
import copy
import random
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..files.encoder import FACTORIES
from ..objects import kinds, own, slots
from ..objects.contents import mark
from ..objects.kinds import Step
from . import columns, libraries, making, signs
from .atoms import Hole
from .writing import Entry

if TYPE_CHECKING:
    from .putting import Putting


_FUNCTIONS = ("method", "function")
"""How a path goes on to the functions of a class."""


def nothing(put: Putting, live: Any, entry: Entry) -> None:
    """Fill nothing: what cannot be changed was made with its content."""


def _base(value: Any, *bases: Any) -> Any:
    return next(one for one in bases if issubclass(type(value), one))


def _list(put: Putting, live: Any, entry: Entry) -> None:
    if "columns" in entry:
        of = tuple if entry.get("of") is None else put.own_class(entry, tuple)
        items = columns.rows_of(of, entry["columns"], entry["pools"])
    else:
        items = put.values(entry["items"])
    base = _base(live, list, collections.deque, set)
    if base is set:
        signs.hashed(items)
    there = {*map(mark, kinds.items_of(live))}
    for one in items:
        if mark(one) not in there:
            put.check_place("[+]", one, entry)
    base.clear(live)
    (base.update if base is set else base.extend)(live, items)


def _dict(put: Putting, live: Any, entry: Entry) -> None:
    base = _base(live, collections.OrderedDict, dict)
    keys = [put.value(key) for key, _ in entry["set"]]
    order, gone = put.values(entry.get("order", [])), put.values(entry.get("gone", []))
    signs.hashed([*order, *gone, *keys])
    rows = zip(keys, entry["set"], strict=True)
    pairs = [(key, put.value(stored)) for key, (_, stored) in rows]
    for key, one in pairs:
        # What is there already is the script's.
        if mark(base.get(live, key)) != mark(one):
            put.check_place(str(Step("key", key)), one, entry)
    stored = entry.get("factory", "None")
    factory = FACTORIES[stored] if isinstance(stored, str) else put.value(stored)
    if not isinstance(stored, str) and kinds.kind_of(factory) not in libraries.CALLED:
        raise Hole(f"a defaultdict of a {type(factory).__name__}")
    if entry.get("is_all"):
        base.clear(live)
    for key in gone:
        base.pop(live, key, None)
    for key, one in pairs:
        base.__setitem__(live, key, one)
    for key in order:
        # What the script has added since stays in front.
        if dict.__contains__(live, key):
            base.__setitem__(live, key, base.pop(live, key))
    if isinstance(live, collections.defaultdict):
        live.default_factory = factory


def _set(put: Putting, live: Any, entry: Entry) -> None:
    if not issubclass(type(live), frozenset):
        _list(put, live, entry)


def _buffer(put: Putting, live: Any, entry: Entry) -> None:
    if entry["typecode"] != getattr(live, "typecode", None):
        raise Hole(f"bytes of {entry['typecode']}")
    del live[:]
    (live.frombytes if entry["typecode"] else live.extend)(entry["bytes"])


def _array(put: Putting, live: Any, entry: Entry) -> None:
    if "shape" in entry:
        new = np.empty(len(entry["items"]), object)
        new[:] = put.values(entry["items"])
        new = new.reshape(entry["shape"])
    else:
        new = entry["array"]
    if live.shape != new.shape or live.dtype != new.dtype or not live.flags.writeable:
        raise Hole(f"an array of {live.dtype}{[*live.shape]} where one of {new.dtype}{[*new.shape]} was")
    put.check_place("[+]", new, entry)
    live[...] = new


def _tensor(put: Putting, live: Any, entry: Entry) -> None:
    if "view" in entry:
        return
    new = entry["tensor"]
    if live.shape != new.shape or live.dtype != new.dtype or live.layout != new.layout:
        raise Hole(f"a tensor of {live.dtype}{[*live.shape]} where one of {new.dtype}{[*new.shape]} was")
    with torch.no_grad():
        live.detach().copy_(new)
    if live.is_leaf and live.requires_grad is not entry["requires_grad"]:
        live.requires_grad_(entry["requires_grad"])


def _generator(put: Putting, live: Any, entry: Entry) -> None:
    state = entry["state"]
    with _refusals(live):
        if isinstance(live, random.Random):
            live.setstate((state[0], tuple(state[1]), state[2]))
        elif isinstance(live, torch.Generator):
            live.set_state(state.clone())
        elif isinstance(live, np.random.RandomState):
            live.set_state(state)
        else:
            live.bit_generator.state = state


@contextlib.contextmanager
def _refusals(live: Any) -> Iterator[None]:
    """Take what an object says of a state that it refuses for the reason."""
    try:
        yield
    except Exception as exc:
        raise Hole(f"a {type(live).__name__} refuses its state: {exc!r}") from exc


def numpy_generator(state: Any) -> np.random.Generator:
    """Return a new generator of NumPy's of the kind that a state names."""
    kinds = (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
    of = next((one for one in kinds if one.__name__ == state["bit_generator"]), None)
    if of is None:
        raise Hole(f"a generator of {state['bit_generator']}")
    return np.random.Generator(of())


def _state(put: Putting, live: Any, entry: Entry) -> None:
    if "set" in entry:
        making.fill(put, live, entry)
    elif "data" in entry:
        _attributes(put, live, entry)
    elif libraries.has_state(live, "library"):
        with _refusals(live):
            # It keeps the tensors that it is given.
            live.load_state_dict(copy.deepcopy(entry["of_itself"]))
    else:
        raise Hole(f"a {type(live).__name__} takes no state")


def _attributes(put: Putting, live: Any, entry: Entry) -> None:
    """Fill an object, a class, a function or a network: all that it gets is checked before it gets any."""
    if "set" in entry and entry["kind"] == "network":
        making.fill(put, live, entry)
        return
    is_of_another = put.value(entry.get("of")) not in (None, type(live))
    of = put.own_class(entry) if is_of_another else type(live)
    if is_of_another:
        put.check_place(".__class__", of, entry)
    rows = entry.get("set") or entry.get("data", ())
    steps, there = [], kinds.look_into(live).groups
    for how, name, stored in entry.get("steps") or [("attribute", *row) for row in rows]:
        step, value = Step(how, name), put.value(stored)
        is_there = mark(value) == mark(there.get(how, {}).get(name, entry))
        # What is in a base is filled; it is never another.
        if not is_there and (how != "__bases__" or type(stored) is not dict):
            put.check_place(str(step), value, entry)
            _check(live, step, value, there)
            steps.append((step, value))
    if is_of_another:
        object.__setattr__(live, "__class__", of)
    if "inherited" in entry:
        inherited = {**{name: entry[name] for name in ("at", "of") if name in entry}, **entry["inherited"]}
        (_dict if isinstance(live, dict) else _list)(put, live, inherited)
    for name in {*entry.get("gone", ())} & there["attribute"].keys():
        slots.delete(live, name)
    for step, value in steps:
        _assign(live, *step, value)


def _check(live: Any, step: Step, value: Any, there: Mapping[str, Mapping[Any, Any]]) -> None:
    """Raise Hole if an object that is there may not get a value at a step."""
    of, (how, name) = type(live), step
    if of is FunctionType:
        is_own = own.is_own_code(live.__code__)
    else:
        is_own = kinds.kind_of(live) == "object" or own.is_own_class(_class_of(live))
    before = there.get(how, {}).get(name)
    if how == "attribute" and not making.is_free(live, name):
        raise Hole(f"{name} of a {of.__name__} is PyTorch's")
    if is_own:
        held = (own.namespace(one) for one in _class_of(live).__mro__)
        method = next((one[name] for one in held if name in one), None)
        method = own.unwrapped(method) if isinstance(live, type) else method
        if how == "attribute" and type(method) is FunctionType and libraries.is_data(value):
            raise Hole(f"{name} is a method")
        if how in _FUNCTIONS and not signs.is_own(value):
            raise Hole(f"{name} is a method, and no {type(value).__name__}")
    elif kinds.kind_of(live) not in ("library", "network"):
        raise Hole("it is not the script's own")
    elif not libraries.takes(of, step, type(before) if name in there.get(how, ()) else None, value):
        raise Hole(f"{name} of a {of.__name__} takes no {type(value).__name__}")


def _class_of(live: Any) -> type:
    return live if isinstance(live, type) else type(live)


def _assign(live: Any, how: str, name: Any, value: Any) -> None:
    if how == "cell" and name in live.__code__.co_freevars:
        live.__closure__[live.__code__.co_freevars.index(name)].cell_contents = value
    elif how == "__defaults__" and name in range(len(live.__defaults__ or ())):
        given = [*live.__defaults__]
        given[name] = value
        live.__defaults__ = tuple(given)
    elif how == "__kwdefaults__" and name in (live.__kwdefaults__ or ()):
        live.__kwdefaults__[name] = value
    elif how in ("attribute", *_FUNCTIONS) and isinstance(live, type):
        wrapper = type(own.namespace(live).get(name)) if how in _FUNCTIONS else None
        type.__setattr__(live, name, wrapper(value) if wrapper in (staticmethod, classmethod) else value)
    elif how == "attribute":
        slots.write(live, name, value)
    else:
        raise Hole(f"{how} of a {type(live).__name__}")


FILLERS: dict[str, Callable[[Putting, Any, Entry], None]] = {
    "list": _list,
    "dict": _dict,
    "set": _set,
    "buffer": _buffer,
    "array": _array,
    "tensor": _tensor,
    "generator": _generator,
    "object": _attributes,
    "class": _attributes,
    "function": _attributes,
    "network": _attributes,
    "library": _state,
}
