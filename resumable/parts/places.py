"""The memory that the tensors of a checkpoint are read into: new, or that of the live ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise, repeat
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
_CAST = (torch.float32, torch.float64, torch.float16)
"""The dtypes whose memory Python itself can take for bytes."""
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


class _Small(NamedTuple):
    """Small tensors of a file, and the memory that they are read into, one after the other."""

    slots: Sequence[Slot]
    """Where each lies, from the first one on."""
    devices: Sequence[torch.device]
    lives: list[Any]
    memory: memoryview
    targets: Sequence[Target]


def on_host(slots: Sequence[Slot], lives: Sequence[Tensor] = ()) -> Places:
    """Return places in host memory, new or that of the live tensors."""
    if isinstance(slots, Slots) and slots and max(slots.sizes) < _SMALL:
        # The tensors of a whole file follow each other.
        return Places.of_a_file(slots, lives)
    return Places([*map(Wanted, slots, repeat(HOST), lives or repeat(None))])


class Places:
    """The memory that the tensors of a file are read into: large ones directly, small ones together."""

    def __init__(self, wanted: Sequence[Wanted]) -> None:
        self.devices = {want.device for want in wanted if want.device.type == "cuda"}
        ordered = sorted(wanted, key=attrgetter("slot.begin"))
        large = [want for want in ordered if _is_large(want)]
        self._large = [(want.slot, room_for(want) if want.live is None else want.live) for want in large]
        self.new = [room for want, (_, room) in zip(large, self._large, strict=True) if want.live is None]
        """Large tensors that nothing was read into yet."""
        self._small = _together([want for want in ordered if not _is_large(want)])
        targets = [*map(_target, self._large), *self._small.targets]
        self.targets = sorted(targets, key=attrgetter("begin"))
        for want in large:
            if want.live is not None:
                # Otherwise neither autograd nor a running save would notice the write.
                torch.autograd.graph.increment_version(want.live)

    @classmethod
    def of_a_file(cls, slots: Slots, lives: Sequence[Tensor] = ()) -> Places:
        """Return places in host memory for all tensors of a file, which are small."""
        found = cls(())
        begin, end = slots[0].begin, slots[-1].end
        memory = memoryview(bytearray(end - begin))
        found.targets = [Target(begin, end, memory)] if end > begin else []
        found._small = _Small(slots, [HOST] * len(slots), [*lives], memory, found.targets)
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, each in memory of its own, after they have been read."""
        for slot, tensor in self._large:
            tensor_file.refuse_no_booleans(_flat(tensor), slot.dtype)
        found = {slot.name: tensor for slot, tensor in self._large}
        small = self._small
        if {*small.devices} <= {HOST}:
            made = tensor_file.copied_from_row(small.memory, small.slots)
            found.update(zip([slot.name for slot in small.slots], made, strict=True))
            return found
        for part, there in self._on_devices():
            pairs = zip(part, there, strict=True)
            found.update({want.slot.name: one.to(want.device, copy=True) for want, one in pairs})
        return found

    @torch.no_grad()
    def move(self) -> None:
        """Copy the small tensors, which were read together, into the live tensors."""
        small = self._small
        if not small.slots:
            return
        if {*small.devices} == {HOST}:
            torch._foreach_copy_(small.lives, tensor_file.from_row(small.memory, small.slots))
            return
        for part, found in self._on_devices():
            lives = [want.live for want in part if want.live is not None]
            if part[0].device != HOST:
                # As bits: a GPU cannot copy some dtypes together.
                lives = [_bits(live.detach()) for live in lives]
                found = [*map(_bits, found)]
            torch._foreach_copy_(lives, found)

    def _on_devices(self) -> Iterator[tuple[list[Wanted], list[Tensor]]]:
        """Yield the small tensors by device: on a GPU views of a copy there."""
        small = self._small
        places = [device if device.type == "cuda" else HOST for device in small.devices]
        wanted = [*map(Wanted, small.slots, small.devices, small.lives)]
        for device in {*places}:
            try:
                there = tensor_file.from_row(small.memory, small.slots, device)
            except torch.OutOfMemoryError:
                there = tensor_file.from_row(small.memory, small.slots)
            here = [number for number, place in enumerate(places) if place == device]
            yield [wanted[number] for number in here], [there[number] for number in here]


def _is_large(want: Wanted) -> bool:
    return want.slot.end - want.slot.begin >= _SMALL and want.device.type in ("cpu", "cuda")


def _together(wanted: Sequence[Wanted]) -> _Small:
    """Return one memory for some tensors, and where each range of the file is read to."""
    slots = [want.slot for want in wanted]
    ends = [*accumulate([slot.end - slot.begin for slot in slots], initial=0)]
    memory = memoryview(bytearray(ends[-1]))
    packed = [
        Slot(slot.name, slot.dtype, slot.shape, begin, end)
        for slot, (begin, end) in zip(slots, pairwise(ends), strict=True)
    ]
    edges = [number for number, (one, other) in enumerate(pairwise(slots), 1) if one.end != other.begin]
    targets = [
        Target(slots[first].begin, slots[last - 1].end, memory[ends[first] : ends[last]])
        for first, last in pairwise([0, *edges, len(slots)])
        if ends[first] < ends[last]
    ]
    return _Small(packed, [want.device for want in wanted], [want.live for want in wanted], memory, targets)


def _target(place: tuple[Slot, Tensor]) -> Target:
    slot, tensor = place
    if not tensor.is_cpu:
        return Target(slot.begin, slot.end, None, partial(send, _flat(tensor)))
    array: Any
    if tensor.dtype in _CAST:
        # A fifth of the time, for each of hundreds of tensors.
        array = tensor.detach().numpy()
        return Target(slot.begin, slot.end, memoryview(array).cast("B"))
    array = _flat(tensor).numpy()
    return Target(slot.begin, slot.end, memoryview(array))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


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
