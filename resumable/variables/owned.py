"""What other parts of a checkpoint restore: the script's variables refer to it by its name there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ..files import sharded_tensor

Loaders = Mapping[str, Mapping[str, Any]]


class Owned:
    """The objects that are restored by something else, each with a name."""

    def __init__(
        self,
        named: Iterable[tuple[str, Any]] = (),
        covered: Iterable[tuple[Any, Collection[str]]] = (),
        loaders: Loaders = MappingProxyType({}),
    ) -> None:
        """`covered`: objects of which only some attributes are restored by something else."""
        self.loaders = loaders
        """Behind each loader the objects that a script may change, by the loader's name."""
        self._covered = {id(value): (value, names) for value, names in covered}
        self._names: dict[int, str] = {}
        self._objects: dict[str, Any] = {}
        for name, value in named:
            self._names.setdefault(id(value), name)
            self._objects.setdefault(name, value)

    @cached_property
    def _memory(self) -> dict[int, str]:
        """The tensors by where their memory begins."""
        tensors = [pair for pair in self._objects.items() if issubclass(type(pair[1]), torch.Tensor)]
        return {place: name for name, one in reversed(tensors) if (place := _memory(one))}

    def name(self, value: Any) -> str | None:
        """Return the name of an object that is owned."""
        return self._names.get(id(value))

    def covered(self, value: Any) -> Collection[str] | None:
        """Return the attributes of an object that something else restores; None if it is no such object."""
        found = self._covered.get(id(value))
        return found and found[1]

    def object(self, name: str) -> Any:
        """Return the object of a name; KeyError if there is none."""
        return self._objects[name]

    def base(self, value: Any) -> str | None:
        """Return the name of a tensor that shares its memory with another one, which has a name."""
        return self._memory.get(_memory(value)) if issubclass(type(value), torch.Tensor) else None


def _memory(tensor: torch.Tensor) -> int:
    if is_lazy(tensor):
        return 0
    here = sharded_tensor.local(tensor)
    if here.layout is not torch.strided or here.is_meta:
        return 0
    return here.untyped_storage().data_ptr()
