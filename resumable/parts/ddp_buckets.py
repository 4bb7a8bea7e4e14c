"""The order in which DistributedDataParallel sums the gradients, which decides how the sums are rounded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

_known: WeakKeyDictionary[nn.Module, list[Tensor]] = WeakKeyDictionary()
"""The order of each replica. It never changes once DDP has rebuilt its buckets."""


def layout(ddp: nn.Module) -> list[Tensor] | None:
    """Return the parameters in the order of DDP's buckets; None if DDP has not rebuilt them.

    DDP rebuilds the buckets after the first backward pass, in the order in which the gradients of rank 0
    became ready. The place of a gradient decides in which order three or more processes sum it.
    With static_graph, DDP rebuilds them after the second pass and does not expose the order before: a resume
    from the very first step then uses the initial buckets for one step more than an uninterrupted training.
    """
    if ddp in _known:
        return _known[ddp]
    order, stays = _read(ddp)
    if order and stays:
        _known[ddp] = order
    return order or None


def restore(ddp: nn.Module, order: Sequence[Tensor] | None) -> bool:
    """Make DDP use this order from the next backward pass on, or its initial one; False if it cannot.

    Every process must pass the same order. This call does not communicate.
    """
    if _ids(layout(ddp)) == _ids(order) and (order is None or ddp in _known):
        # Before DDP has rebuilt its buckets, the order of readiness may differ by process.
        return True
    before = {**vars(ddp)}
    try:
        is_sparse = _parameters(ddp)
        chosen = [*(is_sparse if order is None else order)]
        if {*_ids(chosen)} != {*_ids([*is_sparse])} or not _can_begin_anew(ddp):
            return False
        _begin_anew(ddp, chosen, [is_sparse[parameter] for parameter in chosen])
        if order is not None:
            # Simulate gradients that became ready in this order: the next forward pass, in which all
            # processes take part, builds the buckets from it, and they are never rebuilt.
            ddp.reducer._push_all_rebuilt_params()  # type: ignore[operator, union-attr]
    except (AttributeError, TypeError, RuntimeError):
        # Another version of torch, which names some of these otherwise.
        vars(ddp).update(before)
        return False
    _known.pop(ddp, None)
    if order is not None:
        _known[ddp] = chosen
    return True


def _ids(tensors: Sequence[Tensor] | None) -> list[int]:
    return [*map(id, tensors or ())]


def _read(ddp: Any) -> tuple[list[Tensor], bool]:
    """Return the order, and whether the buckets have been rebuilt in it."""
    try:
        if ddp.find_unused_parameters and not ddp.static_graph:
            return [], False
        # Otherwise DDP records the last backward pass only in the next forward pass.
        ddp.logger.set_runtime_stats_and_log()
        noted = ddp._get_ddp_logging_data()
        stays = bool(noted.get("has_rebuilt_buckets"))
        text = noted.get(_BUCKETS if stays else _READY)
        parameters = [*_parameters(ddp)] if text else []
    except (AttributeError, TypeError):
        return [], False
    if not text or noted.get("num_parameter_tensors") != len(parameters):
        # If parameters were frozen or unfrozen since, the indices mean other parameters.
        return [], False
    filled = [[int(index) for index in bucket.split()] for bucket in text.split(",")]
    if stays and os.environ.get("DDP_SET_LAST_BUCKET_CAP") == "1":
        # The buckets are then filled from the end.
        filled = [bucket[::-1] for bucket in filled]
    indices = [*chain(*filled)]
    # With static_graph, parameters without a gradient come last.
    indices += sorted({*range(len(parameters))} - {*indices})
    return [parameters[index] for index in indices], stays


_BUCKETS, _READY = "rebuilt_per_bucket_param_indices", "prev_iteration_grad_ready_order_indices"


def _parameters(ddp: Any) -> dict[Tensor, bool]:
    """Return the parameters, each with whether its gradient is sparse."""
    before = {**vars(ddp)}
    try:
        return dict(zip(*ddp._build_params_for_reducer(), strict=True))
    finally:
        # The call also selects the buffers to broadcast again, which would change the training.
        vars(ddp).update(before)


def _can_begin_anew(ddp: Any) -> bool:
    # A new reducer would lose these.
    lost = ("mixed_precision", "_use_python_reducer", "_require_manual_backward_finalization")
    in_backward = any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp.parameters())
    is_fixed = ddp.find_unused_parameters and not ddp.static_graph
    return not (is_fixed or in_backward or any(getattr(ddp, name, None) for name in lost))


def _begin_anew(ddp: Any, parameters: list[Tensor], sparse: list[bool]) -> None:
    distributed: Any = torch.distributed
    hook = ddp._get_ddp_logging_data().get("comm_hook")
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
    ddp._has_rebuilt_buckets = False
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
        ddp._static_graph_delay_allreduce_enqueued = False
    for function, state in ddp._comm_hooks:
        ddp.logger._set_comm_hook_name(hook)
        distributed._register_comm_hook(ddp.reducer, state, function)
    if hook and not ddp._comm_hooks:
        ddp._register_builtin_comm_hook(getattr(distributed.BuiltinCommHookType, hook.rpartition(".")[2]))
