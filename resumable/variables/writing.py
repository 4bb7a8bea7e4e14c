"""What a look stores of an object, by its kind."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..files import encoder, fingerprint
from ..files.encoder import FACTORIES
from ..objects import contents, kinds, own, slots
from ..objects.contents import Content, mark
from . import libraries, signs
from .atoms import Hole

if TYPE_CHECKING:
    from .looks import Look

Entry = dict[str, Any]
LARGEST_EXPANDED = 64 << 20
HOOK = "a hook that the loop has registered or removed"


@own.by_class
def class_name(of: type) -> str:
    """Return the module and the name of a class."""
    return f"{own.module_of(of)}:{type.__dict__['__qualname__'].__get__(of)}"


def _list(look: Look, value: Any, before: Content | None, where: str) -> Entry:
    maxlen = getattr(value, "maxlen", None)
    if kinds.kind_of(value) == "list" and (table := look.table(value)) is not None:
        of = look.value(table.of, where) if table.of is not tuple else None
        return {"of": of, "columns": table.columns, "pools": table.pools, "maxlen": maxlen}
    return {"items": look.items(kinds.items_of(value), where), "maxlen": maxlen}


def _tuple(look: Look, value: Any, before: Content | None, where: str) -> Entry:
    of = type(value)
    if of is not tuple and of is not torch.Size and not own.is_own_class(of):
        raise Hole(f"a {of.__name__}")
    return {"items": look.items(kinds.items_of(value), where)} | class_of(look, value, where)


def _dict(look: Look, value: Any, before: Content | None, where: str) -> Entry:
    held = kinds.items_of(value)
    signs.hashed([key for key, _ in held])
    entry = look.pairs(held, before, where, "key")
    if before is not None and "is_all" not in entry and before.whole != kinds.content(value).whole:
        entry["order"] = [look.value(key, where) for key, _ in held]
    if isinstance(value, collections.defaultdict):
        factory = value.default_factory
        known = next((name for name, one in FACTORIES.items() if one is factory), None)
        entry["factory"] = known or look.value(factory, f"{where}.default_factory")
    return entry


def _array(look: Look, value: Any, before: Content | None, where: str) -> Entry:
    if type(value) is not np.ndarray:
        raise Hole(f"a {type(value).__name__}")
    if value.dtype.hasobject:
        return {"items": look.items(fingerprint.flat(value).tolist(), where), "shape": list(value.shape)}
    if not encoder.are_storable(value.dtype):
        raise Hole(f"an array of {value.dtype}")
    return {"array": np.array(value, order="C")}


def _tensor(look: Look, value: Any, before: Content | None, where: str) -> Entry:
    if (base := look._owned.base(value)) is not None:
        return {"view": [base, [*value.shape], [*value.stride()], value.storage_offset()]}
    is_parameter = isinstance(value, torch.nn.Parameter)
    if problem := encoder.unstorable(value):
        raise Hole(problem)
    if value.nbytes > LARGEST_EXPANDED and fingerprint.memory_of(value.detach()).nbytes < value.nbytes:
        raise Hole("a tensor that repeats its elements, and is far larger than its memory")
    if value.grad_fn is not None and signs.holds_graph(value):
        look.lost.append((where, "its graph, which no backward() has used: keep it with detach()"))
    return {
        "tensor": value.detach(),
        "requires_grad": value.requires_grad and value.is_leaf,
        "is_parameter": is_parameter,
    }


def _count(look: Look, value: Any, before: Content | None, where: str) -> Entry:
    start, _, step = repr(value)[6:-1].partition(", ")
    return {
        "count": [float(one) if not one.lstrip("-").isdigit() else int(one) for one in (start, step or "1")]
    }


def _object(look: Look, value: Any, before: Content | None, where: str) -> Entry:
    entry = look.pairs(look.attributes(value).items(), before, where, "attribute")
    if issubclass(type(value), (dict, list, set, collections.deque)):
        base = _dict if issubclass(type(value), dict) else _list
        entry["inherited"] = base(look, value, None, where)
    is_as_before = before is not None and before.whole[0] == id(type(value))
    return entry if is_as_before else entry | class_of(look, value, where)


def _attributes(look: Look, value: Any, before: Content | None, where: str) -> Entry:
    """Return what has changed of a class, a function, a network or an object of a library: each step."""
    then = before.held if before is not None else {}
    old = {how: before.marks(how) for how in then} if before is not None else {}
    inside, covered = kinds.look_into(value), look._owned.covered(value) or ()
    hooks, now = [how for how in {*then, *inside.groups} if how.endswith("_hooks")], inside.content().held
    look.lost += [(f"{where}.{how}", HOOK) for how in hooks if then.get(how) != now.get(how)]
    is_librarys = kinds.kind_of(value) in ("network", "library") and not own.is_own_class(type(value))
    steps = []
    for step, one in inside.steps():
        was: Any = old.get(step.how, {}).get(step.name)
        if was == mark(one) or step.name in covered or step.how in hooks:
            continue
        if is_librarys and not libraries.takes(type(value), step, was and was[0], one):
            look.lost.append((f"{where}{step}", f"a {type(one).__name__} in an object of a library"))
        elif is_librarys or look._may_be_at(step, one, where):
            steps.append([*step, look.value(one, f"{where}{step}")])
    if kinds.kind_of(value) == "library":
        return {"data": [[name, one] for _, name, one in steps]}
    return {"steps": steps}


def _method(look: Look, value: Any, before: Content | None, where: str) -> Entry:
    if not signs.is_own(value.__func__):
        raise Hole(f"{value!r}, which the script has imported")
    return {"self": look.value(value.__self__, where), "name": value.__func__.__name__}


def _state(look: Look, value: Any, before: Content | None, where: str) -> Entry:
    if libraries.has_state(value, "library") and look._owned.covered(value) is None:
        return {"of_itself": libraries.state(value)}
    return _attributes(look, value, before, where)


def class_of(look: Look, value: Any, where: str) -> Entry:
    return {"of": look.value(type(value), where)} if own.is_own_class(type(value)) else {}


WRITERS: dict[str, Callable[[Look, Any, Content | None, str], Entry]] = {
    "list": _list,
    "tuple": _tuple,
    "dict": _dict,
    "set": lambda look, value, before, where: {
        "items": look.items(signs.hashed(kinds.items_of(value)), where)
    },
    "buffer": lambda look, value, before, where: {
        "bytes": bytes(value),
        "typecode": getattr(value, "typecode", None),
    },
    "array": _array,
    "tensor": _tensor,
    "generator": lambda look, value, before, where: {"state": contents.state_of(value)},
    "count": _count,
    "enum": lambda look, value, before, where: {
        "member": (slots.dictionary(value) or {})["_name_"],
        **class_of(look, value, where),
    },
    "object": _object,
    "class": _attributes,
    "function": _attributes,
    "network": _attributes,
    "partial": lambda look, value, before, where: {
        "items": [look.value(one, where) for one in (value.func, value.args, value.keywords)]
    },
    "method": _method,
    "library": _state,
}
