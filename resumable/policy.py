"""Pure decisions: which checkpoint is the best, and which ones stay."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from .manifest import Best, Goal


def is_better(goal: Goal, value: float | None, than: float | None) -> bool:
    """Whether `value` beats `than`; one that is missing, infinite or NaN never does."""
    if value is None or not math.isfinite(value):
        return False
    if than is None:
        return True
    return value > than if goal.maximize else value < than


def update_best(
    best: Best | None, goal: Goal | None, metrics: Mapping[str, float], number: int
) -> Best | None:
    """Return the best after the save `number` with `metrics`; an equal value does not replace it."""
    if goal is None:
        return best
    value = metrics.get(goal.metric)
    if not is_better(goal, value, best.value if best else None):
        return best
    assert value is not None
    return Best(goal, value, number)


def best_of(goal: Goal | None, history: Iterable[tuple[int, Mapping[str, float]]]) -> Best | None:
    """Return the best of many saves, given as (number, metrics), oldest first."""
    best: Best | None = None
    for number, metrics in history:
        best = update_best(best, goal, metrics, number)
    return best


def to_prune(numbers: Sequence[int], keep: int | None, protect: Iterable[int | None]) -> list[int]:
    """Return which of the save numbers, oldest first, may go: not the newest `keep` and the protected ones.

    >>> to_prune([1, 2, 3, 4], keep=2, protect=[1])
    [2]
    """
    if keep is None:
        return []
    stay = set(protect)
    return [number for number in numbers[:-keep] if number not in stay]
