"""Refuses objects that are sharded over the processes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import Tensor

from ..errors import Unsupported


def refuse_split(name: str, value: Any) -> None:
    """Raise Unsupported for an object that is sharded over the processes."""
    found = _splitter(type(value).__mro__)
    attributes = getattr(value, "__dict__", ())
    for mark, kind in (_MARKS_OF_TENSORS if isinstance(value, Tensor) else _MARKS).items():
        if mark in attributes:
            found = found or kind
    if found:
        is_engine = found == "DeepSpeed"
        tool = "the engine's own save_checkpoint" if is_engine else "torch.distributed.checkpoint"
        raise Unsupported(
            f"{name} is split over the processes ({found}); this version saves only objects that each "
            "process holds as a whole.",
            fix=f"use DistributedDataParallel where the model fits on each device, or save with {tool}.",
        )


@lru_cache
def _splitter(kinds: tuple[type, ...]) -> str | None:
    # By name, because importing these libraries only to compare types would take seconds.
    modules = [f"{kind.__module__}." for kind in kinds]
    starts = [start for start in _SPLITTERS for module in modules if module.startswith(start)]
    return _SPLITTERS[starts[0]] if starts else None


_SPLITTERS = {
    "torch.distributed.fsdp.": "FSDP",
    "torch.distributed.tensor.": "DTensor",
    "torch.distributed._shard.": "ShardedTensor",
    "torch.distributed.optim.zero_redundancy_optimizer.": "ZeroRedundancyOptimizer",
    # DeepSpeed's kernels and optimizers for one device, in deepspeed.ops, split nothing.
    "deepspeed.runtime.": "DeepSpeed",
    "deepspeed.inference.": "DeepSpeed",
    "deepspeed.moe.": "DeepSpeed",
}
_MARKS = {"_is_fsdp_managed_module": "FSDP"}
_MARKS_OF_TENSORS = {"_is_flat_param": "FSDP", "ds_id": "DeepSpeed"}
