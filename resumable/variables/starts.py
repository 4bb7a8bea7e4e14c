"""With what the variables of a script begin, before its loop: one that was edited since is told."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ..objects.contents import mark

Starts = Mapping[str, Any]
_PLAIN = (bool, int, float, str)
_LONGEST = 200
_CLOCKS = {clock: clock() - 1 for clock in (time.time, time.monotonic, time.perf_counter, time.process_time)}


def of(variables: Mapping[str, Any]) -> Starts:
    """Return the variables that are numbers or short texts, without the times of this process."""
    return {
        name: one
        for name, one in variables.items()
        if type(one) in _PLAIN and name.isidentifier() and len(repr(one)) <= _LONGEST and not _is_time(one)
    }


def read(starts: Starts, names: Collection[str] | None) -> Starts:
    """Return those of some variables, or all."""
    return {name: one for name, one in starts.items() if names is None or name in names}


def _is_time(value: Any) -> bool:
    return type(value) is float and any(begun <= value <= clock() + 1 for clock, begun in _CLOCKS.items())


def edited(then: Starts, variables: Mapping[str, Any], restored: Collection[str]) -> Iterator[str]:
    """Yield which variables begin with another value than they did; `restored`: what the checkpoint has."""
    for name, now in of(variables).items():
        if name in then and mark(now) != mark(then[name]):
            wins = "it goes on as the checkpoint has it" if name in restored else "that of the script is used"
            yield f"{name} was {then[name]!r} as the training began, and is {now!r} now: {wins}"
