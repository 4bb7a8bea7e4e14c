"""Copies of tensors, to put back what a restore or a look has changed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ..files import sharded_tensor

_SMALL = 64 << 10  # a call for each takes longer than its copy
_FACTS = attrgetter("is_cpu", "dtype", "shape")
_SHARE = 1 / 3  # the restore needs room too, for what it reads


def clones(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies in host memory, made before this function returns.

    >>> live = {"weight": torch.zeros(2)}
    >>> copy = clones(live)
    >>> _ = live["weight"].add_(1)
    >>> copy["weight"]
    tensor([0., 0.])
    """
    return {name: _on_host(tensor) for name, tensor in tensors.items()}


def clones_nearby(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies, on the tensors' own devices where all of them have room, else in host memory."""
    sizes = Counter[torch.device]()
    for tensor in tensors.values():
        if tensor.is_cuda:
            sizes[tensor.device] += sharded_tensor.size(tensor)
    roomy = {device for device, size in sizes.items() if size <= _room(device)}
    return {
        name: clone_nearby(tensor) if tensor.device in roomy else _on_host(tensor)
        for name, tensor in tensors.items()
    }


@torch.no_grad()
def taken(tensors: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
    """Copy tensors, and return a function that returns the copies by name.

    Small ones of one shape are copied by one call: they become tensors again only if they are needed.

    >>> live = {"weight": torch.zeros(2), "bias": torch.ones(2)}
    >>> before = taken(live)
    >>> _ = live["weight"].add_(1)
    >>> before()
    {'weight': tensor([0., 0.]), 'bias': tensor([1., 1.])}
    """
    rest = tensors
    rows: list[tuple[list[str], Tensor]] = []
    if {*map(type, tensors.values())} <= {Tensor, nn.Parameter}:
        alike: dict[Any, list[str]] = defaultdict(list)
        for name, facts in zip(tensors, map(_FACTS, tensors.values()), strict=True):
            alike[facts].append(name)
        rest = {}
        for names in alike.values():
            some = [*map(tensors.__getitem__, names)]
            if len(some) > 1 and some[0].is_cpu and some[0].nbytes <= _SMALL:
                rows.append((names, torch.stack(some)))
            else:
                rest.update(zip(names, some, strict=True))
    apart = clones_nearby(rest)

    def copies() -> dict[str, Tensor]:
        found = dict(apart)
        for names, row in rows:
            # Each in memory of its own: what takes them may keep them.
            found.update(zip(names, _UNBIND_COPY(row), strict=True))
        return found

    return copies


_UNBIND_COPY: Any = torch.unbind_copy  # its type says that it returns nothing


def _room(device: torch.device) -> int:
    try:
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    except RuntimeError:
        # An allocator other than torch's has no statistics.
        return 0
    return int(_SHARE * (free + unused))


def clone_nearby(tensor: Tensor) -> Tensor:
    """Return a copy, on the tensor's own device if that has room, else in host memory."""
    try:
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    except torch.OutOfMemoryError:
        return _on_host(tensor)


def _on_host(tensor: Tensor) -> Tensor:
    if tensor.is_cpu:
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    # With its own strides first: to put it in another order on the device needs room there.
    return tensor.detach().to("cpu", copy=True).contiguous()
