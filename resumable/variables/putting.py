"""What a look has stored, put back: all is found first, then filled in place or made, and bound last."""

from __future__ import annotations

import array
import collections
import enum
import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch

from ..objects import kinds, own, walks
from ..objects.kinds import Step
from ..objects.walks import Finder
from . import atoms, checking, constants, filling, libraries, making, running, signs
from .atoms import Hole
from .looks import Namespace
from .owned import Owned
from .writing import LARGEST_EXPANDED, Entry, class_name

_NOTHING: Any = object()
_HEAD = {"kind", "class", "at", "owned", "hole", "constant"}
"""What says which object it is, and not what is in it."""


class Putting:
    """Puts one stored look back, at as many heads as there are; what it has made stays the same object."""

    def __init__(self, tree: Mapping[str, Any], there: Mapping[int, Any] | None = None) -> None:
        """`there`: the objects of the entries, if this process has stored them."""
        self._is_ours = there is not None
        if not self._is_ours:
            checking.check(tree)
        self._entries: Sequence[Entry] = tree["entries"]
        self._namespaces: Sequence[Any] = tree["namespaces"]
        self._made: dict[int, Any] = {}
        self._found: dict[int, Any] = {**(there or {})}
        self._filled: set[int] = set()
        self._foreign: set[int] = set()
        """The entries that are in objects of libraries."""
        self._places: Callable[[], frozenset[str]] = frozenset
        self._met: set[str] = set()
        """The namespaces that have been there."""
        self.bound: set[tuple[str, str]] = set()
        """The variables that were bound, with the keys of their namespaces."""
        self.problems: list[str] = []
        """What cannot be put back."""
        self._there: Mapping[str, Namespace] = {}
        self._left: set[str] = set()
        """The namespaces that are the script's again."""

    def leave_what_was_put(self) -> None:
        """Let what was put back be the script's again: the next time only what comes up later is put back."""
        self._left |= self._there.keys()

    def put(
        self, namespaces: Iterable[Namespace], owned: Owned, functions: Callable[[], set[str]] = set
    ) -> list[str]:
        """Put everything back; return the names of the variables that were bound.

        `functions`: returns those of the script, which may run later.
        """
        self._there = there = {one.key: one for one in namespaces}
        self.problems, self._places = [], running.places(there.values())
        there |= self._moved(there, functions)
        self._met |= there.keys()
        if not self._left:
            self._filled = set()
            # A count cannot be filled again.
            self._made = {n: one for n, one in self._made.items() if type(one) is not itertools.count}
        self.find(there, owned)
        for number, entry in enumerate(self._entries):
            if number in self._found and entry.keys() - _HEAD:
                self._try(self._text(entry), partial(self._object, number))
            elif number in self._found and "constant" in entry:
                self._try(self._text(entry), partial(self._check, number, entry))
        rows = [(key, row) for key, row in self._namespaces if key not in self._left]
        return [name for key, row in rows for name in self._bound(there.get(key), row)]

    def _moved(
        self, there: Mapping[str, Namespace], functions: Callable[[], set[str]]
    ) -> dict[str, Namespace]:
        """Return where variables are whose function the script does not have any more, by their names."""
        gone = [key for key, _ in self._namespaces if key not in there and key.startswith("frame:")]
        gone = [key for key in gone if key.rpartition(":")[2] not in functions()] if gone else []
        found = {}
        for key in gone:
            names = self.names_in(key)
            best = max(there.values(), key=lambda one: len(names & one.variables.keys()), default=None)
            if best is not None and names & best.variables.keys():
                found[key] = best._replace(key=key)
        return found

    def unmet(self) -> list[str]:
        """Return which variables were never put back: their functions have not run."""
        gone = [(key, self.names_in(key)) for key, _ in self._namespaces if key not in self._met]
        ended = ((key, names) for key, names in gone if names and key not in self._left)
        return [f"{', '.join(sorted(names))}: no {key.rpartition(':')[2]} runs" for key, names in ended]

    def names_in(self, key: str) -> set[str]:
        """Return the variables of a namespace that the checkpoint has."""
        bound = {name for other, rows in self._namespaces if other == key for name, _ in rows}
        changed = (one["at"][0] for one in self._entries if "at" in one and one.keys() - _HEAD)
        return bound | {str(name) for other, name in changed if other == key}

    def lacking(self) -> set[tuple[str, str]]:
        """Return the variables that the checkpoint could not have, with the keys of their namespaces."""
        return {
            (key, name)
            for key, rows in self._namespaces
            for name, stored in rows
            if type(stored) is dict and "entry" in stored and "hole" in self._entries[stored["entry"]]
        }

    def find(self, there: Mapping[str, Namespace], owned: Owned) -> None:
        """Find all objects that are there, by their paths."""
        # What was found stays: its variable may be bound to another object since.
        finder = Finder(root for one in there.values() for root in one.roots())
        for number, entry in enumerate(self._entries):
            if number not in self._found and (entry.get("at") or [[None]])[0][0] in (*there, None):
                value = self._try(self._text(entry), partial(_find, entry, finder, owned))
                if value is not _NOTHING and "at" in entry:
                    path = path_of(entry)
                    above = (kinds.kind_of(finder.find(path[:end])) for end in range(len(path) - 1, 0, -1))
                    is_foreign = entry["kind"] not in libraries.OWN and libraries.is_inside(above)
                    self._foreign |= {number} if is_foreign else set()
                if value is not _NOTHING:
                    self._found[number] = value

    def _check(self, number: int, entry: Entry) -> None:
        """Put back what the loop had left alone, if the script has made another one now."""
        live, (digest, stored) = self._found[number], entry["constant"]
        if constants.digest_of(live) == digest:
            return
        if stored is None:
            raise Hole("it is not what it was when the loop began, and too large to be in the checkpoint")
        filling.FILLERS[entry["kind"]](self, live, entry | stored)
        raise Hole("it is not what it was when the loop began; that of the checkpoint is used")

    def _text(self, entry: Entry) -> str:
        return (
            walks.text(tuple(path_of(entry))) if "at" in entry else entry.get("class", "").rpartition(":")[2]
        )

    def _try(self, name: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Hole as hole:
            problem = f"{name}: {hole}" if str(hole) else ""
        except Exception as exc:
            # A checkpoint may come from anybody, and what it says may fit no object.
            problem = f"{name}: it is not what can be there: {exc!r}"
        # One without a reason is made by the script itself.
        self.problems += [problem] if problem and problem not in self.problems else []
        return _NOTHING

    def _bound(self, there: Namespace | None, rows: Sequence[Any]) -> list[str]:
        if there is None:
            # The function of an inner loop runs when that loop is reached.
            return []
        values = {}
        for name, stored in rows:
            is_count = self._is_count(stored, there.variables.get(name))
            if name not in there.may_be_bound and not is_count:
                self.problems.append(f"{name}: no loop of the script assigns it")
            elif (value := self._try(name, partial(self.value, stored))) is not _NOTHING:
                values[name] = value
        there.bind(values)
        self.bound |= {(there.key, name) for name in values}
        return [*values]

    def _is_count(self, stored: Any, live: Any) -> bool:
        """Whether a count takes the place of a count: none can be filled in place."""
        kind = (
            self._entries[stored["entry"]].get("kind") if type(stored) is dict and "entry" in stored else ""
        )
        return kind == "count" and type(live) is itertools.count

    def value(self, stored: Any) -> Any:
        """Return what a value of the tree stands for."""
        if type(stored) is tuple:
            return tuple(map(self.value, stored))
        if type(stored) is not dict:
            return stored
        if "atom" in stored:
            return atoms.back(*stored["atom"])
        return self._object(stored["entry"])

    def check_place(self, place: str, value: Any, entry: Entry) -> None:
        """Raise Hole if an object that was there before may not get a value at a place."""
        if self._is_ours or "at" not in entry:
            return
        if not libraries.may_be_at(place, value, self._places):
            raise Hole(f"{place}: {libraries.no_place(value)}")

    def own_class(self, entry: Entry, base: Any = object) -> Any:
        """Return the class of the script that an entry names, of which objects may be made."""
        of = self.value(entry.get("of"))
        is_right = isinstance(of, type) and issubclass(of, base) and own.is_own_class(of)
        if not is_right or any("__del__" in own.namespace(one) for one in of.__mro__):
            raise Hole(f"a {entry.get('class')} is never made")
        return of

    def values(self, stored: Any) -> list[Any]:
        """Return what stands in a list, which may be an array of numbers."""
        return stored.tolist() if isinstance(stored, np.ndarray) else [*map(self.value, stored)]

    def _object(self, number: int) -> Any:
        entry = self._entries[number]
        live = self._found.get(number, self._made.get(number, _NOTHING))
        if number in self._filled:
            return live
        if "hole" in entry:
            raise Hole(entry["hole"])
        if live is _NOTHING and "at" in entry:
            raise Hole(f"{self._text(entry)} is not there any more")
        if not entry.keys() - _HEAD:
            self._filled.add(number)
            return live
        if live is _NOTHING:
            # Before it is filled: what is in it may lead to it again.
            if (make := _MAKERS.get(entry["kind"])) is None:
                raise Hole(f"a {entry['kind']} is never made")
            live = make(self, entry)
            if kinds.kind_of(live) != entry["kind"]:
                raise Hole(f"a {entry['kind']} that is a {type(live).__name__}")
            # A tuple may have been made as what is in it was filled.
            live = self._made.setdefault(number, live)
        if number in self._foreign and not self._is_data(entry):
            raise Hole("other than numbers in an object of a library")
        self._filled.add(number)
        filling.FILLERS.get(entry["kind"], filling.nothing)(self, live, entry)
        return live

    def _is_data(self, entry: Entry) -> bool:
        items = [*self.values(entry.get("items", ())), *(self.value(one) for _, one in entry.get("set", ()))]
        return entry["kind"] in libraries.FILLED and all(map(libraries.is_data, items))


def _find(entry: Entry, finder: Finder, owned: Owned) -> Any:
    """Return the object of an entry that is there already."""
    if name := entry.get("owned") or entry.get("view", [""])[0]:
        try:
            found = owned.object(name)
        except KeyError:
            raise Hole(f"{name} is not there any more") from None
        if "owned" in entry:
            return found
    if "at" in entry:
        try:
            value = finder.find(path_of(entry))
        except KeyError:
            raise Hole("it is not there any more") from None
        # The object says of what kind it is, not the checkpoint.
        if class_name(type(value)) != entry["class"] or kinds.kind_of(value) != entry["kind"]:
            raise Hole(f"it is a {type(value).__name__} now")
        if libraries.is_imported(value):
            raise Hole("what the script has imported is never referred to")
        return value
    return _view(found, *entry["view"][1:]) if "view" in entry else _NOTHING


def _view(base: Any, shape: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    if math.prod(shape) * base.element_size() > max(base.nbytes, LARGEST_EXPANDED):
        raise Hole("a view that is far larger than its memory")
    try:
        found: torch.Tensor = base.detach().as_strided(shape, stride, offset)
    except (RuntimeError, AttributeError) as exc:
        raise Hole(f"no view of it: {exc}") from exc
    return found


def path_of(entry: Entry) -> list[Step]:
    """Return the path of an object that was there when the loop began."""
    return [Step(*one) for one in entry["at"]]


def _list(put: Putting, entry: Entry) -> Any:
    return collections.deque(maxlen=entry["maxlen"]) if entry["class"].endswith(":deque") else []


def _tuple(put: Putting, entry: Entry) -> Any:
    items = put.values(entry["items"])
    if "of" in entry:
        return tuple.__new__(put.own_class(entry, tuple), items)
    return torch.Size(items) if entry["class"] == class_name(torch.Size) else tuple(items)


_DICTS: dict[str, Any] = {
    class_name(one): one
    for one in (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
}


def _dict(put: Putting, entry: Entry) -> Any:
    if entry["class"] not in _DICTS:
        raise Hole(entry["class"])
    return _DICTS[entry["class"]]()


def _array(put: Putting, entry: Entry) -> Any:
    if "shape" in entry:
        return np.empty(entry["shape"], object)
    return np.empty_like(entry["array"])


def _tensor(put: Putting, entry: Entry) -> Any:
    new = entry["tensor"].clone()
    if entry["is_parameter"]:
        return torch.nn.Parameter(new, entry["requires_grad"])
    return new.requires_grad_(entry["requires_grad"])


def _generator(put: Putting, entry: Entry) -> Any:
    makers: dict[str, Callable[[], Any]] = {
        class_name(random.Random): random.Random,
        class_name(torch.Generator): torch.Generator,
        class_name(np.random.RandomState): np.random.RandomState,
    }
    if (make := makers.get(entry["class"])) is not None:
        return make()
    return filling.numpy_generator(entry["state"])


def _enum(put: Putting, entry: Entry) -> Any:
    members: dict[str, Any] = put.own_class(entry, enum.Enum)._member_map_
    return members[entry["member"]]


def _new_object(put: Putting, entry: Entry) -> Any:
    of = put.own_class(entry)
    if any(type(one) is dict and "hole" in put._entries[one.get("entry", 0)] for _, one in entry["set"]):
        # Never half an object.
        raise Hole(f"{entry['class']} holds something that no checkpoint can have")
    base = next((one for one in (dict, list, collections.deque, set) if issubclass(of, one)), object)
    return base.__new__(of)


def _partial(put: Putting, entry: Entry) -> Any:
    function, arguments, keywords = put.values(entry["items"])
    if kinds.kind_of(function) not in libraries.CALLED:
        raise Hole(f"a partial of a {type(function).__name__}")
    return partial(function, *arguments, **keywords)


def _method(put: Putting, entry: Entry) -> Any:
    owner = put.value(entry["self"])
    for of in type(owner).__mro__:
        if type(found := own.namespace(of).get(entry["name"])) is FunctionType and signs.is_own(found):
            return MethodType(found, owner)
    raise Hole(f"{entry['class']} {entry['name']}")


_MAKERS: dict[str, Callable[[Putting, Entry], Any]] = {
    "list": _list,
    "tuple": _tuple,
    "dict": _dict,
    "set": lambda put, entry: (
        frozenset(signs.hashed(put.values(entry["items"]))) if ":frozenset" in entry["class"] else set()
    ),
    "buffer": lambda put, entry: array.array(entry["typecode"]) if entry["typecode"] else bytearray(),
    "array": _array,
    "tensor": _tensor,
    "generator": _generator,
    "count": lambda put, entry: itertools.count(*entry["count"]),
    "enum": _enum,
    "object": _new_object,
    "partial": _partial,
    "method": _method,
    "network": making.made,
    "library": making.made,
}
