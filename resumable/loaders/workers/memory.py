"""Finds what a dataset or a collate function keeps from fetch to fetch in a worker: no checkpoint has it."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch

from ...objects import contents, kinds, own, walks
from ...objects.kinds import Step
from ...objects.walks import Node
from .states import is_stateful

_LOOKS = 4
"""After so many fetches."""
_MOST_OBJECTS = 1024
_MOST_BYTES = 1 << 20
_ITEM = 64
"""An item of a list takes as long as so many bytes of an array."""
_SIZED: tuple[Any, ...] = (dict, list, deque, tuple, set, frozenset)
_OWNERS = {"object", "library", "network", "function", "method", "partial"}
_DATA = {"array", "tensor", "buffer", "count"}
_LEAVES = {"class", "module", "generator"}

Signature = Mapping[tuple[str, str], Hashable]
"""Values by the attribute that leads to them, and by their own path."""


class Memory:
    """Compares what objects hold after each of a worker's first fetches."""

    def __init__(self, roots: Mapping[str, object]) -> None:
        self._roots = roots
        self._before = signature(roots)
        self._looks = 0
        self._changed = set[str]()

    def after_fetch(self) -> list[str]:
        """Return the attributes that have changed in this fetch and in the one before."""
        if self._looks == _LOOKS:
            return []
        self._looks += 1
        before, self._before = self._before, signature(self._roots)
        # A new value loses nothing: it is a file opened late, or an item of a cache.
        changed = {key[0] for key, now in self._before.items() if before.get(key, now) != now}
        before_too, self._changed = self._changed, changed
        return sorted(changed & before_too)


def warning(loader: str, attribute: str) -> str:
    """Return the warning of an attribute that `after_fetch` returned in a worker of this loader."""
    role = attribute.partition(".")[0]
    return (
        f"{loader}.{attribute} changes as batches are loaded in a worker, and is in no checkpoint: a resume "
        f"begins it again. If what is loaded depends on it, give the {role} state_dict() and "
        "load_state_dict() with it. [R22]"
    )


def signature(roots: Mapping[str, object]) -> Signature:
    """Return the values that objects hold, but for what is large, and what has its state in checkpoints.

    >>> from types import SimpleNamespace
    >>> signature({"dataset": SimpleNamespace(count=3, file=None)})
    {('dataset.count', 'dataset.count'): (<class 'int'>, 3)}
    """
    saved = {id(one) for one in roots.values() if is_stateful(one)}
    found, looked_into, left = dict[tuple[str, str], Hashable](), set[int](), _MOST_BYTES
    # The class of a tensor may have code of its own behind every attribute.
    with torch._C.DisableTorchFunctionSubclass():
        nodes = walks.walk(
            [(Step("", role), one) for role, one in roots.items()],
            lambda node: id(node.value) not in looked_into,
        )
        for node in islice(nodes, _MOST_OBJECTS):
            if node.kind in _LEAVES or id(node.value) in saved:
                continue
            is_small = (size := _bytes(node)) <= left
            if is_small:
                left -= size
                looked_into.add(id(node.value))
            if not _is_of_a_library(node):
                attribute = str(_attribute(node))
                for step, value in _values(node, is_small):
                    path = f"{node}{step}"
                    found[path if node.kind in _OWNERS and step else attribute, path] = value
    return found


def _attribute(node: Node) -> Node:
    """Return what an object holds, itself or in containers: the attribute that leads to this one."""
    while node.owner is not None and not {node.kind, node.owner.kind} & _OWNERS:
        node = node.owner
    return node


def _is_of_a_library(node: Node) -> bool:
    """Whether an object of a library holds it: most of what these change is caches."""
    holder = node if node.kind in _OWNERS else _attribute(node).owner
    if holder is None or holder.kind not in ("library", "function"):
        return False
    return holder.kind == "library" or not own.is_own_code(holder.value.__code__)


def _values(node: Node, is_small: bool) -> Iterator[tuple[Step | str, Hashable]]:
    """Yield the values that an object itself holds, each with its step, or in one."""
    value, kind = node.value, node.kind
    if kind in _DATA and is_small:
        yield "", kinds.content(value).whole
    elif issubclass(type(value), dict):
        # By key, without the length: one that grows is a cache.
        held = kinds.items_of(value) if is_small else []
        entries = [(Step("key", key), one) for key, one in held if _is_value(key)]
        yield from ((step, contents.mark(one)) for step, one in entries if _is_value(one))
    elif length := _length(value):
        yield "", (length, _digest(value) if is_small else b"")
    if kind in _OWNERS:
        attributes = kinds.look_into(value).steps()
        yield from ((step, contents.mark(one)) for step, one in attributes if _is_value(one))


def _is_value(value: object) -> bool:
    # None is the place of a value that comes later.
    return value is not None and contents.is_atom(value)


def _digest(value: Any) -> bytes:
    """Return a digest of the values in a container; none if it has places for those that come later."""
    held = kinds.items_of(value)
    if any(one is None for one in held):
        return b""
    return contents.digest([one if contents.is_atom(one) else None for one in held])


def _length(value: Any) -> int:
    base = next((one for one in _SIZED if issubclass(type(value), one)), None)
    return 0 if base is None else base.__len__(value)


def _bytes(node: Node) -> int:
    value: Any = node.value
    if node.kind == "tensor":
        is_plain = value.is_cpu and value.layout is torch.strided and not value.is_nested
        return value.nbytes if is_plain else _MOST_BYTES + 1
    if node.kind == "array":
        return _MOST_BYTES + 1 if issubclass(type(value), np.memmap) else value.nbytes
    return memoryview(value).nbytes if node.kind == "buffer" else _ITEM * _length(value)
