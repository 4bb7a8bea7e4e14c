"""Copies to host memory; those from a GPU in the order of its stream, and in the training's gaps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..files import tensor_file
from .condition import ConditionWithoutLock
from .gpu_buffers import Buffers, side_stream
from .gpu_packing import ToPack
from .host_memory import registered_apart

_cuda: Any = torch.cuda
_PIECE = 32 << 20
_STAGED = 8 << 20
_SMALL = 1 << 20  # tensors of fewer bytes are packed on the device, and cross the bus together
_TOGETHER = 64 << 20
_SAMPLES = 64


class Copy:
    """A tensor, or some of its numbers in a row, and its place in the image."""

    __slots__ = (
        "_offset",
        "_order",
        "_version",
        "begin",
        "is_settled",
        "name",
        "path",
        "sample",
        "source",
        "view",
    )

    def __init__(
        self,
        path: str,
        name: str,
        begin: int,
        view: Tensor,
        source: Tensor,
        *,
        part: tuple[int, int] | None = None,
    ) -> None:
        self.path = path
        self.name = name
        self.begin = begin
        self.view = view
        self.source = _row_of(source, *part) if part else source
        self._offset = part[0] * source.element_size() if part else 0
        if source.dtype == torch.bool:
            # Uninitialized memory holds any byte, and readers refuse all but 0 and 1.
            self.source = _without_room(lambda one: one.view(torch.uint8).ne(0), self.source)
        self._version: int | None = None
        self._order: list[int] | None = None
        self.sample: Tensor | None = None
        self.is_settled = False
        """Whether no step changes its tensor: it is frozen, and was the same in the last two saves."""

    def place(self) -> int:
        """Return the address of its tensor."""
        return self.source.data_ptr() - self._offset

    def is_guarded(self, places: Collection[int]) -> bool:
        """Whether its tensor lies at one of the places, as a whole."""
        lies_well = self.source.is_contiguous() or _can_be_staged(self.source)
        return lies_well and self.place() in places

    def put_off(self) -> Copy:
        """Remember the version and the order of the tensor, to notice a change before it is copied."""
        # If `.data` is set to another tensor meanwhile, the old one has to be saved.
        self.source = self.source.detach()
        self._version = _version(self.source)
        if not self.source.is_contiguous():
            self._order = _order_of(self.source)
        return self

    def taken(self) -> Tensor:
        """Return the elements of the source that are compared later, still where they lie."""
        return _sample(self.source.permute(self._order) if self._order else self.source)

    def keep_sample(self, sample: Tensor) -> None:
        """Keep elements of the source, to compare with those of the copy."""
        self.sample = sample

    def has_another_version(self) -> bool:
        """Whether an operation has written to the tensor."""
        return self._version != _version(self.source)

    def has_another_content(self) -> bool:
        """Whether the copy is not of the tensor as it was."""
        assert self.sample is not None
        view = self.view.permute(self._order).contiguous() if self._order else self.view
        return not tensor_file.is_equal(_sample(view), self.sample)


def _row_of(tensor: Tensor, begin: int, end: int) -> Tensor:
    """Return some elements of a tensor: as a view if they are contiguous, else as a copy."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.as_strided([end - begin], [1], tensor.storage_offset() + begin)
    count = tensor[0].numel()
    first = begin // count
    some = tensor[first : -(-end // count)]
    some = _without_room(lambda one: one.clone(memory_format=torch.contiguous_format), some)
    return some.view(-1)[begin - first * count : end - first * count]


def _without_room(make: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Return what is made of a tensor, in host memory if there is no room on its device."""
    try:
        return make(tensor)
    except torch.OutOfMemoryError:
        # The training has to wait for it.
        return make(_on_host(tensor)).contiguous()


def _on_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory, with the same strides."""
    if tensor.is_contiguous():
        return tensor.cpu()
    # torch itself would first make a contiguous copy on the device.
    span = 1 + sum((count - 1) * step for count, step in zip(tensor.shape, tensor.stride(), strict=True))
    row = tensor.detach().as_strided([span], [1], tensor.storage_offset())
    return row.cpu().as_strided(tensor.shape, tensor.stride(), 0)


def _order_of(tensor: Tensor) -> list[int]:
    """Return the order of the dimensions in which a dense tensor lies in memory."""
    return sorted(range(tensor.dim()), key=lambda d: (-tensor.stride()[d], tensor.shape[d] == 1))


def _can_be_staged(tensor: Tensor) -> bool:
    """Whether a tensor lies densely in another order, and can be put in order in pieces on its GPU."""
    return (
        tensor.is_cuda and tensor[0].nbytes <= _STAGED and tensor.permute(_order_of(tensor)).is_contiguous()
    )


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _sample(tensor: Tensor) -> Tensor:
    """Return elements from all over a contiguous tensor: only a small write is seen in none of them."""
    last = tensor.numel() - 1
    step = max(1, last // (_SAMPLES - 1))
    # The last one is among them: a write that overtakes the copy is seen at the end at the latest.
    return tensor.as_strided([last // step + 1], [step], tensor.storage_offset() + last % step)


class Transfer:
    """The copies from one device.

    A large tensor that is guarded stays where it is until it is copied. All others are copied on the
    device before the training's next kernel, or, where it has no room for that, to the host at once.
    """

    def __init__(
        self,
        device: torch.device,
        copies: Sequence[Copy],
        guarded: Collection[int],
        buffers: Buffers,
        *,
        may_clone: bool = True,
    ) -> None:
        self._device = device
        self._buffers = buffers
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._settled: list[tuple[Tensor, Tensor]] = []
        self._sample_places: list[int] = []
        self.guarded: list[Copy] = []
        self.waited_for = 0
        """How many bytes were copied to the host at once, because the device has no room for a copy."""
        with torch.cuda.device(device):
            together, apart = _split(copies)
            others: list[Copy] = []
            for copy in apart:
                (self.guarded if copy.is_guarded(guarded) else others).append(copy)
            if self._pack(together):
                self._clone(others, buffers.room() if may_clone else 0)
            else:
                self.guarded = []
                self._copy_at_once(copies)
            if not may_clone:
                self.waited_for = 0
            self._begun = _cuda.Event()
            self._begun.record()
        # One that spins would take a processor from the training.
        self._copied = _cuda.Event(blocking=True)
        self._may_step = _cuda.Event() if self._settled else self._copied
        self._is_queued = False
        self._changed = ConditionWithoutLock()
        self._is_over = False

    def _pack(self, together: Sequence[Copy]) -> bool:
        """Copy small tensors, and samples of the guarded ones, side by side; False if there is no room."""
        samples = [copy.put_off().taken() for copy in self.guarded]
        staging = _STAGED if any(not copy.source.is_contiguous() for copy in self.guarded) else 0
        views, sources = [copy.view for copy in together], [copy.source for copy in together]
        to_pack = ToPack(views, sources, samples, staging)
        plan = self._buffers.plan(to_pack)
        if plan is None:
            return False
        plan.fill(to_pack)
        self._tick, self._staging, self._sample_places = plan.tick, plan.staging, plan.sample_places
        self._pairs += plan.rows
        for copy in self.guarded:
            (self._settled if copy.is_settled else self._pairs).append((copy.view, copy.source))
        if samples:
            self._samples = self._buffers.samples(plan.samples.numel())
            self._pairs.append((self._samples, plan.samples))
        return True

    def _clone(self, copies: Sequence[Copy], room: int) -> None:
        rest, size = [], 0
        for copy in copies:
            fits = size + copy.view.nbytes <= room
            clone = self._buffers.clone(copy.source, copy.view.shape) if fits else None
            if clone is None:
                rest.append(copy)
            else:
                size += copy.view.nbytes
                self._pairs.append((copy.view, clone))
        self._buffers.note_clones(size)
        self._copy_at_once(rest)

    def _copy_at_once(self, copies: Sequence[Copy]) -> None:
        self.waited_for = sum(copy.view.nbytes for copy in copies)
        for copy in copies:
            if copy.source.is_contiguous():
                for there, here in _cut(copy.view, copy.source):
                    there.copy_(here)
            else:
                copy.view.copy_(_on_host(copy.source))

    def queue(self) -> None:
        """Hand all copies to the device; to be called in a thread of its own."""
        try:
            side = side_stream(self._device)
            with torch.cuda.device(self._device), torch.cuda.stream(side), torch.no_grad():
                side.wait_event(self._begun)
                self._copy(self._pairs)
                self._may_step.record(side)
                self._let_steps_pass()
                if self._settled:
                    self._copy(self._settled)
                    self._copied.record(side)
        finally:
            self._let_steps_pass()

    def _let_steps_pass(self) -> None:
        self._is_queued = True
        self._changed.notify_all()

    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        for to, of in pairs:
            for place, piece in _pieces(to, of):
                for there, here in _cut(place, self._in_order(piece)):
                    there.copy_(here, non_blocking=True)
                    # Copies go one after the other, and the training's own small ones wait behind them; at
                    # a kernel in between they get their turn.
                    self._tick.add_(1)

    def _in_order(self, piece: Tensor) -> Tensor:
        if piece.is_contiguous():
            return piece
        staged = self._staging[: piece.nbytes].view(piece.dtype).view(piece.shape)
        return staged.copy_(piece)

    def hold_back(self) -> None:
        """Make work that the training queues from now on wait for the copies of what steps change."""
        self._changed.wait_for(lambda: self._is_queued)
        with torch.cuda.device(self._device):
            torch.cuda.current_stream().wait_event(self._may_step)

    def end(self) -> None:
        """Release those that wait for copies which will not be queued; return when the others have ended."""
        self._let_steps_pass()
        if not self._is_over:
            # After an error. A device that is gone copies nothing any more.
            with contextlib.suppress(RuntimeError), torch.cuda.device(self._device):
                side_stream(self._device).synchronize()

    def wait(self) -> None:
        """Wait until all is in host memory."""
        # A thread's device is the first one until it is set: waiting there would create a context on it.
        with torch.cuda.device(self._device):
            self._copied.synchronize()
        self._is_over = True
        self._pairs.clear()
        self._settled.clear()
        for copy, at in zip(self.guarded, self._sample_places, strict=True):
            sample = copy.taken()
            copy.keep_sample(self._samples[at : at + sample.nbytes].clone().view(sample.dtype))


def _split(copies: Sequence[Copy]) -> tuple[list[Copy], list[Copy]]:
    """Return the copies that are packed, and those that are made one by one."""
    together: list[Copy] = []
    apart: list[Copy] = []
    room = _TOGETHER
    for copy in copies:
        is_small = copy.view.nbytes < _SMALL and copy.view.nbytes <= room
        (together if is_small else apart).append(copy)
        room -= copy.view.nbytes if is_small else 0
    return together, apart


def _pieces(to: Tensor, of: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield both as they are, or, if the tensor lies in another order, in pieces that can be staged."""
    if of.is_contiguous():
        return iter([(to, of)])
    count = max(1, _STAGED // of[0].nbytes)
    return zip(torch.split(to, count), torch.split(of, count), strict=True)


def _cut(to: Tensor, of: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the bytes of both in pieces, none of them in two parts of the registered memory."""
    begin = to.data_ptr()
    parts = [*registered_apart(to)]
    if len(parts) == 1 and to.nbytes <= _PIECE:
        # To make views of the bytes would take longer than to queue the copy.
        yield to, of
        return
    to, of = to.view(-1).view(torch.uint8), of.view(-1).view(torch.uint8)
    for first, last in parts:
        for at in range(first - begin, last - begin, _PIECE):
            end = min(at + _PIECE, last - begin)
            yield to[at:end], of[at:end]
