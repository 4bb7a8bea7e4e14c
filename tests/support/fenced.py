"""A training whose smallest tensors are copied behind the fence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from resumable.files import codec
from resumable.saving.image import Image
from resumable.saving.snapshot import Snapshot


class Training:
    """Some parameters and an optimizer, with an image that is taken behind a fence."""

    def __init__(
        self, make: Callable[..., Any] = torch.optim.SGD, size: int = 300, *, count: int = 2
    ) -> None:
        self.parameters = [nn.Parameter(torch.full((size,), float(i + 1))) for i in range(count)]
        self.optimizer = make(self.parameters, lr=1.0)
        self.image = Image([self.optimizer], worth_a_fence=0)
        self.memo: codec.Memo = {}
        self.step()

    def step(self) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def take(self) -> Snapshot:
        tensors = dict(zip("abc", self.parameters, strict=False))
        return self.image.take({"file": codec.encode(tensors, memo=self.memo)})

    def values(self) -> list[list[float]]:
        return [parameter.tolist() for parameter in self.parameters]


def values(taken: Snapshot) -> list[list[float]]:
    """Return what a snapshot has of the parameters."""
    return [tensor.tolist() for tensor in taken.tensors("file").values()]
