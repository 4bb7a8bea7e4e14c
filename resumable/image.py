"""The host copy of the tensors, which the training cannot change any more."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def take(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies in host memory, made before this function returns.

    >>> live = {"weight": torch.zeros(2)}
    >>> copy = take(live)
    >>> _ = live["weight"].add_(1)
    >>> copy["weight"]
    tensor([0., 0.])
    """
    return {
        name: tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
