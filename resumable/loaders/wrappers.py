"""What Accelerate and Lightning Fabric wrap the parts of a training in."""

from __future__ import annotations

from functools import cache
from typing import Any

_FABRIC = ("lightning_fabric.wrappers", "lightning.fabric.wrappers")
_INSIDE = {
    **dict.fromkeys([f"{module}._FabricModule" for module in _FABRIC], "_forward_module"),
    **dict.fromkeys([f"{module}._FabricOptimizer" for module in _FABRIC], "_optimizer"),
    "accelerate.optimizer.AcceleratedOptimizer": "optimizer",
    "accelerate.scheduler.AcceleratedScheduler": "scheduler",
}
"""Where each keeps what it wraps. By name: to import them for that would take seconds."""
_MAKERS = {
    **dict.fromkeys([f"{module}._FabricDataLoader" for module in _FABRIC], "fabric"),
    "accelerate.data_loader.DataLoaderAdapter": "accelerator",
}
"""Who makes each loader that counts its epochs from 0 in every process."""


def inside(live: Any) -> Any:
    """Return what Accelerate or Fabric has wrapped, or the object itself."""
    while attribute := attribute_of(live):
        live = getattr(live, attribute)
    return live


def attribute_of(live: Any) -> str | None:
    """Return the attribute in which a wrapper keeps what it wraps; None for what is none."""
    return _attribute(type(live).__mro__)


@cache
def _attribute(kinds: tuple[type, ...]) -> str | None:
    return _found(_INSIDE, kinds)


def maker_of(loader: Any) -> str | None:
    """Return what scripts call the object whose loader this is (fabric, accelerator); None for others."""
    # (its class, and not what it says of itself: that it is torch's)
    return _found(_MAKERS, type(loader).__mro__)


def _found(table: dict[str, str], kinds: tuple[type, ...]) -> str | None:
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds]
    return next((table[name] for name in names if name in table), None)
