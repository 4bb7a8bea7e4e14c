"""What changes in a script and is in no part: what is said of it, and what has changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..files.strict_json import Json
from ..observer import Unregistered
from . import fixes


class Seen(NamedTuple):
    """Something alive in the process that no part holds."""

    kind: str
    digest: str
    value: Json
    """A plain value that is short: itself."""
    where: str
    """Where it is first assigned, such as "train.py:31"; empty if nobody knows."""
    weight: str
    """Whether to lose it is a defect ("state"), or may not matter to the training ("note"), or the script
    sets it in every epoch ("set")."""
    fix: str


def changed(first: Mapping[str, Seen], now: Mapping[str, Seen]) -> list[Unregistered]:
    """Return what has changed, or has come since and is carried on, the gravest first."""
    found = [
        Unregistered(name, one.kind, one.where, one.weight, one.fix)
        for name, one in now.items()
        if one.weight != "set" and _has_changed(name, first.get(name), one)
    ]
    return sorted(found, key=lambda one: (one.weight != "state", _RANKS.get(one.kind, 0), one.name))


_RANKS = {"number": 2, "text": 2, "none": 2, "list": 1, "dict": 1, "set": 1, "tuple": 1, "deque": 1}


def _has_changed(name: str, then: Seen | None, now: Seen) -> bool:
    if then is None:
        # (what only the garbage collector knows may be garbage)
        return now.weight == "state" and not fixes.is_nameless(name)
    return then.digest != now.digest
