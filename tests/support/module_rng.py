"""Generators of a module, as scripts of many files have them."""

from __future__ import annotations

import random

import numpy as np
import torch

NUMPY = np.random.default_rng(0)
PYTHON = random.Random(0)
TORCH = torch.Generator().manual_seed(0)
LATE: np.random.Generator | None = None
SEVERAL = {"flip": [random.Random(0)]}


def begin() -> None:
    """Stand where a process stands that has just imported this module."""
    global NUMPY, PYTHON, TORCH, LATE
    NUMPY, PYTHON, TORCH, LATE = np.random.default_rng(0), random.Random(0), torch.Generator(), None
    TORCH.manual_seed(0)
    SEVERAL["flip"][0].seed(0)


def jitter() -> float:
    """Draw from a generator of this module."""
    return PYTHON.gauss(0, 1)


def late() -> float:
    """Draw from a generator that is made with the first sample."""
    global LATE
    if LATE is None:
        LATE = np.random.default_rng(0)
    return LATE.normal()


class Blur:
    """A transform whose generator its class has."""

    own = np.random.RandomState(0)

    def __call__(self) -> float:
        return float(self.own.randn())
