"""The memory that the tensors of a checkpoint are read into: new, or that of the live ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from ..errors import CannotRead
from ..files import tensor_file
from ..files.file_reader import Target
from ..files.tensor_file import Slot, Slots
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


def all_fit(lives: Sequence[Any], slots: Slots) -> TypeGuard[Sequence[Tensor]]:
    """Whether `fits` is true of all of them, in the memory of the host: each question is one call for all."""
    if not {*map(type, lives)} <= {Tensor, nn.Parameter}:
        return False
    return (
        [*map(_KIND, lives)] == slots.kinds
        and all(map(_IS_CPU, lives))
        and all(map(Tensor.is_contiguous, lives))
        and all(slots.sizes)
        and not any(dtype == torch.bool or dtype.is_complex for dtype in slots.dtypes)
        and not any(map(Tensor.is_inference, lives))
    )


_KIND, _IS_CPU = attrgetter("dtype", "shape"), attrgetter("is_cpu")


class _Row(NamedTuple):
    """Small tensors that follow each other in the file, and the memory that they are read into."""

    slots: Sequence[Slot]
    devices: Sequence[torch.device]
    lives: list[Any]
    memory: memoryview


def on_host(slots: Sequence[Slot], lives: Sequence[Tensor] = ()) -> Places:
    """Return places in host memory, new or that of the live tensors."""
    if isinstance(slots, Slots) and slots and max(slots.sizes) < _SMALL:
        # The tensors of a whole file follow each other.
        places = Places(())
        places.add(slots, [HOST] * len(slots), lives)
        return places
    return Places([*map(Wanted, slots, repeat(HOST), lives or repeat(None))])


class Places:
    """The memory that the tensors of a file are read into: large ones directly, small ones in rows."""

    def __init__(self, wanted: Sequence[Wanted]) -> None:
        self.devices = {want.device for want in wanted if want.device.type == "cuda"}
        self._large: list[tuple[Slot, Tensor]] = []
        self._rows: list[_Row] = []
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
        self.add(*zip(*row, strict=True))

    def add(self, slots: Sequence[Slot], devices: Sequence[torch.device], lives: Sequence[Any]) -> None:
        """Add small tensors that follow each other in the file."""
        begin, end = slots[0].begin, slots[-1].end
        memory = memoryview(bytearray(end - begin))
        self.targets.append(Target(begin, end, memory))
        self._rows.append(_Row(slots, devices, [*lives], memory))

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

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, each in memory of its own, after they have been read."""
        for slot, tensor in self._large:
            tensor_file.refuse_no_booleans(tensor.view(-1).view(torch.uint8), slot.dtype)
        found = {slot.name: tensor for slot, tensor in self._large}
        for row in self._rows:
            if {*row.devices} == {HOST}:
                made = tensor_file.copied_from_row(row.memory, row.slots)
                found.update(zip([slot.name for slot in row.slots], made, strict=True))
                continue
            for part, there in self._on_devices(row):
                pairs = zip(part, there, strict=True)
                found.update({want.slot.name: one.to(want.device, copy=True) for want, one in pairs})
        return found

    @torch.no_grad()
    def move(self) -> None:
        """Copy the tensors that were read in rows into the live tensors."""
        for row in self._rows:
            if {*row.devices} == {HOST}:
                torch._foreach_copy_(row.lives, tensor_file.from_row(row.memory, row.slots))
                continue
            for part, found in self._on_devices(row):
                lives = [want.live for want in part if want.live is not None]
                if part[0].device != HOST:
                    # As bits: a GPU cannot copy some dtypes together.
                    lives = [_bits(live.detach()) for live in lives]
                    found = [*map(_bits, found)]
                torch._foreach_copy_(lives, found)

    def _on_devices(self, row: _Row) -> Iterator[tuple[list[Wanted], list[Tensor]]]:
        """Yield the tensors of a row by device: on a GPU views of a copy there."""
        places = [device if device.type == "cuda" else HOST for device in row.devices]
        wanted = [*map(Wanted, row.slots, row.devices, row.lives)]
        for device in {*places}:
            try:
                there = tensor_file.from_row(row.memory, row.slots, device)
            except torch.OutOfMemoryError:
                there = tensor_file.from_row(row.memory, row.slots)
            here = [number for number, place in enumerate(places) if place == device]
            yield [wanted[number] for number in here], [there[number] for number in here]


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
