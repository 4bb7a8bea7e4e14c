"""When the loss spikes: what a spike is, where to go back to, and when to give up."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..errors import CheckpointDamaged, CheckpointNotFound, UsageError
from ..run.directory import Run


class Spikes(NamedTuple):
    """How often the training went back recently."""

    times: int = 0
    newest: int = 0
    """The highest save number when it did so last."""

    def lately(self, newest: int, limit: int) -> int:
        """Return how often, as far as it counts: `limit` saves after the last time all are forgotten.

        >>> Spikes(2, newest=7).lately(9, limit=3), Spikes(2, newest=7).lately(10, limit=3)
        (2, 0)
        """
        return 0 if newest - self.newest >= limit else self.times


def is_spike(loss: float, above: float) -> bool:
    """Whether a loss is not finite, or too high.

    >>> is_spike(2.5, above=20), is_spike(math.nan, above=20), is_spike(21.0, above=20)
    (False, True, True)
    """
    if math.isnan(above):
        raise UsageError("above=nan is no bound.", fix="give a number that no healthy loss is above.")
    return not math.isfinite(loss) or loss > above


def number(name: str, value: Any) -> float:
    """Return a loss or a bound that a script gives as a number."""
    try:
        # item(): float() warns if the tensor has a gradient.
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError) as exc:
        raise UsageError(
            f"{name} is not a number: {value!r}.", fix="give a number, or a tensor with one element."
        ) from exc


def before(run: Run, later: int) -> int | None:
    """Return the checkpoint from which the training of a later one continued; None if there is none."""
    try:
        return run.open(later).about.parent
    except (CheckpointDamaged, CheckpointNotFound):
        # Its parent is unknown. The one before it may be of an abandoned branch, but is better than none.
        return max((number for number in run.numbers() if number < later), default=None)
