"""Finds what a loop of the script changes in the data that a loader loads from: no checkpoint has it."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from ...loaders.generators import code_names, search
from . import kept_attributes, loops
from .events import Name, owner_of, root_of
from .loops import Running

_WIDEST = 256
_MOST = 1000
"""The most objects that a search passes."""
_DATA = (torch.Tensor, np.ndarray, list)


def changed_in(function: Running, loaders: Collection[Any]) -> dict[Name, Any]:
    """Return what the loops of a function may have changed in what these loaders load from, by name."""
    found = dict[Name, Any]()

    @cache
    def objects() -> dict[int, Any]:
        return {id(one): one for one in _objects(loaders)}

    @cache
    def code() -> list[FunctionType]:
        return [one for loader in loaders for one in search.inside_code(_root(loader))]

    # Of data that grow the loader itself tells.
    names = {owner_of(name) for name in function.carried.placed if not name.endswith("[-1]")}
    for name in names:
        way = [*function.way_to(name).values()]
        if not way or id(way[0]) not in objects() or any(hasattr(type(one), "state_dict") for one in way):
            continue
        attribute = name[len(root_of(name)) + 1 :]
        is_own = code_names.is_own(str(type(way[0]).__module__))
        if not (attribute and is_own) or kept_attributes.is_read(attribute, code()):
            found[name] = way[-1]
    return found


def _objects(loaders: Collection[Any]) -> list[Any]:
    """Return the loaders, and what hangs off them, if it may be data."""
    found, waiting, seen = list[Any](), deque[Any](loaders), set[int]()
    while waiting and len(found) < _MOST:
        value = waiting.popleft()
        kind = type(value)
        is_data = issubclass(kind, _DATA)
        is_known = issubclass(kind, (DataLoader, Dataset, Sampler)) or code_names.is_own(str(kind.__module__))
        if id(value) in seen or not (is_data or is_known):
            continue
        seen.add(id(value))
        found.append(value)
        held = [] if is_data else [*loops.attributes(value).values()]
        several = [one[:_WIDEST] for one in held if type(one) in (list, tuple)]
        waiting += [*held, *(one for some in several for one in some)]
    return found


def _root(loader: Any) -> Any:
    names = ("dataset", "sampler", "batch_sampler", "collate_fn")
    return {name: getattr(loader, name) for name in names} if isinstance(loader, DataLoader) else loader
