"""Unwraps the parts of a training that Accelerate, Lightning Fabric or torch itself has wrapped."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

_FABRIC = ("lightning_fabric.wrappers", "lightning.fabric.wrappers")
_TORCH = "torch.distributed.algorithms._checkpoint"
_INSIDE = {
    **dict.fromkeys([f"{module}._FabricModule" for module in _FABRIC], "_forward_module"),
    **dict.fromkeys([f"{module}._FabricOptimizer" for module in _FABRIC], "_optimizer"),
    f"{_TORCH}.checkpoint_wrapper.CheckpointWrapper": "_checkpoint_wrapped_module",
    "accelerate.optimizer.AcceleratedOptimizer": "optimizer",
    "accelerate.scheduler.AcceleratedScheduler": "scheduler",
}
"""The attribute that holds the wrapped object. By name: importing these packages takes seconds."""


def inside(live: Any) -> Any:
    """Return the object inside wrappers of Accelerate or Fabric, or the object itself."""
    while attribute := attribute_of(type(live)):
        live = getattr(live, attribute)
    return live


def _attribute(kind: type) -> str | None:
    names = [f"{one.__module__}.{one.__qualname__}" for one in kind.__mro__]
    return next((_INSIDE[name] for name in names if name in _INSIDE), None)


attribute_of: Callable[[Any], str | None] = cache(_attribute)
"""Returns the attribute in which objects of a class hold a wrapped one; None if it is no wrapper."""
