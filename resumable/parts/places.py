"""The memory that the tensors of a checkpoint are read into: new, or that of the live ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
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
    """The memory that the tensors of a file are read into: large ones directly, small ones together."""

    def __init__(self, wanted: Sequence[Wanted]) -> None:
        self.devices = {want.device for want in wanted if want.device.type == "cuda"}
        ordered = sorted(wanted, key=attrgetter("slot.begin"))
        large = [want for want in ordered if _is_large(want)]
        self._large = [(want.slot, room_for(want) if want.live is None else want.live) for want in large]
        self._small = [want for want in ordered if not _is_large(want)]
        self._slots, self._memory = _packed([want.slot for want in self._small])
        targets = [*map(_target, self._large), *self._targets_of_small()]
        self.targets = sorted(targets, key=attrgetter("begin"))
        for want in large:
            if want.live is not None:
                # Otherwise neither autograd nor a running save would notice the write.
                torch.autograd.graph.increment_version(want.live)

    def _targets_of_small(self) -> Iterator[Target]:
        """Yield where the small tensors are read to: those that follow each other in the file together."""
        begin = end = at = 0
        for want, slot in zip(self._small, self._slots, strict=True):
            if want.slot.begin != end:
                if end > begin:
                    yield Target(begin, end, self._memory[at : slot.begin])
                begin, at = want.slot.begin, slot.begin
            end = want.slot.end
        if end > begin:
            yield Target(begin, end, self._memory[at:])

    def large_names(self) -> set[str]:
        """Return the names of the tensors that are read directly into their memory."""
        return {slot.name for slot, _ in self._large}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, after they have been read."""
        for slot, tensor in self._large:
            tensor_file.refuse_no_booleans(_flat(tensor), slot.dtype)
        found = {slot.name: tensor for slot, tensor in self._large}
        for want, tensor in self._pairs():
            found[want.slot.name] = tensor if want.device == HOST else tensor.to(want.device, copy=True)
        return found

    @torch.no_grad()
    def move(self) -> None:
        """Copy the small tensors, which were read together, into the live tensors."""
        pairs = [(want.live, tensor) for want, tensor in self._pairs() if want.live is not None]
        for device in {live.device for live, _ in pairs}:
            lives = [live for live, _ in pairs if live.device == device]
            found = [tensor for live, tensor in pairs if live.device == device]
            if device != HOST:
                # As bits: a GPU cannot copy some dtypes together.
                lives = [_bits(live.detach()) for live in lives]
                found = [*map(_bits, found)]
            torch._foreach_copy_(lives, found)

    def _pairs(self) -> Sequence[tuple[Wanted, Tensor]]:
        """Return the small tensors that were read: on a GPU views of a copy there."""
        if not self.devices:
            return [*zip(self._small, tensor_file.from_row(self._memory, self._slots), strict=True)]
        pairs = []
        places = [want.device if want.device.type == "cuda" else HOST for want in self._small]
        for device in {*places}:
            try:
                there = tensor_file.from_row(self._memory, self._slots, device)
            except torch.OutOfMemoryError:
                there = tensor_file.from_row(self._memory, self._slots)
            every = zip(self._small, there, places, strict=True)
            pairs += [(want, tensor) for want, tensor, place in every if place == device]
        return pairs


def _is_large(want: Wanted) -> bool:
    return want.slot.end - want.slot.begin >= _SMALL and want.device.type in ("cpu", "cuda")


def _packed(slots: Sequence[Slot]) -> tuple[list[Slot], memoryview]:
    """Return memory for some tensors, and the place of each in it."""
    ends = [*accumulate([slot.end - slot.begin for slot in slots], initial=0)]
    begins = zip(slots, pairwise(ends), strict=True)
    packed = [slot._replace(begin=begin, end=end) for slot, (begin, end) in begins]
    return packed, memoryview(bytearray(ends[-1]))


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
