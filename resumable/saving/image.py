"""The host copy of the tensors, taken behind a fence without stopping the training."""

from __future__ import annotations

import bisect
import mmap
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import SaveFailed
from ..files import codec, fingerprint, tensor_file
from ..files.codec import Encoded
from ..files.large_files import Content, Written
from ..files.tensor_file import Layout, Slot
from ..files.threads import allow_captures, yield_to_training
from ..processes.write_shares import Range
from .fence import Fence
from .gpu_copies import Buffers, Copy, Transfer
from .host_memory import HostMemory, gpu_of

_WORTH_A_FENCE = 64 << 20
"""Fewer bytes in host memory are copied at once: that takes some milliseconds, and needs no trust."""

_SMALL = 64 << 10
_AT_A_TIME = 32 << 20
_LENT = 32 << 20


class WrittenAround(SaveFailed):
    """Somebody wrote to what only a step may change; later images do not rely on that any more."""


class _Share(NamedTuple):
    """What is staged of a file: all of it, or some bytes from `begin` on."""

    layout: Layout
    """How the tensors lie in those bytes, counted from the first of them."""
    begin: int
    size: int
    """How large the whole file is."""
    parts: Mapping[int, tuple[int, int]]
    """Which numbers there are of a tensor that is not there as a whole, by the number of its slot."""

    def range(self) -> Range:
        """Return where the bytes begin and end."""
        return self.begin, self.begin + self.layout.size


