"""Knows what the parts hold: objects by identity, tensors by memory, values by content."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from ..files import codec
from ..files.strict_json import Json
from ..loaders import wrappers
from ..loaders.generators import search
from ..parts.models import ModulePart
from ..parts.part import Part, Trees
from ..parts.parts import Parts
from ..position.loader_position import LoaderPosition
from ..trace import digest
from . import scopes

_DEEPEST = 8
_WIDEST = 256
TENSORS = (Tensor, nn.Parameter, nn.Buffer) if hasattr(nn, "Buffer") else (Tensor, nn.Parameter)
"""Classes of tensors without code of the user."""


class Held:
    """What the parts hold at one boundary."""

    def __init__(self, parts: Parts, trees: Trees) -> None:
        self._trees = trees
        self._ids: dict[int, object] = {}
        self._places: set[int] = set()
        self._saved: dict[str, tuple[set[str], set[str]]] = {}
        self.slots: dict[str, int] = {}
        """How many parts each argument of RunState has."""
        for part in parts.all:
            slot = part.name.partition(".")[0]
            self.slots[slot] = self.slots.get(slot, 0) + 1
            self._hold(part)
        for tree in trees.values():
            for tensor in tree.tensors.values():
                self._hold_tensor(tensor)
        self.optimized = {
            id(parameter)
            for part in parts.optimizers
            for group in part.live.param_groups
            for parameter in group["params"]
        }
        """The ids of the parameters that the given optimizers train."""

    def has(self, value: object) -> bool:
        """Whether a part holds this very object."""
        return id(value) in self._ids

    def has_tensor(self, tensor: Tensor) -> bool:
        """Whether a part holds the memory of a tensor, or it is a gradient of one."""
        return _place(tensor) in self._places

    def saves(self, part: str, attribute: str, values: AbstractSet[str]) -> bool:
        """Whether a part has saved an attribute: under its name, or something with one of these digests."""
        names, saved = self._saved_by(part)
        # A loader's position has many small numbers, which may equal the attribute by chance.
        is_by_value = not part.startswith("loader")
        return attribute.lstrip("_") in names or (is_by_value and not values.isdisjoint(saved))

    def _saved_by(self, part: str) -> tuple[set[str], set[str]]:
        if part not in self._saved:
            names: set[str] = set()
            values: set[str] = set()
            for tree in self._trees.values():
                if part in tree.json:
                    _note(codec.decode(_told(tree.json[part]), tree.tensors), names, values, 0)
            self._saved[part] = names, values
        return self._saved[part]

    def _hold(self, part: Part) -> None:
        for live in _wrapped(part):
            self._keep(live)
        if isinstance(part, ModulePart):
            for module in part.live.modules():
                self._keep(module)
            for tensor in chain(part.live.parameters(), part.live.buffers()):
                self._hold_tensor(tensor)
                if tensor.grad is not None:
                    self._hold_tensor(tensor.grad)
        elif isinstance(part.live, LoaderPosition):
            self._hold_loader(part.live)
        elif part.kind in ("container", "dataclass"):
            self._hold_inside(part.live, 0)
        elif isinstance(part.live, LRScheduler):
            for inner in getattr(part.live, "_schedulers", ()):
                self._keep(inner)
        elif hasattr(part.live, "param_groups"):
            # The script may have made these dicts and still hold them.
            self._hold_inside(part.live.param_groups, 0)

    def _hold_loader(self, at: LoaderPosition) -> None:
        self._keep(at.source.loader)
        if at.prepared:
            self._keep(at.prepared.loader)
        for generator in search.find(at.source.root()).values():
            self._keep(generator)

    def _hold_inside(self, value: object, depth: int) -> None:
        self._keep(value)
        if depth < _DEEPEST:
            for inner in _inside(value):
                self._hold_inside(inner, depth + 1)

    def _hold_tensor(self, tensor: Tensor) -> None:
        if place := _place(tensor):
            self._places.add(place)

    def _keep(self, value: object) -> None:
        # Keep the object too: another could get the id of one that is gone.
        self._ids[id(value)] = value


def _wrapped(part: Part) -> Iterator[object]:
    yield part.live
    live = getattr(part, "_wrapped", None)
    while live is not None and live is not part.live:
        yield live
        name = wrappers.attribute_of(type(live)) or (
            "module" if "module" in vars(live).get("_modules", ()) else ""
        )
        live = getattr(live, name, None) if name else None


def _inside(value: object) -> list[object]:
    kinds = type(value).__mro__
    items: list[object]
    if dict in kinds:
        items = [*dict.copy(value).values()]  # type: ignore[arg-type]
    elif list in kinds:
        items = list.copy(value)  # type: ignore[arg-type]
    elif hasattr(type(value), "__dataclass_fields__"):
        items = [*scopes.attributes(value).values()]
    else:
        return []
    return [one for one in items if type(one) not in _PLAIN] if len(items) <= _WIDEST else []


_PLAIN = (bool, int, float, complex, str, bytes, type(None), *TENSORS)


def _place(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a sparse tensor, or one without memory
        return 0


def _told(json: Json) -> Json:
    """Return the state that a part's own code gives; for a module, its state without tensors."""
    return json["values"] if type(json) is dict and {"values", "frozen"} <= json.keys() else json


def _note(value: Any, names: set[str], values: set[str], depth: int) -> None:
    if type(value) is bool or value is None or depth > _DEEPEST:
        return
    values.add(digest.of(value, digest.MOST))
    if isinstance(value, Mapping):
        names.update(str(key).lstrip("_") for key in value)
        for inner in value.values():
            _note(inner, names, values, depth + 1)
    elif isinstance(value, (list, tuple)) and len(value) <= _WIDEST:
        for inner in value:
            _note(inner, names, values, depth + 1)
