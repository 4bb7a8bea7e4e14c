"""Copies to host memory; those from a GPU in the order of its stream, and in the training's gaps."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from . import tensorfile

_cuda: Any = torch.cuda
_PIECE = 32 << 20
_SMALL = 1 << 20  # tensors of fewer bytes are packed on the device, and cross the bus together
_SAMPLES = 64


class Copy:
    """A tensor, or some of its numbers in a row, and its place in the image."""

    __slots__ = ("_offset", "_version", "begin", "name", "path", "sample", "source", "view")

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
            # Memory that nobody has set yet holds any byte, and readers refuse all but 0 and 1.
            self.source = self.source.view(torch.uint8).ne(0)
        self._version: int | None = None
        self.sample: Tensor | None = None

    def is_guarded(self, places: Collection[int]) -> bool:
        """Whether its tensor lies at one of the places, as a whole."""
        return self.source.is_contiguous() and self.source.data_ptr() - self._offset in places

    def put_off(self) -> Copy:
        """Remember what tells whether the tensor is still the same when it is copied."""
        # Where `.data` is set to another tensor meanwhile, the old one is what is to be saved.
        self.source = self.source.detach()
        self._version = _version(self.source)
        self.sample = _sample(self.source).clone()
        return self

    def has_another_version(self) -> bool:
        """Whether an operation has told of writing to the tensor."""
        return self._version != _version(self.source)

    def has_another_content(self) -> bool:
        """Whether the copy is not of the tensor as it was."""
        assert self.sample is not None
        return not tensorfile.is_equal(_sample(self.view), self.sample)


def _row_of(tensor: Tensor, begin: int, end: int) -> Tensor:
    """Return some numbers of a tensor: where they lie if they lie in a row, else a copy of them."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.as_strided([end - begin], [1], tensor.storage_offset() + begin)
    count = tensor[0].numel()
    first = begin // count
    some = tensor[first : -(-end // count)]
    try:
        some = some.clone(memory_format=torch.contiguous_format)
    except torch.OutOfMemoryError:
        # There is no room for a second one on the device, so the training has to wait.
        some = some.cpu().contiguous()
    return some.view(-1)[begin - first * count : end - first * count]


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

    A large tensor that is guarded stays where it is until it is copied; all others are copied on the
    device, before the training's next kernel.
    """

    def __init__(self, device: torch.device, copies: Sequence[Copy], guarded: Collection[int]) -> None:
        self._device = device
        self.guarded: list[Copy] = []
        large = [copy for copy in copies if copy.view.nbytes >= _SMALL]
        with torch.cuda.device(device):
            self._pairs = _packed([copy for copy in copies if copy.view.nbytes < _SMALL], device)
            for copy in large:
                if copy.is_guarded(guarded):
                    self.guarded.append(copy.put_off())
                    self._pairs.append((copy.view, copy.source))
                else:
                    self._copy_at_once(copy)
            self._add_samples()
            self._begun = _cuda.Event()
            self._begun.record()
        self._copied = _cuda.Event()
        self._is_queued = threading.Event()

    def _add_samples(self) -> None:
        # With the rest: asked for one by one, each would wait for all that the training has queued.
        rows = [copy.sample.view(torch.uint8) for copy in self.guarded if copy.sample is not None]
        if rows:
            flat = torch.cat(rows)
            self._samples = torch.empty(flat.numel(), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
            self._pairs.append((self._samples, flat))

    def _copy_at_once(self, copy: Copy) -> None:
        try:
            self._pairs.append((copy.view, copy.source.clone()))
        except torch.OutOfMemoryError:
            # There is no room for a second one on the device, so the training has to wait.
            copy.view.copy_(copy.source)

    def queue(self) -> None:
        """Hand all copies to the device; to be called in a thread of its own."""
        try:
            side = _cuda.Stream(self._device)
            with torch.cuda.device(self._device), torch.cuda.stream(side), torch.no_grad():
                side.wait_event(self._begun)
                tick = torch.zeros(1, device=self._device)
                for to, of in self._pairs:
                    for place, piece in _pieces(to, of):
                        place.copy_(piece, non_blocking=True)
                        # Copies go one after the other, and the training's own small ones wait behind
                        # them; at a kernel in between they get their turn.
                        tick.add_(1)
                self._copied.record(side)
        finally:
            self._is_queued.set()

    def hold_back(self) -> None:
        """Let what the training queues from now on begin when the copies are done; nobody waits here."""
        self._is_queued.wait()
        with torch.cuda.device(self._device):
            torch.cuda.current_stream().wait_event(self._copied)

    def end(self) -> None:
        """Let nobody wait for copies that will not be queued any more."""
        self._is_queued.set()

    def wait(self) -> None:
        """Wait until all is in host memory."""
        self._copied.synchronize()
        self._pairs.clear()
        at = 0
        for copy in self.guarded:
            assert copy.sample is not None
            end = at + copy.sample.nbytes
            copy.sample = self._samples[at:end].clone().view(copy.sample.dtype)
            at = end


def _packed(copies: Sequence[Copy], device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return one pair for each row of places that lie next to each other."""
    rows: list[list[Copy]] = []
    end = 0
    for copy in copies:
        if rows and copy.view.data_ptr() == end:
            rows[-1].append(copy)
        else:
            rows.append([copy])
        end = copy.view.data_ptr() + copy.view.nbytes
    return [_row(row, device) for row in rows]


def _row(row: Sequence[Copy], device: torch.device) -> tuple[Tensor, Tensor]:
    flat = torch.empty(sum(copy.view.nbytes for copy in row), dtype=torch.uint8, device=device)
    parts = torch.split(flat, [copy.view.nbytes for copy in row])
    views = [part.view(c.view.dtype).view(c.view.shape) for part, c in zip(parts, row, strict=True)]
    torch._foreach_copy_(views, [copy.source for copy in row])
    place = row[0].view.view(-1).view(torch.uint8).as_strided([flat.numel()], [1])
    return place, flat


def _pieces(to: Tensor, of: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    if not of.is_contiguous() or of.nbytes <= _PIECE:
        return iter([(to, of)])
    count = _PIECE // of.element_size()
    return zip(torch.split(to.view(-1), count), torch.split(of.view(-1), count), strict=True)
