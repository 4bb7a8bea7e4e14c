"""Finds what no part holds and a resume has not restored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def lost(
    straight: Trial, resumed: Trial, stops: Sequence[At], unsteady: set[str], *, is_all: bool = False
) -> list[Lost]:
    """Return what is in no part and differs when the first body after a resume begins.

    `is_all`: with what the training that was not stopped never changes, or assigns before it reads it.
    """
    found: dict[str, Lost] = {}
    for rank in range(min(len(straight.ranks), len(resumed.ranks))):
        for record, reference in pairs(straight, resumed, stops, rank):
            if reference is None:
                break
            # Before the head of a loop nothing is restored yet, and later all follows from the first batch.
            if record.why != "first":
                continue
            now = _seen(record)
            for name, then in _seen(reference).items():
                is_known = name in found or name in unsteady or (then.get("is_dead") and not is_all)
                is_other = not is_known and name in now and now[name]["digest"] != then["digest"]
                if is_other and (is_all or _has_changed(straight, rank, name)):
                    values = then["value"], now[name]["value"]
                    found[name] = Lost(name, then["kind"], "note", then["fix"], record.at, *values)
    return sorted(found.values(), key=lambda one: (rank_of(one.name, one.kind), one.name))


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
