"""Seeds every sample by itself, so that its random numbers depend on nothing else."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

Place = tuple[int, int, Any]
"""Epoch, position in the epoch's order, and the sample's index."""


class Seeded(Dataset[Any]):
    """The user's dataset, which seeds the generators of its process before each sample."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset = dataset
        self._seed = seed

    def __getitem__(self, place: Place) -> Any:
        epoch, position, index = place
        self._reseed(epoch, position)
        return self.dataset[index]

    @property
    def __getitems__(self) -> Callable[[Sequence[Place]], Any] | None:
        # A batch that is loaded at once has the seed of its first sample.
        load_all = getattr(self.dataset, "__getitems__", None)
        if not load_all:
            return None

        def load(places: Sequence[Place]) -> Any:
            self._reseed(*places[0][:2])
            return load_all([index for _, _, index in places])

        return load

    def _reseed(self, epoch: int, position: int) -> None:
        text = f"{self._seed}/{epoch}/{position}".encode()
        digest = hashlib.blake2b(text, digest_size=20).digest()
        for_python, for_numpy, for_torch = struct.unpack("<QIQ", digest)
        random.seed(for_python)
        # A seed of more than 32 bits would take numpy twenty times as long.
        np.random.seed(for_numpy)
        # torch.manual_seed looks at every device, which takes a hundred times as long.
        torch.default_generator.manual_seed(for_torch >> 1)
