"""With what passes over loaders began: orders are drawn again from it, and workers are made again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from ..objects import kinds, own, walks
from ..objects.contents import Content
from ..objects.kinds import Step
from ..objects.walks import Met, Node
from . import libraries, running
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
Known = Mapping[int, Met]
Begun = tuple[Callable[[], object], list[str]]
_WORKERS, _ORDERS = "workers of ", (".sampler", ".batch_sampler")


class Moment(NamedTuple):
    """All that some variables lead to, as it was at a moment, such as when a pass over a loader began."""

    entries: Sequence[Entry]
    """All of it, as a look has it."""
    then: Sequence[tuple[Any, Content | None]] = ()
    """By entry: the object, and its content; None if something else restores it."""
    putting: Putting | None = None

    @classmethod
    def now(cls, namespaces: Iterable[Namespace], owned: Owned, known: Known | None = None) -> Moment:
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
        return [self._since(number, same, look) for number in range(len(self.entries))]

    def _since(self, number: int, same: Collection[int], look: Look) -> Entry:
        """Return an entry without its content if that is the same, else with the names that came since."""
        entry, (value, _) = self.entries[number], self.then[number]
        if number in same and "at" in entry:
            return _place(entry)
        if entry.get("kind") != "object" or "is_all" not in entry:
            return entry
        return {**entry, "gone": [*look.attributes(value).keys() - {name for name, _ in entry["set"]}]}

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
            same = self._same(look := Look(owned))
            entries = [
                _place(one) if number in same else self._since(number, same, look)
                for number, one in enumerate(self.entries)
            ]
            there = {number: one for number, (one, _) in enumerate(self.then)}
            putting = Putting({"namespaces": [], "entries": entries}, there)
        putting.put(namespaces, owned)
        return putting.problems


class Passes:
    """Of each loader the pass that began last, and the making of workers that are kept from pass to pass."""

    def __init__(self, loaded: Mapping[str, Sequence[Entry]] = MappingProxyType({})) -> None:
        """`loaded`: what a checkpoint has, as `changed` returns it."""
        self._begun = {name: Moment.loaded(one) for name, one in loaded.items()}
        self._working: set[str] = set()
        """The loaders whose workers are kept, and were made since the load."""

    def begin(
        self, name: str, loader: Any, namespaces: Sequence[Namespace] | None, owned: Owned, known: Known
    ) -> Begun:
        """Put back what a pass began with, if it goes on, and what workers that are kept were made of.

        The order of a pass that goes on is drawn again, and the workers are made again. Return a function
        that puts all back as it is now, and what cannot be put back.

        `namespaces`: those of the script; None if it begins. `known`: the objects that a resume can find.
        """
        workers, keeps_workers = _WORKERS + name, isinstance(loader, DataLoader) and loader.persistent_workers
        begun = [self._begun[name]] if namespaces is not None and name in self._begun else []
        if keeps_workers and name not in self._working and workers in self._begun:
            begun.append(self._begun[workers])
        behind, problems = [_behind(name, owned)], list[str]()
        now = Moment.now(behind, owned) if begun else None
        for one in begun:
            problems += one.put_back(namespaces or (), owned)
        self._begun[name] = Moment.now(behind, owned, known)
        if keeps_workers:
            self._working.add(name)
            self._begun.setdefault(workers, Moment.now([_behind(name, owned, _ORDERS)], owned, known))
        return partial(now.put_back, (), owned) if now else list, problems

    def changed(self, look: Look) -> dict[str, list[Entry]]:
        """Return what has changed since, for a checkpoint."""
        kept = {name: one.changed(look, is_whole=_WORKERS in name) for name, one in self._begun.items()}
        return {name: entries for name, entries in kept.items() if entries}

    def find(self, namespaces: Sequence[Namespace], owned: Owned) -> None:
        """Find the objects of a checkpoint, before others take their places."""
        for one in self._begun.values():
            one.find(namespaces, owned)

    def remember_workers(self, namespaces: Sequence[Namespace], owned: Owned, known: Known) -> Iterator[str]:
        """Note of what workers that are kept were made, as a checkpoint has it; yield what it lacks."""
        loaded = [one for one in self._begun.items() if one[1].putting and one[0].startswith(_WORKERS)]
        for name, one in loaded:
            behind = [_behind(name.removeprefix(_WORKERS), owned, _ORDERS)]
            now = Moment.now(behind, owned)
            yield from one.put_back(namespaces, owned)
            self._begun[name] = Moment.now(behind, owned, known)
            now.put_back((), owned)


def _behind(loader: str, owned: Owned, without: tuple[str, ...] = ()) -> Namespace:
    held = owned.loaders.get(loader, {}).items()
    objects = {where: one for where, one in held if not where.removeprefix(loader).startswith(without)}
    return running.of_objects(f"loader:{loader}", objects)


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
