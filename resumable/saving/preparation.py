"""What a save needs before it begins: memory, and room on the disk."""

from __future__ import annotations

import contextlib
import os
import shutil
from functools import partial

from ..files import large_files
from ..run import policy
from ..training import Training
from .image import Image
from .snapshot import Snapshot

_WORTH_PREPARING = 64 << 20


class Preparation:
    """Prepares the host and the disk for the saves of a training."""

    def __init__(self, training: Training) -> None:
        self._training = training

    def prepare(self, image: Image, *, is_first: bool) -> None:
        """Warn of a disk without room, and get the memory for the first save."""
        parts, crew = self._training.parts, self._training.crew
        self.warn_of_room(parts.size() if parts.saves_all else 0)
        size = parts.size_here() if parts.saves_all else 0
        if crew.writers > 1 and not parts.is_divided:
            # A share is made of whole blocks.
            size = size // crew.writers + large_files.BLOCK
        if size >= _WORTH_PREPARING and is_first:
            image.reserve(size + size // 1000)

    def warn_of_room(self, size: int) -> None:
        """Warn where the disk has no room for all that is to be kept, if a checkpoint takes `size` bytes."""
        run, options = self._training.run, self._training.options
        if not self._training.crew.leads or not os.path.isdir(run.path):
            return
        # If the disk cannot be asked, the save itself reports it.
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(run.path).free
            missing = partial(policy.room, options.keep, options.goal, size, free=free)
            # Nearly always there is room without the checkpoints that are there, which takes time to count.
            if missing(there=0) and (text := missing(there=len(run.numbers()))):
                self._training.once.warn(f"{run}: {text}", about="room")

    def warn_of_slow_copies(self, image: Image, taken: Snapshot) -> None:
        """Warn where the training waits for the copies of a save."""
        once = self._training.once
        if taken.waited_for:
            once.warn(
                f"the device has no room for a copy of {taken.waited_for:,} bytes of the state, so the "
                "training waits while each save copies them to host memory. Parameters and moments of an "
                "optimizer of torch.optim need no such copy.",
                about="room on the device",
            )
        if image.is_pageable():
            once.warn(
                "the driver refused to register the host memory for saves, so copies from the GPU are "
                "slower, and the step after each save waits for them. Raise the limit of locked memory "
                "(ulimit -l), if there is one.",
                about="pageable memory",
            )
