"""Finds counters and orders that the user's own objects keep from batch to batch."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ..generators import code_names, search

_NUMBERS = (bool, int, float)
_LONGEST = 1_000_000
"""Items of an order that is compared: to read more would hold up the epoch."""


class Counter(NamedTuple):
    """An attribute that changes as batches are loaded."""

    role: str
    """The part of the loader that leads to it."""
    name: str
    """Its class and its own name."""
    first: str
    """Its first value that was seen."""

    def __str__(self) -> str:
        return (
            f"{self.name} changes as batches are loaded, and is in no checkpoint: a resume begins it "
            f"with {self.first}. If what is loaded depends on it, give the {self.role} state_dict() and "
            "load_state_dict() with it."
        )


class _Order(NamedTuple):
    """A list, array or tensor in a form that can be compared without a copy."""

    place: int
    length: int
    content: int


_Value = bool | int | float | _Order | None
_Values = Mapping[str, _Value]


@dataclass(slots=True, eq=False)
class _Object:
    """One object of the user's: its attributes at the last look, and how they have changed."""

    owner: weakref.ref[Any]
    now: _Values
    first: _Values
    changes: dict[str, int] = field(default_factory=dict)
    """How often a batch has changed each attribute."""
    left_out: set[str] = field(default_factory=set)
    """Attributes that the script changes itself, and those that were reported."""
    epoch: _Values | None = None
    """The attributes after the first batch of the last epoch."""
    stepped: set[str] = field(default_factory=set)
    """The attributes that this epoch's first batch has raised by one."""
    found: set[str] = field(default_factory=set)


class Counters:
    """Compares the attributes of the user's objects from look to look.

    In a map-style dataset, an attribute that two batches change is a counter. Samplers and streams run an
    epoch again from its beginning, so there only what one epoch passes on to the next is a counter.
    """

    def __init__(self, role: str, root: object, *, is_run_again: bool) -> None:
        """`is_run_again`: whether a resume runs an epoch again from its beginning."""
        self._role = role
        self._root = root
        self._is_run_again = is_run_again
        self._is_sampler = role == "sampler"
        self._seen: dict[int, _Object] = {}
        self._has_ended = False
        """Whether the last look was at an epoch's end."""

    def begin(self) -> None:
        """Look before an epoch, or before a batch that does not follow the last look."""
        for one, before in self._look(has_orders=self._is_sampler):
            changed = _changed(before, one.now) - _orders(one.now)
            if self._has_ended:
                one.left_out |= changed
            elif changed:
                # Loading may have changed it, or the script.
                one.epoch = None
        self._has_ended = False

    def before_batch(self, number: int) -> None:
        """Look before the batch of this number in its epoch."""
        if number == 1:
            self._script_ran()
        elif not self._is_run_again:
            self.begin()

    def after_batch(self, number: int) -> None:
        """Look after the batch of this number: since the last look, only what loads has run."""
        if not self._is_run_again:
            self._loaded()
        elif number == 0:
            self._epoch_begun()
        elif number == 1:
            self._epoch_continues()

    def _loaded(self) -> None:
        for one, before in self._look():
            for name in _changed(before, one.now):
                one.changes[name] = one.changes.get(name, 0) + 1
                if one.changes[name] > 1:
                    one.found.add(name)

    def _script_ran(self) -> None:
        # Since the last look only the script has run, so the changes are its own.
        for one, before in self._look():
            one.left_out |= _changed(before, one.now)
            one.stepped -= one.left_out

    def _epoch_begun(self) -> None:
        for one, before in self._look(has_orders=self._is_sampler):
            one.found |= _shuffled(before, one.now)
            one.stepped = {
                name for name in _changed(before, one.now) if _is_step(before.get(name), one.now[name])
            }
            if one.epoch is not None:
                one.found |= _changed(one.epoch, one.now) - _orders(one.now)
            one.epoch = one.now

    def _epoch_continues(self) -> None:
        # An attribute that only the first batch has raised by one counts the epochs.
        for one, before in self._look():
            one.found |= one.stepped - _changed(before, one.now)
            one.stepped = set()

    def epoch_ended(self) -> None:
        """Look at an epoch's end."""
        self._look()
        self._has_ended = True

    def new(self, keeps: Callable[[Any], bool] = lambda _: False) -> list[Counter]:
        """Return the counters found since the last call; `keeps`: whether a list or a tensor is saved."""
        new = []
        for one in self._seen.values():
            owner = one.owner()
            for name in sorted(one.found - one.left_out):
                value = getattr(owner, "__dict__", {}).get(name)
                if owner is not None and (type(value) in _NUMBERS or not keeps(value)):
                    first = _described(one.first.get(name))
                    new.append(Counter(self._role, f"{type(owner).__name__}.{name}", first))
            one.left_out |= one.found
        return new

    def _look(self, *, has_orders: bool = False) -> list[tuple[_Object, _Values]]:
        """Read all numbers; return each known object with its earlier attributes.

        Read orders too if wanted, and where no epoch is run again what grows, or keeps the last few.
        """
        read = _order if has_orders else _nothing if self._is_run_again else _memory
        seen, pairs = {}, []
        for owner in _samplers(self._root) if self._is_sampler else _objects(self._root):
            one, now = self._seen.get(id(owner)), _values(owner, read)
            if one is not None and one.owner() is owner:
                pairs.append((one, one.now))
                one.now = now
            else:
                try:
                    one = _Object(weakref.ref(owner), now, now)
                except TypeError:  # it has slots, and no place for a reference
                    continue
            seen[id(owner)] = one
        self._seen = seen
        return pairs


