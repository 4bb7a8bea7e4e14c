"""A training on a modeled GPU whose numbers are known, and what its images hold."""

from __future__ import annotations

import torch
from torch import Tensor

from resumable.files.codec import Encoded
from resumable.saving.image import Image
from resumable.saving.snapshot import Snapshot
from tests.support.accelerator import Accelerator


class Training:
    """A parameter on the GPU and an optimizer whose step writes to it, as a kernel does."""

    def __init__(self, gpu: Accelerator, size: int = 100) -> None:
        self.gpu = gpu
        self.weight = gpu.put(torch.zeros(size))
        self.buffer = gpu.put(torch.zeros(size))
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
        self.optimizer.param_groups[0]["params"] = [self.weight]
        self.image = Image([self.optimizer])
        self.value = 0
        self.step()

    def write(self, tensor: Tensor) -> None:
        self.value += 1
        self.gpu.launch("kernel", lambda value=self.value: set_to(tensor, value), tensor.device)

    def step(self) -> None:
        for hook in [*self.optimizer._optimizer_step_pre_hooks.values()]:
            hook(self.optimizer, (), {})
        self.write(self.weight)
        for hook in [*self.optimizer._optimizer_step_post_hooks.values()]:
            hook(self.optimizer, (), {})

    def take(self) -> Snapshot:
        self.image.catch_up()
        tensors = {"weight": self.weight, "buffer": self.buffer}
        return self.image.take({"file": Encoded({}, tensors, {}, ("key",))})


def held(taken: Snapshot) -> tuple[float, float]:
    found = taken.tensors("file")
    assert all(len(tensor.unique()) == 1 for tensor in found.values())
    return found["weight"].flatten()[0].item(), found["buffer"].flatten()[0].item()


def set_to(live: Tensor, value: int) -> None:
    """Write a value into a tensor, as a kernel does: no version tells of it."""
    live.data.copy_(torch.full(live.shape, value))
