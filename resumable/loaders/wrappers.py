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
_MAKERS = {
    **dict.fromkeys([f"{module}._FabricDataLoader" for module in _FABRIC], "fabric"),
    "accelerate.data_loader.DataLoaderAdapter": "accelerator",
}
"""The makers of loaders that count their epochs from 0 in every process."""


def inside(live: Any) -> Any:
    """Return the object inside wrappers of Accelerate or Fabric, or the object itself."""
    while attribute := attribute_of(type(live)):
        live = getattr(live, attribute)
    return live


def _attribute(kind: type) -> str | None:
    return _found(_INSIDE, kind.__mro__)


attribute_of: Callable[[Any], str | None] = cache(_attribute)
"""Returns the attribute in which objects of a class hold a wrapped one; None if it is no wrapper."""


def maker_of(loader: Any) -> str | None:
    """Return the usual name of the object that made the loader (fabric, accelerator); None for others."""
    # Look at type(): by its __class__ it claims to be torch's.
    return _found(_MAKERS, type(loader).__mro__)


def _found(table: dict[str, str], kinds: tuple[type, ...]) -> str | None:
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds]
    return next((table[name] for name in names if name in table), None)
