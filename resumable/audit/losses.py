"""Finds what no part holds and a resume has not restored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..trace.trace_file import At, Record
from .diagnosis import Lost, pairs
from .trials import Trial

LOOP = "loop"
"""The reason for a record: the first loop of a resumed process begins."""


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


def lost(straight: Trial, resumed: Trial, stops: Sequence[At], unsteady: set[str]) -> list[Lost]:
    """Return what changes in the training, is in no part, and differs when a resumed body begins."""
    found = _differing(straight, resumed, stops, unsteady)
    return [one for one, rank, is_dead in found if not is_dead and _has_changed(straight, rank, one.name)]


def suspects(straight: Trial, resumed: Trial, stop: At, unsteady: set[str]) -> list[Lost]:
    """Return all that is in no part and differs when a resumed training begins."""
    return [one for one, _, _ in _differing(straight, resumed, [stop], unsteady, is_all=True)]


def _differing(
    straight: Trial, resumed: Trial, stops: Sequence[At], unsteady: set[str], *, is_all: bool = False
) -> list[tuple[Lost, int, bool]]:
    """Return what differs, each with its rank and whether it is assigned before it is read."""
    found: dict[str, tuple[Lost, int, bool]] = {}
    for rank in range(min(len(straight.ranks), len(resumed.ranks))):
        # Before the head of a loop nothing is restored yet, and later all follows from the first batch.
        begins = [two for two in pairs(straight, resumed, stops, rank) if two[0].why == "first"]
        if is_all and not begins:
            # Bodies without batches.
            loops = (one for one in resumed.ranks[rank] if one.why == LOOP)
            begins = [(one, straight.boundaries(rank).get(at)) for one, at in zip(loops, stops, strict=False)]
        for record, reference in begins:
            now = _seen(record)
            for name, then in _seen(reference).items() if reference else ():
                is_known = name in found or name in unsteady or name not in now
                if not is_known and now[name]["digest"] != then["digest"]:
                    values = then["value"], now[name]["value"]
                    one = Lost(name, then["kind"], "note", then["fix"], record.at, *values)
                    found[name] = one, rank, then.get("is_dead", False)
    return sorted(found.values(), key=lambda one: (rank_of(one[0].name, one[0].kind), one[0].name))


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


def _has_changed(straight: Trial, rank: int, name: str) -> bool:
    digests = {_digest(one, name) for one in straight.ranks[rank] if one.why == "boundary"} - {None}
    return len(digests) > 1


def _seen(record: Record) -> Mapping[str, Any]:
    found: Mapping[str, Any] = record.more.get("unregistered", {})
    return found


def _digest(record: Record, name: str) -> str | None:
    seen = _seen(record).get(name)
    return seen["digest"] if seen else None
