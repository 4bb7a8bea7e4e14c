"""What the tests that count have in common: how often, how many were bad, and which promise they prove."""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest

Tally = Callable[[str, int, Collection[object]], None]


@pytest.fixture
def nightly(request: pytest.FixtureRequest) -> bool:
    """Whether to count ten to a hundred times as far as CI does."""
    return bool(request.config.getoption("nightly"))


@pytest.fixture
def tally(record_property: Callable[[str, object], None]) -> Tally:
    """Note how many cases of a method were tried, and fail unless all of them were good."""

    def note(method: str, count: int, bad: Collection[object]) -> None:
        record_property("tally", (method, count, len(bad)))
        shown = "\n".join(map(str, [*bad][:20]))
        assert not bad, f"{method}: {len(bad)} of {count} are bad:\n{shown}"

    return note


OF_HEAVY = 3
"""Of the cases of a heavy test every third runs at each commit, unless it says how many do."""


def sample(items: list[pytest.Item]) -> None:
    """Leave every n-th case of a test that is marked as quick(n), and make the others heavy.

    Of a heavy test, and of one that is marked as sampled(n), the others are nightly.
    """
    # What takes longest begins first: at the end one process would work, and the others wait.
    items.sort(key=lambda item: ("test_remote_proofs" not in item.nodeid, "promises" not in item.path.parts))
    for name, elsewhere in (("quick", pytest.mark.heavy), ("sampled", pytest.mark.nightly)):
        seen: Counter[tuple[str, bool]] = Counter()
        # In an order of chance: every third of them may have the same argument.
        for item in sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode())):
            is_heavy, mark = item.get_closest_marker("heavy") is not None, item.get_closest_marker(name)
            each = mark.args[0] if mark else OF_HEAVY if is_heavy and name == "sampled" else 1
            if not item.get_closest_marker(elsewhere.name):
                # What is heavy is a series of its own: of both there is some at every commit.
                series = item.nodeid.partition("[")[0], is_heavy
                if seen[series] % each:
                    item.add_marker(elsewhere)
                seen[series] += 1


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
