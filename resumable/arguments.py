"""What users pass, checked at the door."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any

from .errors import UsageError
from .manifest import Goal


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics as numbers."""
    return {name: _number(name, value) for name, value in metrics.items()}


def _number(name: str, value: Any) -> float:
    try:
        # float() would take the text of a number.
        return float(value.item() if hasattr(value, "item") else operator.pos(value))
    except (TypeError, ValueError, RuntimeError, OverflowError) as exc:
        raise UsageError(
            f"the metric {name} is not a number: {value!r}.",
            fix="the keywords of save() are metrics; other values go into state.vars or extra={...}.",
        ) from exc


def patterns(name: str, given: Any) -> tuple[str, ...]:
    """Return the patterns of `allow` or `override`; one string would be read letter by letter."""
    if isinstance(given, str) or not all(isinstance(pattern, str) for pattern in given):
        raise UsageError(f"{name}={given!r} is not a list of names.", fix=f"write {name}=['model.head.*'].")
    return tuple(given)


def goal(maximize: str | None, minimize: str | None) -> Goal | None:
    """Return the goal that one of the two names."""
    if maximize is not None and minimize is not None:
        raise UsageError(
            f"both maximize={maximize!r} and minimize={minimize!r} are given.",
            fix="one metric decides which checkpoint is the best: give one of them.",
        )
    for metric in (maximize, minimize):
        if metric is not None and not isinstance(metric, str):
            raise UsageError(
                f"{metric!r} is not the name of a metric.",
                fix="write maximize='val_acc', and save(val_acc=...).",
            )
    if maximize is not None:
        return Goal(maximize, True)
    return None if minimize is None else Goal(minimize, False)


def keep(keep: Any) -> int | None:
    """Return how many of the newest checkpoints stay; None for all."""
    if keep is None or (isinstance(keep, int) and keep >= 1 and keep is not True):
        return keep
    raise UsageError(
        f"keep={keep!r} does not say how many checkpoints stay.",
        fix="give a whole number from 1, or None to keep all.",
    )


def count(name: str, value: Any) -> int:
    """Return a whole number that is not negative."""
    if isinstance(value, int) and value >= 0 and not isinstance(value, bool):
        return value
    raise UsageError(f"{name}={value!r} is not a count.", fix=f"give {name} as a whole number.")


def seconds(name: str, value: Any) -> float:
    """Return a time that is more than none."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    raise UsageError(f"{name}={value!r} is not a time.", fix=f"give {name} in seconds, as {name}=60.")


def write(value: Any) -> bool:
    """Return whether all processes write what all of them share."""
    if value in ("one", "all"):
        return bool(value == "all")
    raise UsageError(
        f"write={value!r} does not say who writes what all processes share.",
        fix="give 'one', or 'all': each process writes its share.",
    )


def per_rank(given: Any, names: Iterable[str]) -> set[str]:
    """Return the extra parts that each process has for itself, by their whole names."""
    found = {f"extra.{name}" for name in patterns("per_rank", given)}
    if unknown := found - {*names}:
        raise UsageError(
            f"per_rank names {', '.join(sorted(unknown))}, which was not given to RunState.",
            fix="name parts of extra={...}: per_rank=['name'].",
        )
    return found
