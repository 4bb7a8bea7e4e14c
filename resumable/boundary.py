"""The places between two steps where a training can stand, and what may be due there."""

from __future__ import annotations

import signal
from enum import Enum
from typing import NamedTuple


class Boundary(Enum):
    """Where a checkpoint was taken, which decides where the loops continue.

    >>> Boundary("batch")
    <Boundary.BATCH: 'batch'>
    """

    BATCH = "batch"
    """Between two batches of an epoch; after the last one, the rest of the epoch's body is still to run."""
    EPOCH = "epoch"
    """The epoch is finished; the next one has not begun."""
    STEP = "step"
    """Between two bodies of ``steps()``."""
    OUTSIDE = "outside"
    """No loop of ours was running."""


class Due(NamedTuple):
    """What is to be done at a boundary: to save, and perhaps to leave as a signal asks."""

    why: str
    leaves: signal.Signals | None = None
