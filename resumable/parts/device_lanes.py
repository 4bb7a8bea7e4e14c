"""Lanes of a read that lead onto GPUs: through pinned memory, on streams of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from ..files.file_reader import Lane

_cuda: Any = torch.cuda
_ROOM = 4 << 20


def send(to: Tensor, lane: Lane, at: int, piece: memoryview) -> None:
    """Copy a piece that was read to its place on the device."""
    assert isinstance(lane, DeviceLane)
    lane.send(to[at : at + piece.nbytes])


class DeviceLane(Lane):
    """Two pinned buffers: one is filled from the file while the other is copied to the device."""

    def __init__(self) -> None:
        self._buffers = [
            torch.empty(_ROOM, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)
        ]
        self._sent: list[tuple[torch.device, torch.cuda.Event] | None] = [None, None]
        self._turn = 0

    def room(self, size: int) -> memoryview:
        self._turn = 1 - self._turn
        if sent := self._sent[self._turn]:
            device, event = sent
            # Each thread starts with device 0, and waiting there would create a context on it.
            with torch.cuda.device(device):
                event.synchronize()
        array: Any = self._buffers[self._turn].numpy()
        return memoryview(array)[:size]

    def send(self, to: Tensor) -> None:
        """Start to copy the buffer that was filled to the device."""
        stream = _side_stream(to.device)
        with torch.cuda.device(to.device), torch.cuda.stream(stream):
            to.copy_(self._buffers[self._turn][: to.numel()], non_blocking=True)
            event = _cuda.Event()
            event.record(stream)
        self._sent[self._turn] = to.device, event


@functools.cache
def _side_stream(device: torch.device) -> Any:
    # torch hands out the same 32 streams in turn: new ones for each load would soon be the user's.
    return _cuda.Stream(device)


def on_lanes(devices: Collection[torch.device], scan: Callable[[Callable[[], Lane]], Any]) -> Any:
    """Scan a file with lanes onto these devices; when it returns, all copies have been made."""
    # The streams of the lanes and those of the training do not wait for each other.
    for device in devices:
        torch.cuda.synchronize(device)
    try:
        return scan(DeviceLane if devices else Lane)
    finally:
        # After a failure too: copies in flight would overwrite the tensors that are put back.
        for device in devices:
            torch.cuda.synchronize(device)
