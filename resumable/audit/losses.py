"""Finds what no part holds and a resume has not restored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..trace.trace_file import At, Record
from .diagnosis import Lost, pairs
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
        if _digest(one, name) != _digest(two, name)
    }


def lost(straight: Trial, stopped: Trial, stops: Sequence[At], unsteady: set[str]) -> list[Lost]:
    """Return what changes in the training, is in no part, and differs after a resume."""
    found: dict[str, Lost] = {}
    for rank, one in _differing(straight, stopped, stops, unsteady):
        if one.name not in found and _has_changed(straight, rank, one.name):
            found[one.name] = one
    return _sorted(found)


def suspects(straight: Trial, resumed: Trial, stop: At, unsteady: set[str]) -> list[Lost]:
    """Return what is in no part and differs when the first body of a resumed training begins."""
    begins = _differing(straight, resumed, [stop], unsteady, why="first")
    return _sorted({one.name: one for _, one in begins})


def unstorable(straight: Trial, stops: Sequence[At]) -> list[Lost]:
    """Return what the checkpoints of these places could not have of the script's variables."""
    boundaries = straight.boundaries()
    return [
        Lost(name, why, "note", fix, at, None, None)
        for at, name, why, fix in {
            name: (at, name, why, fix)
            for at in reversed(stops)
            for name, why, fix in boundaries[at].more.get("unstorable", ())
        }.values()
    ]


def _differing(
    straight: Trial, stopped: Trial, stops: Sequence[At], unsteady: set[str], why: str = ""
) -> Iterator[tuple[int, Lost]]:
    """Yield what differs at each place of a rank; before the loop's head nothing is restored yet."""
    for rank in range(min(len(straight.ranks), len(stopped.ranks))):
        for record, reference in pairs(straight, stopped, stops, rank):
            if reference is None:
                break
            if record.why == "resumed" or (why and record.why != why):
                continue
            now = _seen(record)
            for name, then in _seen(reference).items():
                if name in now and now[name]["digest"] != then["digest"] and name not in unsteady:
                    values = then["value"], now[name]["value"]
                    yield rank, Lost(name, then["kind"], "note", then["fix"], record.at, *values)


def _sorted(found: Mapping[str, Lost]) -> list[Lost]:
    return sorted(found.values(), key=lambda one: (rank_of(one.name, one.kind), one.name))


def _has_changed(straight: Trial, rank: int, name: str) -> bool:
    digests = {_digest(one, name) for one in straight.ranks[rank] if one.why == "boundary"} - {None}
    return len(digests) > 1


def _seen(record: Record) -> Mapping[str, Any]:
    found: Mapping[str, Any] = record.more.get("unregistered", {})
    return found


def _digest(record: Record, name: str) -> str | None:
    seen = _seen(record).get(name)
    return seen["digest"] if seen else None
