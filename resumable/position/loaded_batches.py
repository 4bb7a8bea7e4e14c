"""The batches between a loader and the training: those loaded ahead, and the one in hand."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple


class Phase(Enum):
    """How far the loops over an epoch's batches have come."""

    DUE = "due"
    """Batches are left: no loop over them has begun, or one is open."""
    LEFT = "left"
    """The loop was left: for good, unless an exception is being handled."""
    KEPT = "kept"
    """The loop was left, and the body of `epochs()` with it: the next loop continues there."""
    OVER = "over"
    """No batches are left: another loop is an error, or the next epoch."""
    PASSED = "passed"
    """No batches were left where the training resumed: the first loop over them is empty."""


class Loaded(NamedTuple):
    """A batch that was loaded and not handed out."""

    size: int
    mark: Any
    """The source's mark after it."""
    digest: Any = None
    """Its digest, if there is a trace."""
    draws: Any = None
    """The generators from which `through=` draws for it."""


@dataclass(slots=True)
class InHand:
    """The batch that the training works on."""

    size: int
    before: Any
    """The source's mark before it."""
    draws: Any
    updates: int
    """The optimizer steps that were made before it."""
    is_step: bool = False
    """Whether it counts as a step when it is done."""
    is_last: bool = False
    """Whether no other batch will be requested: it is done when the optimizer steps."""

    def leave_out(self) -> None:
        """Count it as done, and nothing as trained; a break after it does not bring it back."""
        self.size, self.is_step, self.updates = 0, False, -1
