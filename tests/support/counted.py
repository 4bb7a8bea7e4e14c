"""What the tests that count have in common: how often, and how many were bad."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest

Tally = Callable[[str, int, Collection[object]], None]


@pytest.fixture
def times(request: pytest.FixtureRequest) -> int:
    """How many times as far to count as at a commit: 1 there."""
    return int(request.config.getoption("times"))


@pytest.fixture
def tally(record_property: Callable[[str, object], None]) -> Tally:
    """Note how many cases of a method were tried, and fail unless all of them were good."""

    def note(method: str, count: int, bad: Collection[object]) -> None:
        record_property("tally", (method, count, len(bad)))
        shown = "\n".join(map(str, [*bad][:20]))
        assert not bad, f"{method}: {len(bad)} of {count} are bad:\n{shown}"

    return note


def lines(reports: Iterator[Any]) -> Iterator[str]:
    """Yield a line for each method: how many cases were tried in all tests, and how many were bad."""
    found: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for report in reports:
        for name, value in getattr(report, "user_properties", ()):
            if name == "tally":
                method, *counts = value
                found[method].append(tuple(counts))
    width = max(map(len, found), default=0)
    for method, counts in sorted(found.items()):
        tried, bad = map(sum, zip(*counts, strict=True))
        yield f"{method:{width}}  {tried:>9,}  {bad} bad"
