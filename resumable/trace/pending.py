"""Values that a GPU has not computed yet: to ask for them at once would stall it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Late:
    """A value computed from tensors, once the GPU has copied them to the host.

    >>> late = Late([torch.ones(2)], lambda copies: copies[0].sum().item())
    >>> late.is_there(), late.value()
    (True, 2.0)
    """

    def __init__(self, tensors: Sequence[Tensor], make: Callable[[Sequence[Tensor]], Any]) -> None:
        # Into pinned memory and in the order of the stream, so that later writes are not in it.
        self._copies = [tensor.detach().to("cpu", non_blocking=tensor.is_cuda) for tensor in tensors]
        self._make = make
        self._copied: list[torch.cuda.Event] = []
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            self._copied.append(event)

    def is_there(self) -> bool:
        """Return whether the value is ready."""
        return all(event.query() for event in self._copied)  # type: ignore[no-untyped-call]

    def value(self) -> Any:
        """Wait for the value and return it."""
        for event in self._copied:
            event.synchronize()
        return self._make(self._copies)
