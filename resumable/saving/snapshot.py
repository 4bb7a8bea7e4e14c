"""A snapshot of the tensors at the moment of a save, and the copying that completes it in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from ..errors import SaveFailed
from ..files.codec import Encoded
from ..files.large_files import Content, Written
from ..files.threads import allow_captures
from .condition import ConditionWithoutLock
from .fence import Fence
from .gpu_buffers import Buffers
from .gpu_copies import Copy, Transfer
from .image_file import ImageFile, Share
from .pieces import Pieces

_AT_A_TIME = 16 << 20


class WrittenAround(SaveFailed):
    """A guarded tensor was written to outside a step; later snapshots guard nothing."""


class Snapshot:
    """The tensors as they were at a save; an error of the copying is raised to the reader."""

    def __init__(self, fence: Fence, buffers: dict[torch.device, Buffers], may_clone: bool) -> None:
        self._fence = fence
        self._buffers = buffers
        self._may_clone = may_clone
        self.waited_for = 0
        """The bytes that were copied to the host at once, because their device has no room for a copy."""
        self._data: dict[str, memoryview] = {}
        self._shares: dict[str, Share] = {}
        self._copies: list[Copy] = []
        self._later: list[Copy] = []
        self._transfers: list[Transfer] = []
        self._progress = ConditionWithoutLock()
        self._pieces = Pieces([], 0, self._progress)
        self._on_devices: set[str] = set()
        self._is_complete = True
        self._thread: threading.Thread | None = None
        self._has_passed = False
        self._error: SaveFailed | None = None

    def add(self, file: ImageFile, group: Encoded, *, is_settled: bool) -> None:
        """Add a file, whose header is in place, and the copies of its tensors that are still to be made."""
        self._data[file.path] = file.bytes()
        self._shares[file.path] = file.share
        sources = file.begin(group)
        for number in file.apart if sources else ():
            if sources[number].numel():
                slot, part = file.layout.slots[number], file.share.parts.get(number)
                copy = Copy(file.path, slot.name, slot.begin, file.views[number], sources[number], part=part)
                copy.is_settled = is_settled and file.is_frozen and copy.source.is_cuda
                self._copies.append(copy)

    def start(self, worth_a_fence: int, written_elsewhere: Callable[[], Collection[int]]) -> None:
        """Copy the tensors that may change at any moment, and start to copy the others."""
        by_device: dict[torch.device, list[Copy]] = {}
        at_once: list[Copy] = []
        for copy in self._copies:
            (by_device.setdefault(copy.source.device, []) if copy.source.is_cuda else at_once).append(copy)
        is_worth_it = sum(copy.view.nbytes for copy in at_once) >= worth_a_fence
        settled = self._fence.left_alone({copy.place() for copy in self._copies if copy.is_settled})
        for copy in self._copies:
            copy.is_settled &= copy.place() in settled
        self._copies.clear()
        guarded = self._fence.guarded(is_worth_it or bool(by_device)) | settled
        if guarded:
            guarded -= {*written_elsewhere()}
        if is_worth_it:
            candidates, at_once = at_once, []
            for copy in candidates:
                # Devices other than these order their kernels by thread.
                (self._later if copy.source.is_cpu and copy.is_guarded(guarded) else at_once).append(copy)
            for copy in self._later:
                copy.keep_sample(copy.put_off().taken().clone())
        for device, copies in by_device.items():
            buffers = self._buffers.setdefault(device, Buffers(device))
            transfer = Transfer(device, copies, guarded, buffers, may_clone=self._may_clone)
            self._transfers.append(transfer)
            self.waited_for += transfer.waited_for
        self._on_devices = {copy.path for copies in by_device.values() for copy in copies}
        self._pieces = Pieces(self._later, _AT_A_TIME, self._progress)
        if self._later or self._transfers:
            self._thread = threading.Thread(target=self._run, name="resumable-image")
            try:
                self._is_complete = False
                self._fence.shut(self._hold_back)
                self._thread.start()
            except BaseException as exc:
                # The system may refuse another thread, or a signal may come; the fence must not stay shut.
                # A thread that has begun still queues copies to a GPU, and opens the fence at its end.
                if not self._thread.is_alive():
                    self._is_complete = True
                    self._fence.open()
                self._fail(exc)
                raise
        _copy(at_once)

    def _run(self) -> None:
        try:
            if self._transfers:
                allow_captures()
            if self._error:
                raise self._error
            with torch.no_grad():
                for transfer in self._transfers:
                    transfer.queue()
                self._pieces.finish(_copy)
                for transfer in self._transfers:
                    transfer.wait()
                if not self._error:
                    self._refuse_changed(self._is_another)
        except BaseException as exc:
            self._fail(exc)
        finally:
            self._fence.open()
            self._pieces.stop()
            for transfer in self._transfers:
                transfer.end()
            # These references kept the sources alive, even if the training has dropped them.
            self._later, self._transfers = [], []
            self._is_complete = True
            self._progress.notify_all()

    def _fail(self, exc: BaseException) -> None:
        """Keep an error for the reader; what is not copied yet is not needed any more."""
        if not isinstance(exc, SaveFailed):
            cause, exc = (
                exc,
                SaveFailed(
                    f"the tensors could not be copied to host memory: {exc!r}.",
                    fix="mend the cause and call save() again. The checkpoints before it are untouched.",
                ),
            )
            exc.__cause__ = cause
        self._error = self._error or exc
        self._pieces.stop()

    def _guarded(self) -> list[Copy]:
        return [*self._later, *(copy for transfer in self._transfers for copy in transfer.guarded)]

    def _is_another(self, copy: Copy) -> bool:
        if copy.has_another_content():
            return True
        # A step that has passed changes the versions of its tensors too. Asked after the version: the step
        # may come in between.
        return copy.has_another_version() and (copy.is_settled or not self._has_passed)

    def _refuse_changed(self, is_changed: Callable[[Copy], bool]) -> None:
        for copy in self._guarded():
            if not is_changed(copy):
                continue
            if copy.is_settled:
                self._fence.distrust_frozen()
                raise WrittenAround(
                    f"{copy.name} is frozen and was the same in the last two saves, but was written to "
                    "before this save had copied it: that checkpoint is not made.",
                    fix="change nothing: until this process ends, frozen tensors are copied before save() "
                    "returns.",
                )
            self._fence.distrust()
            raise WrittenAround(
                f"{copy.name} was written to after save(), but not by a step of its optimizer, before it "
                "was copied: that checkpoint is not made.",
                fix="write to parameters (an average, a clamp) before save(), or after the next step. "
                "Until this process ends, all is copied before save() returns, which takes longer.",
            )

    def _hold_back(self) -> None:
        """Make a step wait until the snapshot is complete, and copy meanwhile what no thread has begun to."""
        try:
            if not self._is_complete and not self._has_passed:
                self._refuse_changed(Copy.has_another_version)
                self._has_passed = True
            with torch.no_grad():
                self._pieces.help(_copy)
        except Exception as exc:
            # The save reports it, not the step.
            self._fail(exc)
        for transfer in self._transfers:
            transfer.hold_back()

    def wait(self, path: str, end: int) -> None:
        """Wait until the first `end` bytes of a file are copied; raise the error of the copying."""
        needed = self._pieces.needed(path, end)
        # An error is known only when everything is copied, so no file is complete before.
        is_last = end >= len(self._data[path]) or path in self._on_devices
        self._progress.wait_for(
            lambda: self._is_complete or (not is_last and self._pieces.copied() >= needed)
        )
        if self._error:
            raise self._error

    def has_failed(self) -> bool:
        """Wait for the end of the copying, and return whether it failed."""
        # A handler may have interrupted the lines that complete one whose thread was refused.
        thread = self._thread
        self._progress.wait_for(lambda: self._is_complete or not (thread and thread.is_alive()))
        return self._error is not None

    def paths(self) -> list[str]:
        """Return the names of the files."""
        return [*self._data]

    def contents(self, before: Mapping[str, Written]) -> dict[str, Content]:
        """Return the content of each file, given those that the last save wrote."""
        found = {}
        for path, data in self._data.items():
            share, ready = self._shares[path], partial(self.wait, path)
            found[path] = Content(data, ready, before.get(path), begin=share.begin, size=share.size)
        return found

    def tensors(self, path: str) -> dict[str, Tensor]:
        """Return the tensors of a file as they were, without those that this process has only in part."""
        share, data = self._shares[path], self._data[path]
        if self._pieces.are_of(path) or path in self._on_devices:
            self.wait(path, len(data))
        views = share.layout.views(torch.frombuffer(data, dtype=torch.uint8))
        slots = enumerate(share.layout.slots)
        return {slot.name: views[number] for number, slot in slots if number not in share.parts}


def _copy(copies: Sequence[Copy]) -> None:
    if copies:
        torch._foreach_copy_([copy.view for copy in copies], [copy.source for copy in copies])
