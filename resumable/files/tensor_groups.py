"""Groups of tensors: dicts that are encoded once and used again until one of their tensors moves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from . import sharded_tensor
from .sharded_tensor import is_sharded, is_sharded_kind
from .strict_json import Json

_PLAIN = {torch.Tensor, torch.nn.Parameter}
_COMPLEX = {torch.complex32, torch.complex64, torch.complex128}


class Facts(NamedTuple):
    """Everything that the encoding of a dict of plain tensors depends on."""

    keys: list[Any]
    places: list[int]
    dtypes: list[torch.dtype]
    sizes: list[Any]
    strides: list[Any]
    devices: list[torch.device]
    """Only if a tensor has no bytes: otherwise its address identifies the device."""
    placings: list[Any]


def facts_of(values: Mapping[Any, Any]) -> Facts | None:
    """Return what the encoding depends on, by one call for all tensors; None where it depends on more."""
    tensors = [*values.values()]
    placings = []
    # By the kinds: to ask each of ten thousand tensors would delay the training.
    if not (kinds := {*map(type, tensors)}) <= _PLAIN:
        if not all(kind in _PLAIN or is_sharded_kind(kind) for kind in kinds):
            return None
        placings = [sharded_tensor.placing(one) for one in tensors if is_sharded(one)]
        tensors = [*map(sharded_tensor.local, tensors)]
    try:
        places = [*map(torch.Tensor.data_ptr, tensors)]
        dtypes = [*map(attrgetter("dtype"), tensors)]
        if any(map(torch.Tensor.is_neg, tensors)) or not _COMPLEX.isdisjoint(dtypes):
            return None
        sizes, strides = [*map(torch.Tensor.size, tensors)], [*map(torch.Tensor.stride, tensors)]
        devices = [tensor.device for tensor in tensors] if 0 in places else []
        return Facts([*values], places, dtypes, sizes, strides, devices, placings)
    except RuntimeError:
        # Sparse and nested tensors have no address.
        return None


Guard = Callable[[list[Any]], bool]


def guard_of(tensors: list[Any]) -> Guard | None:
    """Return a function that compares as many tensors with these; None if there is no quick way to do it.

    It returns True only if all have the same class, dtype, device, shape, strides and flags, such as
    `requires_grad` and the negative bit. Their addresses and values are not compared.
    """
    # torch.compile checks its inputs by this class. Asking each tensor takes twice as long.
    guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    if not hasattr(guards, "TensorGuards") or not _are_plain(tensors):
        return None
    try:
        check = guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    except TypeError:
        return None
    return lambda now: _are_plain(now) and bool(check(*now))


def _are_plain(values: list[Any]) -> bool:
    # Asked for its strides, a nested tensor would abort the process.
    return {*map(type, values)} <= _PLAIN and not any(map(attrgetter("is_nested"), values))


dumps: Callable[[Json], str] = partial(json.dumps, allow_nan=False, separators=(",", ":"))
"""Returns a tree as text."""


@dataclass(slots=True, eq=False)
class Group:
    """An encoded dict of tensors.

    Encoding ten thousand tensors one by one would delay the training by a tenth of a second.
    """

    facts: Facts
    json: dict[str, Json]
    stored: dict[str, str]
    """The key in the dict, by the name in the file."""
    aliases: dict[str, str]
    places: frozenset[int]
    _guard: Guard | None = None
    _text: str | None = None

    def is_of(self, values: Mapping[Any, Any]) -> bool:
        """Return whether a dict surely has the same facts, which is found out in few calls."""
        if self._guard is None or [*values] != self.facts.keys:
            return False
        tensors = [*values.values()]
        return self._guard(tensors) and [*map(torch.Tensor.data_ptr, tensors)] == self.facts.places

    def guard(self, values: Mapping[str, torch.Tensor]) -> None:
        """Let `is_of` know these tensors, which have the same facts."""
        self._guard = guard_of([*values.values()])

    def text(self) -> str:
        """Return the JSON as text, made once: making it keeps all other threads waiting."""
        if self._text is None:
            self._text = dumps(self.json)
        return self._text

    def take(self, values: Mapping[str, torch.Tensor]) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the tensors of a dict with the same facts, by their names in the file."""
        if len(self.stored) == len(values):
            # In the order of the dict.
            return zip(self.stored, values.values(), strict=True)
        return zip(self.stored, map(values.__getitem__, self.stored.values()), strict=True)