class LoaderCounters:
    """The counters in a loader's dataset, its collate function and its sampler."""

    def __init__(self, roots: Mapping[str, object], *, is_stream: bool) -> None:
        """`roots`: the parts of the loader that run in this process, by role."""
        self._here = [Counters(role, root, is_run_again=is_stream) for role, root in roots.items()]
        self._found: dict[str, Counter] = {}
        """Counters that no checkpoint has, by name."""
        self._reported: set[str] = set()

    def begin(self) -> None:
        """Look before a stream is iterated: many count their epochs there."""
        for counters in self._here:
            counters.begin()

    def before_batch(self, number: int) -> None:
        """Look before the batch of a number."""
        for counters in self._here:
            counters.before_batch(number)

    def after_batch(self, number: int) -> None:
        """Look after the batch of a number."""
        for counters in self._here:
            counters.after_batch(number)

    def epoch_ended(self) -> None:
        """Look after an epoch's last batch."""
        for counters in self._here:
            counters.epoch_ended()

    def note(self, found: Iterable[Counter]) -> None:
        """Note counters that a worker has found."""
        for counter in found:
            self._found.setdefault(counter.name, counter)

    def new(
        self,
        sampler: Counters,
        keeps: Callable[[Any], bool],
        restored: Collection[str],
    ) -> str | None:
        """Return a warning of the counters that were found since the last call.

        `is_needed`: whether something may depend on an attribute of this name; `restored`: the roles of
        objects that something else restores.
        """
        self.note(one for counters in self._here for one in counters.new())
        self.note(sampler.new(keeps))
        new = [counter for name, counter in self._found.items() if name not in self._reported]
        new = [counter for counter in new if counter.role not in restored]
        self._reported.update(self._found)
        return " ".join(str(one) for one in new) or None


def _samplers(root: object) -> Iterator[object]:
    """Yield a sampler, and the one inside it, if they are the user's."""
    # Not all objects they lead to: a dataset or a model changes for other reasons.
    for one in (root, getattr(root, "sampler", None)):
        if _has_state(one):
            return
        if code_names.is_own(str(type(one).__module__)):
            yield one


def _objects(root: object) -> Iterator[object]:
    """Yield the user's objects that hang off an object, except those with a state_dict."""
    saved: set[int] = set()
    for one in search.inside(root, object):
        if id(one) in saved or isinstance(one, type):
            continue
        if _has_state(one):
            saved.update(id(inner) for inner in search.inside(one, object))
        elif code_names.is_own(str(type(one).__module__)):
            yield one


def _has_state(value: object) -> bool:
    # Ask the class: an object's own __getattr__ may do anything.
    return hasattr(type(value), "state_dict") and hasattr(type(value), "load_state_dict")


def _values(owner: object, read: Callable[[object], _Order | None]) -> _Values:
    """Return the attributes that are numbers, and what `read` has of the others."""
    found: dict[str, _Value] = {}
    # A class may have the initial values of its objects.
    for name, value in [*vars(type(owner)).items(), *getattr(owner, "__dict__", {}).items()]:
        number = value.item() if isinstance(value, np.generic) else value
        if type(number) in _NUMBERS and number == number:
            found[name] = number
        elif name[:2] != "__" and (order := read(value)) is not None:
            found[name] = order
        else:
            found.pop(name, None)
    return found


def _nothing(value: object) -> None:
    return None


def _memory(value: object) -> _Order | None:
    # A list of one length may be a cache that is filled.
    if isinstance(value, list):
        return _Order(id(value), len(value), 0)
    return _Order(id(value), len(value), hash(tuple(map(id, value)))) if isinstance(value, deque) else None


def _order(value: object) -> _Order | None:
    if isinstance(value, torch.Tensor):
        is_readable = value.device.type == "cpu" and value.layout is torch.strided
        # View it as bytes: NumPy lacks some of torch's dtypes.
        array = value.detach().view(torch.uint8).numpy() if is_readable and value.is_contiguous() else None
    else:
        array = value if isinstance(value, np.ndarray) else None
    if array is not None and array.ndim and array.size <= _LONGEST:
        return _Order(id(value), len(array), hash(array.tobytes()))
    if isinstance(value, list) and len(value) <= _LONGEST:
        # A shuffle moves the same objects, so their identities are enough.
        return _Order(id(value), len(value), hash(tuple(map(id, value))))
    return None


def _orders(values: _Values) -> set[str]:
    return {name for name, value in values.items() if isinstance(value, _Order)}


def _changed(before: _Values, now: _Values) -> set[str]:
    return {name for name, value in now.items() if before.get(name) != value}


def _is_step(before: _Value, now: _Value) -> bool:
    return type(before) is int and type(now) is int and now == before + 1


def _shuffled(before: _Values, now: _Values) -> set[str]:
    """Return the orders that have changed in place: a new one says nothing about the next."""
    pairs = ((name, before.get(name), now[name]) for name in _changed(before, now))
    return {
        name
        for name, then, order in pairs
        if isinstance(then, _Order) and isinstance(order, _Order) and then[:2] == order[:2]
    }


def _described(value: _Value) -> str:
    return str(value) if type(value) in _NUMBERS else "what the script gives it"
