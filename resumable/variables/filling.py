"""Objects that are there, filled in place with what a checkpoint has of them."""

from __future__ import annotations

import collections
import contextlib
import copy
import random
from collections.abc import Callable, Iterator
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
    pairs = [(key, put.value_at(Step("key", key), stored, entry)) for key, (_, stored) in rows]
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


def _object(put: Putting, live: Any, entry: Entry) -> None:
    pairs = [(name, _attribute(put, live, name, one, entry)) for name, one in entry["set"]]
    members, held = slots.members(type(live)), slots.dictionary(live)
    if "inherited" in entry:
        inherited = {**{name: entry[name] for name in ("at", "of") if name in entry}, **entry["inherited"]}
        (_dict if isinstance(live, dict) else _list)(put, live, inherited)
    for name in {*entry.get("gone", ())} & slots.attributes(live).keys():
        if name in members:
            members[name].__delete__(live)
        elif held is not None:
            held.pop(name, None)
    for name, one in pairs:
        if name in members:
            members[name].__set__(live, one)
        elif held is not None:
            held[name] = one


def _attribute(put: Putting, live: Any, name: str, stored: Any, entry: Entry) -> Any:
    """Return a value for an attribute of an object or a class of the script, if it may get one."""
    value = put.value_at(Step("attribute", name), stored, entry)
    held = (own.namespace(one) for one in (live if isinstance(live, type) else type(live)).__mro__)
    there = next((one[name] for one in held if name in one), None)
    method = own.unwrapped(there) if isinstance(live, type) else there
    if type(method) is FunctionType and libraries.is_data(value):
        raise Hole(f"{name} is a method")
    return value


def _state(put: Putting, live: Any, entry: Entry) -> None:
    if "set" in entry:
        making.fill(put, live, entry)
    elif "data" in entry:
        _data(put, live, entry["data"])
    elif libraries.has_state(live, "library"):
        with _refusals(live):
            # It keeps the tensors that it is given.
            live.load_state_dict(copy.deepcopy(entry["of_itself"]))
    else:
        raise Hole(f"a {type(live).__name__} takes no state")


def _data(put: Putting, live: Any, rows: Any) -> None:
    """Fill an object of a library with numbers: no text, no code, no object."""
    new, there = {name: put.value(stored) for name, stored in rows}, slots.attributes(live)
    for name, one in new.items():
        if not libraries.takes(type(live), name, type(there[name]) if name in there else None, one):
            raise Hole(f"{name} of a {type(live).__name__} takes no {type(one).__name__}")
    members, held = slots.members(type(live)), slots.dictionary(live)
    for name, one in new.items():
        if name in members:
            members[name].__set__(live, one)
        elif held is not None:
            held[name] = one


def _attributes(put: Putting, live: Any, entry: Entry) -> None:
    if "set" in entry:
        making.fill(put, live, entry)
        return
    code = getattr(live, "__code__", None)
    is_own = own.is_own_code(code) if code is not None else own.is_own_class(_class_of(live))
    if not is_own and entry["kind"] != "network":
        raise Hole("it is not the script's own")
    there = kinds.look_into(live).groups
    for how, name, stored in entry["steps"]:
        value = put.value(stored)
        is_there = mark(value) == mark(there.get(how, {}).get(name, entry))
        if is_there or (how in ("method", "__bases__") and type(stored) is dict):
            # What is in it is filled; a method or a base is never another.
            continue
        if how == "attribute" and not making.is_free(live, name):
            raise Hole(f"{name} of a {type(live).__name__} is PyTorch's")
        value = (
            _attribute(put, live, name, stored, entry)
            if how == "attribute"
            else put.value_at(Step(how, name), stored, entry)
        )
        if not is_own and not libraries.is_data(value):
            raise Hole(f"{name} of a {type(live).__name__} takes no {type(value).__name__}")
        _assign(live, how, name, value)


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
    elif how == "attribute" and isinstance(live, type):
        type.__setattr__(live, name, value)
    elif how == "attribute":
        vars(live)[name] = value
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
    "object": _object,
    "class": _attributes,
    "function": _attributes,
    "network": _attributes,
    "library": _state,
}