def _share(layout: Layout, begin: int, end: int) -> _Share:
    if (begin, end) == (0, layout.size):
        return _Share(layout, 0, layout.size, {})
    slots: list[Slot] = []
    parts = {}
    for slot in layout.slots:
        first, last = max(slot.begin, begin), min(slot.end, end)
        if first > last or (first == last and slot.begin < slot.end):
            continue
        shape = slot.shape
        if (first, last) != (slot.begin, slot.end):
            # (a block begins between two numbers, since both lie at multiples of the widest one)
            width = slot.dtype.itemsize
            parts[len(slots)] = ((first - slot.begin) // width, (last - slot.begin) // width)
            shape = ((last - first) // width,)
        slots.append(Slot(slot.name, slot.dtype, shape, first - begin, last - begin))
    return _Share(Layout(layout.header[begin:end], tuple(slots), end - begin), begin, layout.size, parts)


class _File:
    """One file of the image: where it lies, and how it was planned."""

    def __init__(self, path: str, group: Encoded, whole: Layout, share: _Share) -> None:
        self.path = path
        self.whole = whole
        self.share = share
        self.layout = share.layout
        self.names = [slot.name for slot in self.layout.slots]
        tensors = [group.tensors[name] for name in self.names]
        is_small = [0 < t.nbytes < _SMALL and t.is_cpu and t.dtype != torch.bool for t in tensors]
        for number in share.parts:
            is_small[number] = False
        # One by one, ten thousand would keep the training waiting.
        self.together = [number for number, is_one in enumerate(is_small) if is_one]
        self.apart = [number for number, is_one in enumerate(is_small) if not is_one]
        self.begin = 0
        self.is_placed = False
        self.views: list[Tensor] = []
        self.fingerprint: Any = None
        """What tells that tensors which nobody trains still are what lies here."""


class Image:
    """One buffer of host memory, laid out as the files, into which every save is taken."""

    def __init__(
        self,
        optimizers: Sequence[Any] = (),
        written_elsewhere: Callable[[], Collection[int]] = frozenset,
        worth_a_fence: int = _WORTH_A_FENCE,
    ) -> None:
        self._fence = Fence(optimizers)
        self._written_elsewhere = written_elsewhere
        self._worth_a_fence = worth_a_fence
        self._plans: dict[str, tuple[tuple[Any, ...], Layout]] = {}
        self._files: dict[str, _File] = {}
        self._memory: HostMemory | None = None
        self._buffers: dict[torch.device, Buffers] = {}
        self._has_taken = False
        self._owner = os.getpid()
        self._reserving: threading.Thread | None = None
        self._is_reserved = threading.Event()
        self._last: Taken | None = None

    def reserve(self, size: int, then: Callable[[memoryview], None]) -> None:
        """Get memory for an image of about so many bytes in the background, and lend `then` some of it."""
        self.settle()
        if self._memory is None or self._memory.size < size:
            self._is_reserved.clear()
            gpu = gpu_of(self._fence.parameters())
            reserving = threading.Thread(target=self._reserve, args=(size, then, gpu))
            reserving.start()
            self._reserving = reserving

    def _reserve(self, size: int, then: Callable[[memoryview], None], gpu: torch.device | None) -> None:
        try:
            yield_to_training()
            self._allocate(size, gpu)
            assert self._memory
            lent = self._memory.bytes[:_LENT]
        except (MemoryError, OSError):
            # The save will meet it too, and tells it.
            return
        finally:
            self._is_reserved.set()
        try:
            then(lent)
        except RuntimeError:
            # At the end of the script no more threads can be started.
            if threading.main_thread().is_alive():
                raise

    def settle(self) -> None:
        """Wait until nothing is at work in the background."""
        if self._owner != os.getpid():
            # The memory of the process that this one was forked from did not come along.
            self._owner, self._memory, self._files, self._buffers = os.getpid(), None, {}, {}
            self._reserving = self._last = None
        if self._reserving:
            self._is_reserved.wait()
        # It may still be copied although its save has failed, and into the memory of the next one.
        if self._last and self._last.has_failed():
            self._forget_what_is_there()
        self._last = None

    def _forget_what_is_there(self) -> None:
        for file in self._files.values():
            file.fingerprint = None

    def catch_up(self) -> None:
        """Let this thread's streams wait for the last steps of the optimizers, wherever those were queued."""
        self._fence.catch_up()

    def is_pageable(self) -> bool:
        """Whether the driver of a GPU refused the memory of the image."""
        return self._memory is not None and self._memory.is_refused

    def sizes(self, groups: Mapping[str, Encoded]) -> dict[str, int]:
        """Return how large each file is, which is planned once until a tensor has another shape."""
        self._plans = {path: (group.key, self._layout(path, group)) for path, group in groups.items()}
        return {path: layout.size for path, (_, layout) in self._plans.items()}

    def headers(self) -> dict[str, bytes]:
        """Return how the tensors lie in each file for which `sizes` was asked last."""
        return {path: layout.header for path, (_, layout) in self._plans.items()}

    def _layout(self, path: str, group: Encoded) -> Layout:
        key, layout = self._plans.get(path, (None, None))
        if layout is None or key != group.key:
            layout = tensor_file.layout(group.tensors, group.aliases)
        return layout

    def _allocate(self, size: int, gpu: torch.device | None) -> None:
        self._release()
        memory = HostMemory(_in_pages(size))
        memory.touch()
        memory.register(gpu)
        self._memory = memory

    def _release(self) -> None:
        for file in self._files.values():
            file.is_placed, file.views, file.fingerprint = False, [], None
        if self._memory:
            self._memory.free()
        self._memory = None

    def close(self) -> None:
        """Let go of the memory and of the optimizers; what was taken stays until nobody needs it."""
        self.settle()
        if self._reserving:
            self._reserving.join()
        self._files, self._buffers = {}, {}
        self._release()
        self._fence.remove()

    @torch.no_grad()
    def take(self, groups: Mapping[str, Encoded], mine: Mapping[str, Range] | None = None) -> Taken:
        """Take the tensors of each file as they are now; what is guarded is copied behind the fence.

        Where other processes save the same, only the bytes that are `mine` are taken, by file.
        """
        self.settle()
        self._plan(groups, mine)
        # How much memory the training needs is known when it has made a step.
        may_clone = self._has_taken or self._fence.has_stepped()
        taken = self._last = Taken(self._fence, self._buffers, may_clone)
        self._has_taken = True
        try:
            for path, group in groups.items():
                if path in self._files:
                    self._begin(taken, path, group)
            taken.start(self._worth_a_fence, self._written_elsewhere)
        except BaseException:
            self._forget_what_is_there()
            raise
        return taken

    def _begin(self, taken: Taken, path: str, group: Encoded) -> None:
        file = self._files[path]
        sources = [group.tensors[name] for name in file.names]
        taken.add(path, self._bytes(file), file.share)
        if codec.is_frozen(path) and _is_still(file, sources):
            return
        if file.together:
            torch._foreach_copy_(
                [file.views[number] for number in file.together],
                [sources[number] for number in file.together],
            )
        taken.copy(file, sources)

    def _bytes(self, file: _File) -> memoryview:
        assert self._memory
        return self._memory.bytes[file.begin : file.begin + file.layout.size]

    def _plan(self, groups: Mapping[str, Encoded], mine: Mapping[str, Range] | None) -> None:
        sizes = self.sizes(groups)
        ranges = {path: (0, size) for path, size in sizes.items()} if mine is None else mine
        files = {path: self._planned(path, groups[path], part) for path, part in ranges.items()}
        size = sum(_in_pages(file.layout.size) for file in files.values())
        if files == self._files and self._memory:
            return
        self._files = files
        gpu = gpu_of(tensor for group in groups.values() for tensor in group.tensors.values())
        if self._memory is None or self._memory.size < size:
            self._allocate(size, gpu)
        assert self._memory
        self._memory.register(gpu)
        begin = 0
        for file in files.values():
            file.begin, file.is_placed, file.fingerprint = begin, True, None
            begin += _in_pages(file.layout.size)
            self._bytes(file)[: len(file.layout.header)] = file.layout.header
            file.views = file.layout.views(self._memory.tensor[file.begin : file.begin + file.layout.size])

    def _planned(self, path: str, group: Encoded, mine: Range) -> _File:
        _, layout = self._plans[path]
        known = self._files.get(path)
        if known and known.is_placed and known.whole is layout and known.share.range() == mine:
            return known
        return _File(path, group, layout, _share(layout, *mine))


class Taken:
    """An image, from the moment when it is begun; what goes wrong is raised to whoever reads it."""

    def __init__(self, fence: Fence, buffers: dict[torch.device, Buffers], may_clone: bool) -> None:
        self._fence = fence
        self._buffers = buffers
        self._may_clone = may_clone
        self.waited_for = 0
        """How many bytes were copied to the host at once, because their device has no room for a copy."""
        self._data: dict[str, memoryview] = {}
        self._shares: dict[str, _Share] = {}
        self._copies: list[Copy] = []
        self._later: list[Copy] = []
        self._transfers: list[Transfer] = []
        self._progress = threading.Condition()
        self._done = 0
        self._places: dict[str, list[tuple[int, int]]] = {}
        self._on_devices: set[str] = set()
        self._is_complete = True
        self._has_passed = False
        self._error: SaveFailed | None = None

    def add(self, path: str, data: memoryview, share: _Share) -> None:
        """Announce a file, whose header is in place."""
        self._data[path] = data
        self._shares[path] = share

    def copy(self, file: _File, sources: Sequence[Tensor]) -> None:
        """Announce that those tensors of a file are to be copied that were not copied together."""
        for number in file.apart:
            if sources[number].numel():
                slot, part = file.layout.slots[number], file.share.parts.get(number)
                self._copies.append(
                    Copy(file.path, slot.name, slot.begin, file.views[number], sources[number], part=part)
                )

    def start(self, worth_a_fence: int, written_elsewhere: Callable[[], Collection[int]]) -> None:
        """Copy what may change at any moment, and begin with the rest."""
        by_device: dict[torch.device, list[Copy]] = {}
        at_once: list[Copy] = []
        for copy in self._copies:
            (by_device.setdefault(copy.source.device, []) if copy.source.is_cuda else at_once).append(copy)
        self._copies.clear()
        is_worth_it = sum(copy.view.nbytes for copy in at_once) >= worth_a_fence
        guarded = self._fence.guarded(is_worth_it or bool(by_device))
        if guarded:
            guarded -= {*written_elsewhere()}
        if is_worth_it:
            # Other devices than these order their kernels by thread.
            later = [copy for copy in at_once if copy.source.is_cpu and copy.is_guarded(guarded)]
            at_once = [copy for copy in at_once if not copy.source.is_cpu or not copy.is_guarded(guarded)]
            self._later = [copy.put_off() for copy in later]
            for copy in later:
                copy.sample = copy.taken().clone()
        for device, copies in by_device.items():
            buffers = self._buffers.setdefault(device, Buffers(device))
            transfer = Transfer(device, copies, guarded, buffers, may_clone=self._may_clone)
            self._transfers.append(transfer)
            self.waited_for += transfer.waited_for
        self._on_devices = {copy.path for copies in by_device.values() for copy in copies}
        for number, copy in enumerate(self._later, 1):
            self._places.setdefault(copy.path, []).append((copy.begin, number))
        if self._later or self._transfers:
            self._is_complete = False
            self._fence.shut(self._hold_back)
            try:
                threading.Thread(target=self._run, name="resumable-image").start()
            except BaseException:
                # (a system may refuse another thread) Nobody else would open it.
                self._is_complete = True
                self._fence.open()
                raise
        _copy(at_once)

    def _run(self) -> None:
        try:
            if self._transfers:
                allow_captures()
            with torch.no_grad():
                for transfer in self._transfers:
                    transfer.queue()
                self._copy_later()
                for transfer in self._transfers:
                    transfer.wait()
                self._refuse_changed(self._is_another)
        except SaveFailed as exc:
            self._error = exc
        except BaseException as exc:
            self._error = SaveFailed(
                f"the tensors could not be copied to host memory: {exc!r}.",
                fix="mend the cause and call save() again. The checkpoints before it are untouched.",
            )
            self._error.__cause__ = exc
        finally:
            self._fence.open()
            for transfer in self._transfers:
                transfer.end()
            with self._progress:
                # The references kept what was copied alive, wherever its tensors have gone since.
                self._later, self._transfers = [], []
                self._is_complete = True
                self._progress.notify_all()

    def _copy_later(self) -> None:
        rest = self._later
        while rest:
            some = _first_of(rest)
            _copy(some)
            rest = rest[len(some) :]
            with self._progress:
                self._done += len(some)
                self._progress.notify_all()

    def _guarded(self) -> list[Copy]:
        return [*self._later, *(copy for transfer in self._transfers for copy in transfer.guarded)]

    def _is_another(self, copy: Copy) -> bool:
        # After a step has passed, its writes are no news.
        return copy.has_another_content() or (copy.has_another_version() and not self._has_passed)

    def _refuse_changed(self, is_changed: Callable[[Copy], bool]) -> None:
        for copy in self._guarded():
            if is_changed(copy):
                self._fence.distrust()
                raise WrittenAround(
                    f"{copy.name} was written to after save(), but not by a step of its optimizer, before it "
                    "was copied: that checkpoint is not made.",
                    fix="write to parameters (an average, a clamp) before save(), or after the next step. "
                    "Until this process ends, all is copied before save() returns, which takes longer.",
                )

    def _hold_back(self) -> None:
        """Let a step wait that comes before the image is complete."""
        with self._progress:
            if not self._is_complete and not self._has_passed:
                self._has_passed = True
                try:
                    self._refuse_changed(Copy.has_another_version)
                except SaveFailed as exc:
                    self._error = exc
            self._progress.wait_for(lambda: self._is_complete or self._done == len(self._later))
            transfers = self._transfers
        for transfer in transfers:
            transfer.hold_back()

    def wait(self, path: str, end: int) -> None:
        """Wait until the first `end` bytes of a file are there; raise what went wrong."""
        places = self._places.get(path, [])
        count = bisect.bisect_left(places, (end, 0))
        needed = places[count - 1][1] if count else 0
        # What is wrong with a copy is known when all is copied: no file is complete before.
        is_last = end >= len(self._data[path]) or path in self._on_devices
        with self._progress:
            self._progress.wait_for(lambda: self._is_complete or (self._done >= needed and not is_last))
        if self._error:
            raise self._error

    def has_failed(self) -> bool:
        """Wait until nothing is copied any more, and tell whether that went wrong."""
        with self._progress:
            self._progress.wait_for(lambda: self._is_complete)
        return self._error is not None

    def paths(self) -> list[str]:
        """Return the names of the files."""
        return [*self._data]

    def contents(self, before: Mapping[str, Written]) -> dict[str, Content]:
        """Return what is to become each file, of which the last save wrote `before`."""
        found = {}
        for path, data in self._data.items():
            share, ready = self._shares[path], partial(self.wait, path)
            found[path] = Content(data, ready, before.get(path), begin=share.begin, size=share.size)
        return found

    def tensors(self, path: str) -> dict[str, Tensor]:
        """Return the tensors of a file as they were taken, those that are there as a whole."""
        share, data = self._shares[path], self._data[path]
        if path in self._places or path in self._on_devices:
            self.wait(path, len(data))
        views = share.layout.views(torch.frombuffer(data, dtype=torch.uint8))
        slots = enumerate(share.layout.slots)
        return {slot.name: views[number] for number, slot in slots if number not in share.parts}


def _copy(copies: Sequence[Copy]) -> None:
    if copies:
        torch._foreach_copy_([copy.view for copy in copies], [copy.source for copy in copies])


def _first_of(copies: Sequence[Copy]) -> Sequence[Copy]:
    count = size = 0
    while count < len(copies) and size < _AT_A_TIME:
        size += copies[count].view.nbytes
        count += 1
    return copies[:count]


def _in_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _is_still(file: _File, sources: Sequence[Tensor]) -> bool:
    """Whether what nobody trains is what lies in the image already."""
    before, file.fingerprint = file.fingerprint, fingerprint.of(sources)
    return before is not None and fingerprint.is_same(before, file.fingerprint)
