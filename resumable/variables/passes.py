"""With what the passes over loaders began: their orders are drawn again from it, and their workers made."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from ..objects import kinds, own, walks
from ..objects.contents import Content
from ..objects.kinds import Step
from ..objects.walks import Met, Node
from . import libraries
from .looks import Look, Namespace
from .owned import Owned
from .putting import Putting
from .writing import Entry

_INSIDE = ("object", "library")
_CALLED = ("object", "function", "partial", "method")
_SAMPLERS = ("torch.utils.data.sampler", "torch.utils.data.distributed")
_CONTAINERS = {"list", "dict", "set", "buffer", "array", "tensor", "generator"}
_MOST_ITEMS, _MOST_NUMBERS = 4096, 100_000
_MOST_BYTES = 16 << 20


class Moment(NamedTuple):
    """All that some variables lead to, as it was at a moment, such as when a pass over a loader began."""

    entries: Sequence[Entry]
    """All of it, as a look has it."""
    then: Sequence[tuple[Any, Content | None]] = ()
    """By entry: the object, and its content; None if something else restores it."""
    putting: Putting | None = None

    @classmethod
    def now(
        cls, namespaces: Iterable[Namespace], owned: Owned, known: Mapping[int, Met] | None = None
    ) -> Moment:
        """Return what is there now; `known`: the objects that a resume can find."""
        roots, look = [root for one in namespaces for root in one.roots()], Look(owned)
        if known is None:
            known = walks.met(walks.walk(roots, look.is_leaf), lambda it: _if_large(it, look))
        else:
            # As if all had changed.
            known = {at: one._replace(content=None) for at, one in known.items()}
        look = Look(owned, known.get)
        look.changes(roots)
        both = zip(look.objects, look.entries, strict=True)
        then = [(one, None if "owned" in entry else look.content(Node(one))) for one, entry in both]
        return cls([*map(_copied, look.entries)], then)

    @classmethod
    def loaded(cls, entries: Sequence[Entry]) -> Moment:
        """Return what a checkpoint has."""
        return cls(entries, (), Putting({"namespaces": [], "entries": entries}))

    def changed(self, look: Look, *, is_whole: bool = False) -> list[Entry]:
        """Return what has changed since, for a checkpoint; nothing if nothing has, unless it `is_whole`."""
        if self.putting is not None:
            return [*self.entries]
        same = self._same(look)
        if not is_whole and all(number in same for number, one in enumerate(self.entries) if "at" in one):
            return []
        return [
            _place(one) if number in same and "at" in one else one for number, one in enumerate(self.entries)
        ]

    def _same(self, look: Look) -> set[int]:
        contents = [then is None or look.content(Node(one)) == then for one, then in self.then]
        return {number for number, is_same in enumerate(contents) if is_same}

    def find(self, namespaces: Iterable[Namespace], owned: Owned) -> None:
        """Find the objects of a checkpoint, before others take their places."""
        if self.putting is not None:
            self.putting.find({one.key: one for one in namespaces}, owned)

    def put_back(self, namespaces: Iterable[Namespace], owned: Owned) -> list[str]:
        """Put it back; return what cannot be put back."""
        putting = self.putting
        if putting is None:
            same = self._same(Look(owned))
            entries = [_place(one) if number in same else one for number, one in enumerate(self.entries)]
            there = {number: one for number, (one, _) in enumerate(self.then)}
            putting = Putting({"namespaces": [], "entries": entries}, there)
        putting.put(namespaces, owned)
        return putting.problems


def _if_large(node: Node, look: Look) -> Content | None:
    """Return the content of an array or a tensor that is too large to be copied: it counts as unchanged."""
    size = node.value.nbytes if node.kind in ("array", "tensor") else 0
    return look.content(node) if size > _MOST_BYTES else None


def _place(entry: Entry) -> Entry:
    return {name: one for name, one in entry.items() if name in ("kind", "class", "at", "owned")}


def _copied(entry: Entry) -> Entry:
    """Return an entry whose tensors the training does not change any more."""
    entry = {**entry, "of_itself": copy.deepcopy(entry["of_itself"])} if "of_itself" in entry else entry
    return {**entry, "tensor": entry["tensor"].clone()} if "tensor" in entry else entry


def behind(name: str, loader: Any) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    """Return the objects behind a loader that a script can change: its own, and the samplers of torch.

    Return the others, too, with their names: the place of the loader restores them, or they are too large.
    """
    changed, owned = dict[str, Any](), list[tuple[str, Any]]()
    for node in walks.walk([(Step("", name), loader)], lambda one: one.kind not in _INSIDE):
        where, one, kind = str(node), node.value, node.kind
        if (
            isinstance(one, DataLoader)
            or kind == "generator"
            or (kind in _CONTAINERS and _is_large(one, kind))
        ):
            owned.append((where, one))
        elif kind == "object" and libraries.gives_state(type(one)):
            inside = walks.walk([(Step("", where), one)])
            owned += [(str(it), it.value) for it in inside if it.kind in {*_CONTAINERS, "object"}]
        elif kind == "function" and not own.is_own_code(one.__code__):
            continue
        elif kind in _CALLED or (kind == "library" and own.module_of(type(one)).startswith(_SAMPLERS)):
            changed[where] = one
    return changed, owned


def _is_large(value: Any, kind: str) -> bool:
    if kind in ("array", "tensor", "buffer"):
        held: Any = value
        size = held.nbytes if isinstance(held, (np.ndarray, torch.Tensor)) else len(held)
        return bool(size > _MOST_BYTES)
    if kind == "generator" or len(value) <= _MOST_ITEMS:
        return False
    items: Collection[Any] = (
        kinds.items_of(value) if kind == "list" and len(value) <= _MOST_NUMBERS else [None]
    )
    return not {int, float, bool}.issuperset(map(type, items))
