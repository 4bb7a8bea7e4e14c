"""Tensors that torch shards over the processes (DTensor), and the part of one that is in this process."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def is_sharded(value: Any) -> bool:
    """Whether a tensor is sharded over processes, or replicated by the same means."""
    return isinstance(value, Tensor) and is_sharded_kind(type(value))


def _is_sharded_kind(kind: Any) -> bool:
    # By name: importing it takes longer than everything else where nothing is sharded.
    return any(
        one.__name__ == "DTensor" and one.__module__.startswith("torch.distributed.") for one in kind.__mro__
    )


is_sharded_kind: Callable[[Any], bool] = lru_cache(_is_sharded_kind)
"""Returns whether a class is that of sharded tensors."""


def local(tensor: Any) -> Tensor:
    """Return the part of a sharded tensor that is in this process, itself and no copy; others as they are."""
    if not is_sharded_kind(type(tensor)):
        return tensor  # type: ignore[no-any-return]
    with torch.no_grad():
        part: Tensor = tensor.to_local()
        return part


def place(tensor: Tensor) -> int:
    """Return the address of the part of a tensor that is in this process."""
    return local(tensor).data_ptr()


def identity(tensor: Tensor) -> tuple[Any, ...]:
    """Return what only tied tensors have in common: their memory, or if nothing is here, the object."""
    here = local(tensor)
    return (here.data_ptr() if here.numel() else id(tensor), tensor.shape, here.stride(), here.device)


def placing(tensor: Any) -> tuple[Any, ...]:
    """Return how a sharded tensor is divided, and over which processes."""
    return tensor.shape, tensor.placements, tensor.device_mesh


def size(tensor: Tensor) -> int:
    """Return the bytes of a tensor that are in this process."""
    return local(tensor).nbytes
