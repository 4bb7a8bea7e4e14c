"""Figures of a result, and what they are divided by."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from .rounds import Values
from .scenarios import Result

OURS, COMMON = "resumable", "torch.save"


@dataclass(frozen=True)
class Column:
    """A figure of every contender, and what it is divided by."""

    key: str
    heading: str
    over: str
    """"torch.save", "write" or "read" (the raw limit), or "" for what is a ratio already."""
    meaning: str
    compared_by: str = ""
    """The figure that two contenders are compared by, where this one is a ratio to its own."""


COLUMNS = (
    Column("call", "call", COMMON, "time until `save()` returns, over torch.save's with fsync"),
    Column("lost", "lost", COMMON, "training time lost to a save, over torch.save's with fsync"),
    Column("durable", "durable", "write", "time until the save is durable, over the best raw write"),
    Column("load", "load", "read", "load into the live objects, over the best raw read (warm cache)"),
    Column("memory", "memory", "", "peak extra host memory of saving, over the state's size"),
    Column(
        "first",
        "first",
        "",
        "the first save of a process, over its own later ones, until durable",
        "first_durable",
    ),
    Column(
        "pause", "pause", COMMON, "longest time that the main thread is kept from running, over torch.save's"
    ),
    Column("frozen_bytes", "90 % bytes", "", "with 90 % frozen: bytes written, over the state's size"),
    Column(
        "frozen_time",
        "90 % time",
        "",
        "with 90 % frozen: time until durable, over its own with nothing frozen",
        "frozen_durable",
    ),
    Column("tensors_durable", "small save", COMMON, "many small tensors: until durable, over torch.save's"),
    Column("tensors_load", "small load", COMMON, "many small tensors: load, over torch.load's"),
)


def ratios(result: Result, name: str, column: Column) -> list[float]:
    """Return a figure of a contender over what it is measured by, round by round."""
    values = result.contenders.get(name, {}).get(column.key, [])
    if not column.over:
        return values
    base = _base(result, column)
    if len(base) == len(values):
        return [value / one for value, one in zip(values, base, strict=True)]
    return [value / statistics.median(base) for value in values] if base else []


def _base(result: Result, column: Column) -> list[float]:
    if column.over == COMMON:
        base = result.contenders.get(COMMON, {}).get(column.key, [])
        # Of differences of times the median is a sound base, a single one is not.
        return [statistics.median(base)] * len(base) if base else []
    return best_limit(result, column.over)


def best_limit(result: Result, what: str) -> list[float]:
    """Return the rounds of the way that is the fastest by its median."""
    return best_of(result.limits, what)


def best_of(limits: Values, what: str) -> list[float]:
    """Return the rounds of the fastest way to write or to read."""
    ways = [values for name, values in limits.items() if name.startswith(f"{what}:")]
    return min(ways, key=statistics.median, default=[])


def middle(values: Sequence[float]) -> float | None:
    """Return the median, if there is one."""
    return statistics.median(values) if values else None


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the values between which the middle half of all lies."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def seconds(result: Result, name: str, key: str) -> float | None:
    """Return the median of a contender's figure."""
    return middle(result.contenders.get(name, {}).get(key, []))


def pairs(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Return the quotients of two figures, round by round, as far as both were measured."""
    return [value / one for value, one in zip(values, base, strict=False) if one > 0]


def durable(result: Result, megabytes: float) -> list[float]:
    """Return a save of so much over the best raw way to write it, round by round."""
    if found := result.sizes.get(f"{megabytes:g}"):
        return pairs(found.get(OURS, []), best_of(found, "write"))
    if megabytes == result.settings["size"]:
        return ratios(result, OURS, next(column for column in COLUMNS if column.key == "durable"))
    return []


def fresh(result: Result) -> list[float]:
    """Return a load in a fresh process over the best raw way to read as much, round by round."""
    return pairs(result.fresh.get("load", []), best_of(result.fresh, "read"))


def batch(result: Result, setup: str, figure: str) -> tuple[list[float], list[float]]:
    """Return what a batch takes of this library's loop and of the plain one, round by round."""
    ours, plain = (result.batches.get(f"{setup}, {loop}", {}).get(figure, []) for loop in ("ours", "plain"))
    return ours, plain


def over(numerator: float | None, denominator: float | None) -> float | None:
    """Return the quotient of two medians, if there is one."""
    # A difference of times that noise made negative measures nothing.
    if numerator is None or denominator is None or denominator <= 0:
        return None
    return numerator / denominator
