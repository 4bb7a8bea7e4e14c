"""Digests of containers and of objects of libraries, which can be compared between processes."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn

from ..trace import digest
from . import scopes
from .fixes import Nth
from .registered import TENSORS, Held

WIDEST = 256
_DEEPEST = 12
_LARGE = 4 << 20
"""How many numbers of a larger tensor are read, evenly spread over it."""

NUMBERS = (bool, int, float, complex)
TEXTS = (str, bytes)
CONTAINERS = (list, tuple, dict, set, frozenset, deque)
BARE = (types.FunctionType, types.MethodType, types.ModuleType, types.BuiltinFunctionType)


def of_tensor(value: Any) -> str:
    """Return a digest of a tensor or an array; of a very large one, of some of its numbers."""
    size = value.size if type(value) is np.ndarray else value.numel()
    return digest.of(value, _LARGE if size > _LARGE else None)


def is_of_objects(value: Any) -> bool:
    """Whether a NumPy array contains objects."""
    return bool(value.dtype.hasobject)


class Inside:
    """The digest of a value, and the objects inside it, which are examined separately."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self._pieces: list[str] = []
        self.tensors = 0
        self.is_told = self.has_held = False
        self.objects: list[tuple[tuple[Any, ...], Any]] = []
        self.kept: list[Any] = []
        """The containers in it, which are part of its digest."""

    def hexdigest(self) -> str:
        """Return the digest of everything that was added."""
        return digest.of(self._pieces)

    def add(self, value: Any, path: tuple[Any, ...], depth: int) -> None:
        """Add the value at a path inside it."""
        kind = type(value)
        kinds = kind.__mro__
        if kind in NUMBERS or kind in TEXTS or value is None or np.generic in kinds:
            self._tell(path, digest.of(value))
        elif kind in TENSORS or (kind is np.ndarray and not is_of_objects(value)):
            if kind is not np.ndarray and self._held.has_tensor(value):
                self.has_held = True
                return
            self.tensors += 1
            self._tell(path, of_tensor(value))
        elif (kind is np.ndarray or any(one in kinds for one in CONTAINERS)) and depth < _DEEPEST:
            if (path and self._held.has(value)) or any(one is value for one in self.kept):
                self.has_held = True
                return
            self.kept.append(value)
            self._add_items(value, path, depth)
        elif depth == 0:
            for name, inner in scopes.attributes(value).items():
                if not self._held.has(inner) and _is_own_state(name, inner):
                    self.add(inner, (name,), 1)
        elif len(self.objects) < WIDEST:
            self.objects.append((path, value))

    def _tell(self, path: tuple[Any, ...], told: str) -> None:
        self.is_told = True
        self._pieces.append(f"{path} {told}")

    def _add_items(self, value: Any, path: tuple[Any, ...], depth: int) -> None:
        length, items = _items(value)
        self._pieces.append(f"{path} {length}")
        if set in type(value).__mro__ or frozenset in type(value).__mro__:
            # Their order changes from process to process.
            plain = [digest.of(inner) for _, inner in items if type(inner) in (*NUMBERS, *TEXTS)]
            self._tell(path, digest.of(sorted(plain)))
            return
        for number, (key, inner) in enumerate(items):
            named = key if _is_plain(key) else Nth(number, type(key).__name__)
            self.add(inner, (*path, named), depth + 1)


def _is_own_state(name: str, value: object) -> bool:
    kinds = type(value).__mro__
    is_others = nn.Module in kinds or torch.optim.Optimizer in kinds or type in kinds or type(value) in BARE
    return not is_others and name != "_per_optimizer_states"


def _is_plain(key: object) -> bool:
    parts = key if type(key) is tuple else (key,)
    return all(part is None or type(part) in NUMBERS or type(part) in TEXTS for part in parts)


def _items(value: Any) -> tuple[int, list[tuple[Any, Any]]]:
    """Return the length of a container, and the items that are examined: not all of a long one."""
    kinds = type(value).__mro__
    if dict in kinds:
        length = dict.__len__(value)
        if length <= WIDEST:
            return length, [*dict.copy(value).items()]
        newest = [*islice(reversed(dict.keys(value)), WIDEST)]
        return length, [(key, dict.get(value, key)) for key in newest]
    if set in kinds or frozenset in kinds:
        whole: Any = set if set in kinds else frozenset
        length = whole.__len__(value)
        return length, [*enumerate([*whole.__iter__(value)] if length <= WIDEST else [])]
    if np.ndarray in kinds:
        return _items(value.reshape(-1).tolist())
    base: Any = next(one for one in (list, tuple, deque) if one in kinds)
    length = base.__len__(value)
    ends = {*range(min(length, WIDEST // 2)), *range(max(0, length - WIDEST // 2), length)}
    # The middle of a deque is slow to reach.
    spread = () if base is deque else range(0, length, max(1, length // WIDEST))
    return length, [(place, base.__getitem__(value, place)) for place in sorted({*ends, *spread})]


def modules_of(root: Any) -> list[Any]:
    """Return a module and those inside it, without calling any code of theirs."""
    found, waiting = {id(root): root}, [root]
    while waiting:
        modules = waiting.pop().__dict__.get("_modules")
        for inner in dict.copy(modules).values() if isinstance(modules, dict) else ():
            if inner is not None and id(inner) not in found:
                found[id(inner)] = inner
                waiting.append(inner)
    return [*found.values()]


def tensors_of(root: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of a module and of those inside it, by a name."""
    for number, module in enumerate(modules_of(root)):
        for group in ("_parameters", "_buffers"):
            for name, tensor in dict(module.__dict__.get(group, {})).items():
                if tensor is not None:
                    yield f"{number}.{name}", tensor
