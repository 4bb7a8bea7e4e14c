"""What torch and other libraries shard over the processes: what can be saved, and what is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from ..errors import Unsupported
from ..files import sharded_tensor
from .boxes import held


def refuse_split(name: str, value: Any) -> None:
    """Raise Unsupported for an object that is sharded in a way that cannot be saved."""
    found = _splitter(type(value))
    attributes = getattr(value, "__dict__", ())
    for mark, kind in _MARKS_OF_TENSORS.items() if isinstance(value, Tensor) else ():
        if mark in attributes:
            found = found or kind
    if found:
        raise Unsupported(
            f"{name} is split over the processes ({found}), and cannot be saved as it is.",
            fix=_FIXES.get(found, _USE_FSDP2),
        )
    if sharded_tensor.is_sharded(value):
        held(name, value)


def _found_splitter(kind: Any) -> str | None:
    if is_fsdp2(kind):
        return None
    # By name, because importing these libraries only to compare types would take seconds.
    modules = [f"{one.__module__}." for one in kind.__mro__]
    starts = [start for start in _SPLITTERS for module in modules if module.startswith(start)]
    return _SPLITTERS[starts[0]] if starts else None


def reshard(walked: Iterable[tuple[str, nn.Module]]) -> None:
    """Let modules of `fully_shard` have their sharded parameters, which are those of the optimizer.

    A forward pass without a backward one, as in an evaluation, leaves the whole ones there.
    """
    for _, module in walked:
        if is_fsdp2(type(module)):
            module.reshard()  # type: ignore[operator]


def _is_fsdp2(kind: Any) -> bool:
    return any(
        one.__name__ == "FSDPModule" and one.__module__.startswith("torch.distributed.fsdp")
        for one in kind.__mro__
    )


def data_rank(modules: Iterable[nn.Module]) -> tuple[int, int] | None:
    """Return which of how many shares of the data this process trains on, as `fully_shard` knows it.

    The processes of a group of tensor parallelism train on the same share.
    """
    # Only torch's private state tells which dimensions of a parameter's mesh are for the data.
    for info in [group.mesh_info for group in _groups(modules)]:
        if not getattr(info, "is_spmd_mesh", False):
            ranks = info.mesh.mesh.flatten().tolist()
            return ranks.index(info.mesh.get_rank()), len(ranks)
    return None


def hides_gradients(modules: Iterable[nn.Module]) -> bool:
    """Whether `fully_shard` keeps gradients that it has not reduced yet, where nothing can read them."""
    return any(
        getattr(parameter, "unsharded_accumulated_grad", None) is not None
        or getattr(getattr(parameter, "_unsharded_param", None), "grad", None) is not None
        for group in _groups(modules)
        for parameter in group.fsdp_params
    )


def _groups(modules: Iterable[nn.Module]) -> Iterator[Any]:
    for module in modules:
        if is_fsdp2(type(module)):
            state: Any = module._get_fsdp_state()  # type: ignore[operator]
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            yield from (group for group in groups if group is not None)


def hooks_of_torch(hooks: Mapping[Any, Any] | Iterable[Any]) -> bool:
    """Whether all of these hooks are torch's own, which only move tensors."""
    found = hooks.values() if isinstance(hooks, Mapping) else hooks
    return all(_is_torchs(hook) for hook in found)


def _is_torchs(hook: Any) -> bool:
    # load_state_dict keeps a hook in an object that calls it.
    hook = inspect.unwrap(getattr(hook, "hook", hook))
    scope = getattr(getattr(hook, "__func__", hook), "__globals__", {})
    return str(scope.get("__name__", "")).startswith(_MODULES_WITH_HOOKS)


_splitter: Callable[[Any], str | None] = lru_cache(_found_splitter)
is_fsdp2: Callable[[Any], bool] = lru_cache(_is_fsdp2)
"""Returns whether a class is one that `fully_shard` has made of a module's."""

_MODULES_WITH_HOOKS = ("torch.distributed.fsdp._fully_shard.", "torch.distributed.algorithms._checkpoint.")
_SPLITTERS = {
    "torch.distributed.fsdp.": "FSDP1",
    "torch.distributed._shard.": "ShardedTensor",
    "torch.distributed.optim.zero_redundancy_optimizer.": "ZeroRedundancyOptimizer",
    # DeepSpeed's kernels and optimizers for one device, in deepspeed.ops, split nothing.
    "deepspeed.runtime.": "DeepSpeed",
    "deepspeed.inference.": "DeepSpeed",
    "deepspeed.moe.": "DeepSpeed",
    "megatron.core.optimizer.": "Megatron",
    "megatron.core.distributed.": "Megatron",
}
_MARKS_OF_TENSORS = {
    **dict.fromkeys(("_is_flat_param", "_fsdp_flattened"), "FSDP1"),
    "ds_id": "DeepSpeed",
}
_USE_FSDP2 = (
    "shard the model with torch.distributed.fsdp.fully_shard (FSDP2), which is saved exactly, or save with "
    "torch.distributed.checkpoint."
)
_FIXES = {
    "DeepSpeed": "shard the model with torch.distributed.fsdp.fully_shard (FSDP2), which is saved exactly, "
    "or save with the engine's own save_checkpoint.",
    "Megatron": "save with Megatron's own dist_checkpointing, or shard with torch's fully_shard and "
    "parallelize_module.",
    "ZeroRedundancyOptimizer": "use the optimizer itself: with torch.distributed.fsdp.fully_shard its state "
    "is sharded too, and is saved exactly.",
}
