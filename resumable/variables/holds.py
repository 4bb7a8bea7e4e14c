"""What the lines between two heads change, undone: they ran before, in the body that goes on."""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from ..objects import kinds, slots, walks
from ..objects.contents import Content
from ..objects.walks import Node
from . import signs
from .looks import Look, Namespace
from .owned import Owned

_LARGEST = 16 << 20
"""Of larger arrays and tensors no copy is kept."""


class _Held(NamedTuple):
    """An object as it was at the outer head, with what puts that back."""

    value: Any
    content: Content
    put_back: Callable[[], object]


class Hold:
    """The variables as they are at the head of an outer loop, until the inner one begins."""

    def __init__(self, namespaces: Iterable[Namespace], owned: Owned) -> None:
        self._variables = {one.key: one.variables for one in namespaces}
        look = Look(owned)
        roots = [root for one in namespaces for root in one.roots()]
        nodes = (one for one in walks.walk(roots, look.is_leaf) if not look.is_leaf(one))
        self._held = [held for node in nodes if (held := _held(node)) is not None]

    def put_back(self, namespaces: Iterable[Namespace], lacking: Collection[tuple[str, str]]) -> None:
        """Put back what has changed since; a file or a loader that these lines have made stays.

        `lacking`: the variables that the checkpoint could not have.
        """
        for one in self._held:
            if kinds.content(one.value) != one.content:
                one.put_back()
        for namespace in namespaces:
            then, now = self._variables.get(namespace.key, {}), namespace.variables
            changed = {
                name for name in then.keys() & namespace.may_be_bound if then[name] is not now.get(name)
            }
            namespace.bind(
                {
                    name: then[name]
                    for name in changed
                    if (namespace.key, name) not in lacking and _may_go(now.get(name))
                }
            )


def _may_go(value: Any) -> bool:
    return kinds.kind_of(value) != "library" and signs.live(value) is None and signs.inside(value) is None


def _held(node: Node) -> _Held | None:
    make = _COPIES.get(node.kind)
    put_back = make(node.value) if make is not None else None
    return _Held(node.value, node.inside().content(), put_back) if put_back is not None else None


def _sequence(value: Any) -> Callable[[], object] | None:
    bases: tuple[Any, ...] = (list, collections.deque, set)
    base = next((one for one in bases if issubclass(type(value), one)), None)
    if base is None:
        return None
    items, add = kinds.items_of(value), base.update if base is set else base.extend
    return lambda: (base.clear(value), add(value, items))


def _dict(value: Any) -> Callable[[], object]:
    base: Any = collections.OrderedDict if issubclass(type(value), collections.OrderedDict) else dict
    pairs = kinds.items_of(value)

    def put_back() -> None:
        base.clear(value)
        for key, one in pairs:
            base.__setitem__(value, key, one)

    return put_back


def _attributes(value: Any) -> Callable[[], object]:
    then = slots.attributes(value)
    inside = _dict(value) if issubclass(type(value), dict) else _sequence(value)

    def put_back() -> None:
        members, held = slots.members(type(value)), slots.dictionary(value)
        now = slots.attributes(value)
        for name in now.keys() - then.keys():
            members[name].__delete__(value) if name in members else (held or {}).pop(name)
        for name, one in then.items():
            if name in members:
                members[name].__set__(value, one)
            elif held is not None:
                held[name] = one
        if inside is not None:
            inside()

    return put_back


def _class(value: Any) -> Callable[[], object]:
    then = {step.name: one for step, one in kinds.look_into(value).steps() if step.how == "attribute"}
    return lambda: [type.__setattr__(value, name, one) for name, one in then.items()]


def _function(value: Any) -> Callable[[], object]:
    then = [(cell, cell.cell_contents) for cell in value.__closure__ or () if _is_filled(cell)]
    own, defaults, named = dict(vars(value)), value.__defaults__, dict(value.__kwdefaults__ or {})

    def put_back() -> None:
        for cell, one in then:
            cell.cell_contents = one
        vars(value).clear()
        vars(value).update(own)
        value.__defaults__ = defaults
        (value.__kwdefaults__ or {}).update(named)

    return put_back


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _array(value: Any) -> Callable[[], object] | None:
    if value.nbytes > _LARGEST or not value.flags.writeable:
        return None
    copy = np.array(value)
    return lambda: np.copyto(value, copy)


def _tensor(value: Any) -> Callable[[], object] | None:
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
    if not is_plain or value.nbytes > _LARGEST or value.is_meta:
        return None
    copy, requires_grad = value.detach().clone(), value.requires_grad

    def put_back() -> None:
        with torch.no_grad():
            value.detach().copy_(copy)
        if value.is_leaf:
            value.requires_grad_(requires_grad)

    return put_back


def _buffer(value: Any) -> Callable[[], object]:
    copy = value[:]
    return lambda: value.__setitem__(slice(None), copy)


_COPIES: dict[str, Callable[[Any], Callable[[], object] | None]] = {
    "list": _sequence,
    "set": _sequence,
    "dict": _dict,
    **dict.fromkeys(("object", "network", "library"), _attributes),
    "class": _class,
    "function": _function,
    "array": _array,
    "tensor": _tensor,
    "buffer": _buffer,
}
