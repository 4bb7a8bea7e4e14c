"""Measurements in turns: what disturbs one contender in a round disturbs all of them."""

from __future__ import annotations

import gc
import math
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from time import perf_counter

Figures = dict[str, float]
"""What one measurement gave, by column."""
Values = dict[str, list[float]]
"""What the rounds gave, by column."""


class Failed(Exception):
    """What went wrong in another process, in a line."""


_STARTED = perf_counter()


def in_turns(
    what: str,
    jobs: Mapping[str, Callable[[int], Figures]],
    rounds: int,
    budget: float,
    errors: dict[str, dict[str, str]],
    until: float = math.inf,
) -> dict[str, Values]:
    """Do all jobs once a round, each round beginning with another one; the first round only warms up.

    A job that has taken its budget of seconds is not repeated, and none begins after the moment `until`, by
    `time.perf_counter()`. One that fails is left out, its reason goes to `errors`.
    """
    taken: dict[str, list[Figures]] = {name: [] for name in jobs}
    spent: dict[str, float] = defaultdict(float)
    for number in range(rounds + 1):
        tell(f"{what}: {f'round {number} of {rounds}' if number else 'warming up'}")
        put_garbage_aside()
        for name in rotated(list(taken), number):
            if spent[name] > budget or perf_counter() > until:
                continue
            # Nobody pays for the pages that the one before left dirty.
            os.sync()
            start = perf_counter()
            try:
                taken[name].append(jobs[name](number))
            except Exception as exc:
                errors.setdefault(name, {})[what] = reason_of(exc)
                del taken[name]
            spent[name] += perf_counter() - start
    return {name: _by_column(figures[1:] or figures) for name, figures in taken.items() if figures}


def put_garbage_aside() -> None:
    """Collect once for all: what the libraries keep would be looked through at every collection."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def tell(what: str) -> None:
    """Say what is being done, and since when."""
    print(f"{perf_counter() - _STARTED:5.0f} s  {what}", file=sys.stderr, flush=True)


def reason_of(exc: Exception) -> str:
    """Return an error in a line."""
    told = str(exc) if isinstance(exc, Failed) else f"{type(exc).__name__}: {exc}"
    return told.splitlines()[0][:300]


def rotated(names: list[str], number: int) -> list[str]:
    """Return the names, beginning with another one in each round."""
    first = number % len(names) if names else 0
    return names[first:] + names[:first]


def _by_column(rounds: list[Figures]) -> Values:
    columns = {column for figures in rounds for column in figures}
    return {column: [figures[column] for figures in rounds] for column in sorted(columns)}
