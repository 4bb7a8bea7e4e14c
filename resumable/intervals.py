"""Times and intervals as people write them: "3h50m", "500 steps", "1 %"."""

from __future__ import annotations

import math
import re
from typing import Any

from .errors import UsageError
from .run.policy import Every


def seconds(name: str, value: Any) -> float:
    """Return a positive time in seconds.

    >>> seconds("max_time", "3h50m"), seconds("max_time", "2-12:00:00"), seconds("max_time", 60)
    (13800.0, 216000.0, 60.0)
    """
    found = _seconds_of(value) if isinstance(value, str) else value
    if isinstance(found, (int, float)) and not isinstance(found, bool) and 0 < found < math.inf:
        return float(found)
    raise UsageError(
        f"{name}={value!r} is not a time.",
        fix=f"give it in seconds, as {name.rpartition('.')[2]}=60, or as '10 min', '3h50m', '3:50:00', "
        "'2-12:00:00'.",
    )


def _seconds_of(text: str) -> float | None:
    text = text.strip()
    if clock := _CLOCK.fullmatch(text):
        days, hours, minutes, rest = (int(part or 0) for part in clock.groups())
        # "3:50" alone is hours to one and minutes to another (and to SLURM).
        is_plain = clock[1] is not None or clock[4] is not None
        return 86400.0 * days + 3600 * hours + 60 * minutes + rest if is_plain else None
    if not _LENGTH.fullmatch(text):
        return None
    found = [(_UNITS.get(unit.lower(), 0), float(number)) for number, unit in _PIECE.findall(text)]
    units = [unit for unit, _ in found]
    # Each of them once and the longest first: what else was written was not meant.
    if 0 in units or units != sorted({*units}, reverse=True):
        return None
    return sum(unit * number for unit, number in found)


_CLOCK = re.compile(r"(?:([0-9]{1,9})-)?([0-9]{1,9})(?::([0-5]?[0-9])(?::([0-5]?[0-9]))?)?")
_PIECE = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)\s*([a-zA-Z]+)\s*")
_LENGTH = re.compile(f"(?:{_PIECE.pattern})+")
_UNITS = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days"), 86400),
}


def every(given: Any) -> Every | None:
    """Parse `every=`: one rule or several; whichever is due first triggers the save.

    >>> every(["500 steps", "10 min", "1 %"])
    Every(seconds=600.0, steps=500, epochs=None, budget=0.01, mtbf=None)
    """
    return None if given is None else _rules("every", given, _RULES)


def _rules(name: str, given: Any, may_be: str) -> Every:
    many = [*given] if isinstance(given, (list, tuple)) else [given]
    found = [_rule(name, one, may_be) for one in many]
    kinds = [kind for kind, _ in found]
    if not found or len({*kinds}) < len(kinds):
        raise UsageError(
            f"{name}={given!r} " + ("gives one kind of rule twice." if found else "is empty."),
            fix=f"give one of each at most: {may_be}.",
        )
    return Every(**dict(found))


def _rule(name: str, given: Any, may_be: str) -> tuple[str, Any]:
    if is_whole_number(given):
        return "steps", given
    text = given.strip() if isinstance(given, str) else ""
    if (counted := _COUNTED.fullmatch(text)) and int(counted[1]):
        return f"{counted[2]}s", int(counted[1])
    if may_be is _RULES and (share := _SHARE.fullmatch(text)) and 0 < float(share[1]) < 100:
        return "budget", float(share[1]) / 100
    if may_be is _RULES and text.startswith("mtbf ") and (failures := _seconds_of(text[5:])):
        return "mtbf", failures
    if time := _seconds_of(text):
        return "seconds", time
    raise UsageError(f"{name}={given!r} does not say how often.", fix=f"say {may_be}.")


_COUNTED = re.compile(r"([0-9]{1,12})\s*(step|epoch)s?")
_SHARE = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)\s*%")
_MULTIPLES = "'1000 steps' (or 1000), '10 epochs', '1 day', or a list of them"
_RULES = (
    "'10 min', '500 steps' (or 500), '2 epochs', '1 %' (of the training's time), 'mtbf 6 h' (the mean time "
    "between failures), or a list of them"
)


def multiples(name: str, given: Any) -> Every:
    """Return the multiples whose checkpoints are kept.

    >>> multiples("--keep-every", ["1000 steps", "1 day"])
    Every(seconds=86400.0, steps=1000, epochs=None, budget=None, mtbf=None)
    """
    return _rules(name, given, _MULTIPLES)


def is_whole_number(value: Any) -> bool:
    """Whether this is a whole number from 1."""
    return isinstance(value, int) and value >= 1 and value is not True
