"""States of the user's own objects, kept as bytes."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch

from ...errors import CannotStore
from ...files import codec


def freeze(state: Any) -> Any:
    """Return a state as immutable bytes, or the CannotStore error if it cannot be stored.

    The error is raised only if a checkpoint needs the state.
    """
    try:
        files = codec.to_files({"rank": codec.encode({"state": state})})
    except CannotStore as exc:
        return exc
    return {name: bytes(content) for name, content in files.items()}


def thaw(frozen: Any) -> Any:
    """Return the state that was frozen."""
    if isinstance(frozen, CannotStore):
        raise frozen
    files = {name: memoryview(bytearray(content)) for name, content in frozen.items()}
    tree = codec.from_files(files)["rank"]
    return codec.decode(tree.json, tree.tensors)["state"]


def is_stateful(value: object) -> bool:
    """Whether it has `state_dict()` and `load_state_dict()`."""
    if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
        return False
    # MosaicML's datasets need the number of trained samples as an argument: only their loader knows it.
    with contextlib.suppress(ValueError):
        try:
            inspect.signature(value.state_dict).bind()
        except TypeError:
            return False
    return True


def states_of(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of the parts that have one; a model's may be large, and seldom changes."""
    return {
        name: part.state_dict()
        for name, part in parts.items()
        if is_stateful(part) and (name == "dataset" or not isinstance(part, torch.nn.Module))
    }
