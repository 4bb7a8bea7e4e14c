"""The host copy of the tensors, taken behind a fence without stopping the training."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ..files import tensor_file
from ..files.codec import Encoded
from ..files.tensor_file import Layout
from ..processes.write_shares import Range
from .fence import Fence
from .gpu_buffers import Buffers
from .host_memory import HostMemory, gpu_of
from .image_file import ImageFile
from .save_cost import Waiting
from .snapshot import Snapshot

_WORTH_A_FENCE = 64 << 20
"""Fewer bytes in host memory are copied at once: that takes some milliseconds, and needs no trust."""

_STEPS_TO_PEAK = 2


class Image:
    """One buffer of host memory, laid out like the files, for the snapshots of all saves."""

    def __init__(
        self,
        optimizers: Sequence[Any] = (),
        written_elsewhere: Callable[[], Collection[int]] = frozenset,
        waiting: Waiting = contextlib.nullcontext,
        worth_a_fence: int = _WORTH_A_FENCE,
    ) -> None:
        self._fence = Fence(optimizers, waiting)
        self._written_elsewhere = written_elsewhere
        self._worth_a_fence = worth_a_fence
        self._layouts: dict[str, tuple[tuple[Any, ...], Layout]] = {}
        self._files: dict[str, ImageFile] = {}
        self._memory: HostMemory | None = None
        self._buffers: dict[torch.device, Buffers] = {}
        self._taken = 0
        self._owner = os.getpid()
        self._reserving: threading.Thread | None = None
        self._last: Snapshot | None = None

    def reserve(self, size: int) -> None:
        """Allocate about `size` bytes for the image in the background."""
        self.settle()
        if self._memory is None or self._memory.size < size:
            gpu = gpu_of(self._fence.parameters())
            reserving = threading.Thread(target=self._reserve, args=(size, gpu))
            reserving.start()
            self._reserving = reserving

    def _reserve(self, size: int, gpu: torch.device | None) -> None:
        # The save will fail for the same reason, and report it.
        with contextlib.suppress(MemoryError, OSError):
            self._allocate(size, gpu)

    def settle(self) -> None:
        """Wait until no thread of the image works in the background."""
        if self._owner != os.getpid():
            # A forked process does not inherit the memory.
            self._owner, self._memory, self._files, self._buffers = os.getpid(), None, {}, {}
            self._reserving = self._last = None
        if self._reserving:
            self._reserving.join()
        # Even if its save has failed, it may still be copying into the memory that the next one needs.
        if self._last and self._last.has_failed():
            self._forget()
        self._last = None

    def _forget(self) -> None:
        for file in self._files.values():
            file.forget()

    def distrust(self) -> None:
        """Copy everything at once from now on: other optimizers than those given write to it."""
        self._fence.distrust()

    def catch_up(self) -> None:
        """Let this thread's streams wait for the last steps of the optimizers, on whatever streams."""
        self._fence.catch_up()

    def is_pageable(self) -> bool:
        """Return whether the driver of a GPU refused to register the memory of the image."""
        return self._memory is not None and self._memory.is_refused

    def sizes(self, groups: Mapping[str, Encoded]) -> dict[str, int]:
        """Return the size of each file, from a layout that is kept until a tensor has another shape."""
        before, self._layouts = self._layouts, {}
        for path, group in groups.items():
            key, layout = before.get(path, (None, None))
            if layout is None or key != group.key:
                layout = tensor_file.layout(group.tensors, group.aliases, group.begins)
            self._layouts[path] = group.key, layout
        return {path: layout.size for path, (_, layout) in self._layouts.items()}

    def headers(self) -> dict[str, bytes]:
        """Return the header of each file of the last call of `sizes`."""
        return {path: layout.header for path, (_, layout) in self._layouts.items()}

    def _allocate(self, size: int, gpu: torch.device | None) -> None:
        self._release()
        memory = HostMemory(_in_pages(size))
        memory.touch()
        memory.register(gpu)
        self._memory = memory

    def _release(self) -> None:
        for file in self._files.values():
            file.release()
        for buffers in [*self._buffers.values()]:
            buffers.forget_plan()
        if self._memory:
            self._memory.free()
        self._memory = None

    def close(self) -> None:
        """Free the memory and remove the hooks; a snapshot in use keeps its part of the memory."""
        self.settle()
        self._files, self._buffers = {}, {}
        self._release()
        self._fence.remove()

    @torch.no_grad()
    def take(
        self,
        groups: Mapping[str, Encoded],
        mine: Mapping[str, Range] | None = None,
        settled: Collection[str] = (),
    ) -> Snapshot:
        """Begin a snapshot of the tensors of each file; what is guarded is copied behind the fence.

        Where several processes share a checkpoint, it has only the bytes of each file that are `mine`. The
        `settled` files were the same in the last two saves.
        """
        self.settle()
        self._plan(groups, mine)
        # The training's peak is known after its second step: the first one makes moments and gradients.
        # Where no hook tells of steps, a save stands for one.
        may_clone = max(self._fence.steps(), self._taken) >= _STEPS_TO_PEAK
        snapshot = Snapshot(self._fence, self._buffers, may_clone)
        self._taken += 1
        try:
            for path, group in groups.items():
                if mine is None or path in mine:
                    snapshot.add(self._files[path], group, is_settled=path in settled)
            snapshot.start(self._worth_a_fence, self._written_elsewhere)
        except BaseException:
            self._forget()
            raise
        finally:
            # No earlier: the handler of a signal that closes the image would wait for what has not begun.
            self._last = snapshot
        return snapshot

    def _plan(self, groups: Mapping[str, Encoded], mine: Mapping[str, Range] | None) -> None:
        sizes = self.sizes(groups)
        ranges = {path: (0, size) for path, size in sizes.items()} if mine is None else mine
        files: dict[str, ImageFile] = {}
        for path, part in ranges.items():
            file, (_, layout) = self._files.get(path), self._layouts[path]
            if file is None or not file.is_planned(layout, part):
                file = ImageFile(path, groups[path], layout, part)
            files[path] = file
        if files == self._files and self._memory:
            return
        size = sum(_in_pages(file.layout.size) for file in files.values())
        gpu = gpu_of(tensor for group in groups.values() for tensor in group.tensors.values())
        if self._memory is None or self._memory.size < size:
            self._allocate(size, gpu)
        assert self._memory
        self._memory.register(gpu)
        begin = 0
        for file in files.values():
            file.place(self._memory, begin)
            begin += _in_pages(file.layout.size)
        # Last: the handler of a signal that saves meanwhile has files of its own, which lie elsewhere.
        self._files = files


def _in_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
