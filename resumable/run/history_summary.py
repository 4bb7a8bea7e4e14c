"""What the start and the end of a process repeat of the lines before, so that no start has to read them."""

from __future__ import annotations

from typing import NamedTuple, TypeGuard

from ..files.strict_json import Json
from .checkpoint import HIGHEST

KEY = "known"
"""The key of the line that has it."""


class Summary(NamedTuple):
    """A history up to a line, as far as a start that continues from its last checkpoint asks for it."""

    highest: int
    """The highest save number."""
    stands_on: int | None
    """The checkpoint that the training stands on; each `superseded` in the file is as seen from there."""
    last: int | None
    """The last save of the attempt."""
    took: tuple[float | None, float] | None
    """The cost of the last save that has one: seconds lost, if known, and until durable."""

    def to_json(self) -> Json:
        """Return it as it stands in a line."""
        return {**self._asdict(), "took": self.took and [*self.took]}


def parsed(found: Json) -> Summary | None:
    """Return the summary in a line; None if there is none as this library writes it.

    >>> parsed({"highest": 9, "stands_on": 9, "last": 9, "took": [None, 0.5]})
    Summary(highest=9, stands_on=9, last=9, took=(None, 0.5))
    """
    # Earlier versions write what is "skipped", too.
    if not isinstance(found, dict) or found.keys() - {"skipped"} != {*Summary._fields}:
        return None
    one = Summary(*map(found.__getitem__, Summary._fields))
    numbers = [number for number in (one.stands_on, one.last) if number is not None]
    if not all(map(_is_number, [one.highest, *numbers])) or not _is_cost(one.took):
        return None
    return one._replace(took=one.took and (one.took[0], one.took[1]))


def is_time(value: Json) -> TypeGuard[float]:
    """Return whether this is a number of seconds."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1 << 53


def _is_number(value: Json) -> bool:
    return type(value) is int and 0 <= value <= HIGHEST


def _is_cost(value: Json) -> bool:
    if value is None:
        return True
    is_pair = isinstance(value, list) and len(value) == 2
    return is_pair and is_time(value[1]) and (value[0] is None or is_time(value[0]))
