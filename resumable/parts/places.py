"""The memory that the tensors of a checkpoint are read into: new, or that of the live ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from ..errors import CannotRead
from ..files import tensor_file
from ..files.file_reader import Target
from ..files.tensor_file import Slot
from .device_lanes import send

HOST = torch.device("cpu")
_SMALL = 64 << 10  # smaller tensors are read together, in bytes
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Wanted(NamedTuple):
    """A tensor to be read: its place in the file, its device, and the live one to fill, if there is one."""

    slot: Slot
    device: torch.device
    live: Tensor | None = None


def fits(slot: Slot, device: torch.device, live: Tensor | None) -> bool:
    """Whether a tensor of a file can be read into a live one as it is."""
    return (
        live is not None
        and live.device == device
        and (live.dtype, tuple(live.shape)) == (slot.dtype, slot.shape)
        and live.is_contiguous()
        and live.numel() > 0
        and live.device.type in ("cpu", "cuda")
        # Not every byte is a valid boolean, and a complex tensor may be a lazy conjugate.
        and live.dtype != torch.bool
        and not live.is_complex()
        and not live.is_inference()
    )


def all_fit(lives: Sequence[Any], slots: Sequence[Slot]) -> TypeGuard[Sequence[Tensor]]:
    """Whether `fits` is true of all of them, in the memory of the host: each question is one call for all."""
    if not {*map(type, lives)} <= {Tensor, nn.Parameter}:
        return False
    dtypes = [slot.dtype for slot in slots]
    return (
        [one.dtype for one in lives] == dtypes
        and [one.shape for one in lives] == [slot.shape for slot in slots]
        and {one.device for one in lives} == {HOST}
        and all(map(Tensor.is_contiguous, lives))
        and all(map(Tensor.numel, lives))
        and not any(dtype == torch.bool or dtype.is_complex for dtype in {*dtypes})
        and not any(map(Tensor.is_inference, lives))
    )


class Places:
    """The memory that the tensors of a file are read into: large ones directly, small ones in rows."""

    def __init__(self, wanted: Sequence[Wanted]) -> None:
        self.devices = {want.device for want in wanted if want.device.type == "cuda"}
        self._large: list[tuple[Slot, Tensor]] = []
        self._rows: list[tuple[Sequence[Wanted], memoryview]] = []
        self.targets: list[Target] = []
        row: list[Wanted] = []
        for want in sorted(wanted, key=attrgetter("slot.begin")):
            is_large = want.slot.end - want.slot.begin >= _SMALL and want.device.type in ("cpu", "cuda")
            if row and (is_large or row[-1].slot.end != want.slot.begin):
                self._add_row(row)
                row = []
            if is_large:
                self._add_large(want)
            else:
                row.append(want)
        if row:
            self._add_row(row)

    def _add_row(self, row: Sequence[Wanted]) -> None:
        begin, end = row[0].slot.begin, row[-1].slot.end
        memory = memoryview(bytearray(end - begin))
        self.targets.append(Target(begin, end, memory))
        self._rows.append((row, memory))

    def _add_large(self, want: Wanted) -> None:
        slot = want.slot
        tensor = room_for(want) if want.live is None else want.live
        if want.live is not None:
            # Otherwise neither autograd nor a running save would notice the write.
            torch.autograd.graph.increment_version(tensor)
        flat = tensor.detach().view(-1).view(torch.uint8)
        self._large.append((slot, tensor))
        if tensor.is_cpu:
            array: Any = flat.numpy()
            self.targets.append(Target(slot.begin, slot.end, memoryview(array)))
        else:
            self.targets.append(Target(slot.begin, slot.end, None, partial(send, flat)))

    def large_names(self) -> set[str]:
        """Return the names of the tensors that are read directly into their memory."""
        return {slot.name for slot, _ in self._large}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, after they have been read."""
        for slot, tensor in self._large:
            tensor_file.refuse_no_booleans(tensor.view(-1).view(torch.uint8), slot.dtype)
        found = {slot.name: tensor for slot, tensor in self._large}
        for pairs in self._pairs():
            for want, tensor in pairs:
                found[want.slot.name] = tensor if want.device == HOST else tensor.to(want.device, copy=True)
        return found

    @torch.no_grad()
    def move(self) -> None:
        """Copy the tensors that were read in rows into the live tensors."""
        for pairs in self._pairs():
            lives = [want.live for want, _ in pairs if want.live is not None]
            found = [tensor for _, tensor in pairs]
            if pairs[0][0].device != HOST:
                # As bits: a GPU cannot copy some dtypes together.
                lives = [_bits(live.detach()) for live in lives]
                found = [*map(_bits, found)]
            torch._foreach_copy_(lives, found)

    def _pairs(self) -> Iterator[Sequence[tuple[Wanted, Tensor]]]:
        """Yield the tensors that were read in rows, by device: on a GPU views of a copy there."""
        for row, memory in self._rows:
            if not self.devices:
                slots = [want.slot for want in row]
                yield [*zip(row, tensor_file.from_row(memory, slots), strict=True)]
                continue
            places = [want.device if want.device.type == "cuda" else HOST for want in row]
            for device in {*places}:
                slots = [want.slot for want in row]
                try:
                    there = tensor_file.from_row(memory, slots, device)
                except torch.OutOfMemoryError:
                    there = tensor_file.from_row(memory, slots)
                every = zip(row, there, places, strict=True)
                yield [(want, tensor) for want, tensor, place in every if place == device]


def _bytes_of(slot: Slot) -> int:
    return math.prod(slot.shape) * slot.dtype.itemsize


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_BITS[tensor.element_size()])


def room_for(want: Wanted) -> Tensor:
    """Return new memory for a tensor; CannotRead if there is none."""
    try:
        return tensor_file.empty(want.slot, want.device)
    except RuntimeError as exc:
        # torch raises RuntimeError if it is out of memory, on the host and on a device.
        raise CannotRead(
            f"there is no room on {want.device} for the {_bytes_of(want.slot):,} bytes of {want.slot.name}.",
            fix="see what else uses that memory (a training that still runs?), and start again; nothing says "
            "that the checkpoint is damaged.",
        ) from exc
