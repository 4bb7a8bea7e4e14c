"""Finds what no part holds and a resume has not restored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..trace.trace_file import At, Record
from .diagnosis import Lost, Unlike, pairs
from .trials import Trial


def rank_of(name: str, kind: str) -> tuple[bool, bool]:
    """Return a rank by how likely a training depends on it: variables before objects, data before numbers."""
    return "." in name, kind in ("number", "text", "none")


def unsteady_names(trials: Sequence[Trial]) -> set[str]:
    """Return what no part holds and differs between equal runs, such as times."""
    first, *others = trials
    return {
        name
        for other in others
        for records, met in zip(first.ranks, other.ranks, strict=False)
        for one, two in zip(records, met, strict=False)
        for name in _seen(one).keys() | _seen(two).keys()
        if _seen(one).get(name) != _seen(two).get(name)
    }


def lost(
    straight: Trial, resumed: Trial, stops: Sequence[At], unsteady: set[str], unlike: Unlike | None
) -> list[Lost]:
    """Return what no checkpoint has, and what changes, is in no part and differs as a resumed body begins."""
    found = {**_unstorable(straight, stops)}
    differing = sorted(
        _differing(straight, resumed, stops, unsteady),
        key=lambda one: (rank_of(one.name, one.kind), one.name),
    )
    for one in differing:
        found.setdefault(one.name, one)
    # Where the training has become another one, all of it differs.
    return [one for one in found.values() if unlike is None or one.at.step <= unlike.one.at.step]


def _differing(straight: Trial, resumed: Trial, stops: Sequence[At], unsteady: set[str]) -> Iterator[Lost]:
    for rank in range(min(len(straight.ranks), len(resumed.ranks))):
        for record, reference in pairs(straight, resumed, stops, rank):
            # Before the head of a loop nothing is restored yet, and later all follows from the first batch.
            now = _seen(record) if record.why == "first" and reference else {}
            then = _seen(reference) if reference else {}
            for name in now.keys() & then.keys() - unsteady:
                one, other = then[name], now[name]
                if one["digest"] != other["digest"] and _has_changed(straight, rank, name):
                    yield Lost(name, one["kind"], one["fix"], record.at, one["value"], other["value"])


def _unstorable(straight: Trial, stops: Sequence[At]) -> dict[str, Lost]:
    boundaries = straight.boundaries()
    return {
        name: Lost(name, why, fix, at, None, None)
        for at in reversed(stops)
        for name, why, fix in boundaries[at].more.get("unstorable", ())
    }


def _has_changed(straight: Trial, rank: int, name: str) -> bool:
    seen = [_seen(one) for one in straight.ranks[rank] if one.why == "boundary"]
    return len({one[name]["digest"] for one in seen if name in one}) > 1


def _seen(record: Record) -> Mapping[str, Any]:
    found: Mapping[str, Any] = record.more.get("unregistered", {})
    return found
