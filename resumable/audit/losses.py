"""Finds what no part holds and a resume has not restored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..trace.trace_file import At, Record
from .diagnosis import Lost, pairs
from .trials import Trial

LOOP = "loop"
"""The reason for a record: the first loop of a resumed process begins."""


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
    for rank in range(min(len(straight.ranks), len(stopped.ranks))):
        first = next((one for one in straight.ranks[rank] if one.why == "boundary"), None)
        for record, reference in pairs(straight, stopped, stops, rank):
            if reference is None or first is None:
                break
            if record.why == "resumed":
                # What the script assigns before the first batch is not lost.
                continue
            for name, seen in _seen(reference).items():
                is_other = name in _seen(record) and _digest(record, name) != seen["digest"]
                is_new = is_other and name not in unsteady and name not in found
                # Last: it looks through all boundaries, and a Trainer leads to thousands of names.
                if is_new and _has_changed(straight, rank, name):
                    found[name] = _lost(name, seen, _seen(record)[name], record.at)
    return sorted(found.values(), key=_likely)


def suspects(straight: Trial, resumed: Trial, stop: At, unsteady: set[str]) -> list[Lost]:
    """Return what is in no part and differs when a resumed training begins."""
    found: dict[str, Lost] = {}
    for rank in range(min(len(straight.ranks), len(resumed.ranks))):
        then = straight.boundaries(rank).get(stop)
        begins = [(one, then) for one in resumed.ranks[rank] if one.why == LOOP]
        for record, reference in (*begins, *pairs(straight, resumed, [stop], rank)):
            for name, seen in _seen(reference).items() if reference and record.why != "boundary" else ():
                if name in _seen(record) and _digest(record, name) != seen["digest"] and name not in unsteady:
                    found[name] = _lost(name, seen, _seen(record)[name], record.at)
    return sorted(found.values(), key=_likely)


def _likely(one: Lost) -> tuple[bool, int, str]:
    return one.weight != "state", rank_of(one.kind), one.name


def rank_of(kind: str) -> int:
    """Return the rank of a kind by how likely a training depends on it: objects before plain values."""
    return 2 if kind in ("number", "text", "none") else kind in ("list", "dict", "set", "tuple", "deque")


def _has_changed(straight: Trial, rank: int, name: str) -> bool:
    digests = {_digest(one, name) for one in straight.ranks[rank] if one.why == "boundary"} - {None}
    return len(digests) > 1


def _lost(name: str, then: Mapping[str, Any], now: Mapping[str, Any], at: At) -> Lost:
    about = (then["kind"], then["where"], then["weight"], then["fix"])
    return Lost(name, *about, at, then["value"], now["value"])


def _seen(record: Record) -> Mapping[str, Any]:
    found: Mapping[str, Any] = record.more.get("unregistered", {})
    return found


def _digest(record: Record, name: str) -> str | None:
    seen = _seen(record).get(name)
    return seen["digest"] if seen else None
