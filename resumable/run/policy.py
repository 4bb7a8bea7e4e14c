"""Pure decisions: when to save, which checkpoint is the best, which ones stay, and whether there is room."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from types import MappingProxyType
from typing import Literal, NamedTuple

from .manifest import Best, Goal, Manifest

Push = Literal["best", "newest", "all"]
"""Which checkpoints are pushed: the best; the newest and the best; all."""


def moment(saved: str) -> float | None:
    """Return the seconds since 1970 of a time in a manifest, which may hold any text.

    >>> moment("2026-07-30T12:00:00+00:00"), moment("yesterday")
    (1785412800.0, None)
    """
    # The first and the last date overflow in another time zone, and Windows begins in 1970.
    try:
        return datetime.fromisoformat(saved).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def when(time: str | None) -> str:
    """Return a time in readable form, in UTC.

    >>> when("2026-07-30T12:00:05+00:00")
    '2026-07-30 12:00:05 UTC'
    """
    if time is None or (seconds := moment(time)) is None:
        return ""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def is_better(goal: Goal, value: float | None, than: float | None) -> bool:
    """Return whether `value` is better than `than`; a missing, infinite or NaN value never is."""
    if value is None or not math.isfinite(value):
        return False
    if than is None:
        return True
    return value > than if goal.maximize else value < than


def update_best(
    best: Best | None, goal: Goal | None, metrics: Mapping[str, float], number: int
) -> Best | None:
    """Return the best after the save `number` with `metrics`, and for how many saves it has been the best."""
    leader = update_leader(best, goal, metrics, number)
    if best is None or goal is None or leader != best or goal.metric not in metrics:
        return leader
    return best._replace(since=best.since + 1)


def update_leader(
    best: Best | None, goal: Goal | None, metrics: Mapping[str, float], number: int
) -> Best | None:
    """Return which of the two is the best; an equal value does not replace it."""
    if goal is None:
        return best
    value = metrics.get(goal.metric)
    if not is_better(goal, value, best.value if best else None):
        return best
    assert value is not None
    return Best(goal, value, number)


def best_of(goal: Goal | None, history: Iterable[tuple[int, Mapping[str, float]]]) -> Best | None:
    """Return the best of many saves, given as (number, metrics), oldest first.

    Its `since` is 0: some of the saves may be gone, or of an abandoned branch.
    """
    best: Best | None = None
    for number, metrics in history:
        best = update_leader(best, goal, metrics, number)
    return best


class Every(NamedTuple):
    """When to save automatically: whichever of the given rules is due first."""

    seconds: float | None = None
    steps: int | None = None
    epochs: int | None = None
    budget: float | None = None
    """The share of the training's time that saving may cost, such as 0.01."""
    mtbf: float | None = None
    """The mean time between failures, in seconds."""

    def __str__(self) -> str:
        rules = [] if self.seconds is None else [duration(self.seconds)]
        rules += [] if self.steps is None else [counted(self.steps, "step")]
        rules += [] if self.epochs is None else [counted(self.epochs, "epoch")]
        return ", ".join([*rules, *self.measured()])

    def measured(self) -> list[str]:
        """Return the rules that depend on the cost of a save."""
        rules = [] if self.budget is None else [percent(self.budget)]
        return rules + ([] if self.mtbf is None else [f"mtbf {duration(self.mtbf)}"])


class Took(NamedTuple):
    """The seconds that a save took; None if they are unknown."""

    lost: float | None = None
    """What a save costs the training by all that was measured: the estimate that the budget uses."""
    durable: float | None = None
    """Until the checkpoint was durable."""
    held: float | None = None
    """What saving has taken from the training since the save before: their sum is the total."""


class Cost(NamedTuple):
    """The measured cost of a save, in seconds: training time `lost`, and time until it is `durable`."""

    lost: float
    durable: float


class Since(NamedTuple):
    """The progress since the last save of any kind."""

    seconds: float
    steps: int
    epochs: int


class Interval(NamedTuple):
    """The interval that the measured cost allows, and why."""

    seconds: float
    reason: str


def interval(every: Every, cost: Cost | None) -> Interval | None:
    """Return the interval for a budget or a time between failures; None if neither is given.

    >>> interval(Every(budget=0.01), Cost(lost=0.21, durable=1.9))
    Interval(seconds=21.0, reason='a save costs 0.21 s of training and takes 1.9 s: every 21 s is 1 %')
    """
    if every.budget is None and every.mtbf is None:
        return None
    if cost is None:
        return Interval(
            _FIRST, f"no save has been measured yet: the first one comes after {duration(_FIRST)}"
        )
    # The longest interval satisfies all of the rules.
    seconds, why = max(_bounds(every, cost))
    costs = f"a save costs {duration(cost.lost)} of training and takes {duration(cost.durable)}"
    return Interval(seconds, f"{costs}: every {duration(seconds)} {why}")


def _bounds(every: Every, cost: Cost) -> Iterator[tuple[float, str]]:
    yield _SHORTEST, "is often enough"
    # Never while another save is in flight: the training would wait for the first.
    yield _SLACK * cost.durable, "lets one end before the next begins"
    if every.budget is not None:
        yield cost.lost / every.budget, f"is {percent(every.budget)}"
    if every.mtbf is not None:
        # Young and Daly: each failure costs half an interval.
        optimum = math.sqrt(2 * cost.lost * every.mtbf)
        yield optimum, f"loses the least with a failure every {duration(every.mtbf)}"


def due(every: Every, since: Since, chosen: Interval | None) -> str | None:
    """Return the rule that is due now, if one is.

    >>> due(Every(steps=500, seconds=600), Since(seconds=20, steps=500, epochs=0), None)
    'every 500 steps'
    """
    return due_by_count(every, since) or due_by_time(every, since, chosen)


def due_by_count(every: Every, since: Since) -> str | None:
    """Return the rule of steps or epochs that is due now; it is the same in all processes."""
    for count, unit in ((every.steps, "step"), (every.epochs, "epoch")):
        done = since.steps if unit == "step" else since.epochs
        if count is not None and done >= count:
            return f"every {counted(count, unit)}"
    return None


def due_by_time(every: Every, since: Since, chosen: Interval | None) -> str | None:
    """Return the rule of time that is due now; the clocks of several processes differ."""
    if every.seconds is not None and since.seconds >= every.seconds:
        return f"every {duration(every.seconds)}"
    if chosen is None or since.seconds < chosen.seconds:
        return None
    return f"every {duration(chosen.seconds)} ({', '.join(every.measured())})"


_FIRST = 60.0
_SHORTEST = 10.0
"""A shorter interval would save next to nothing in a crash, and wear out disks."""
_SLACK = 1.2


class Keep(NamedTuple):
    """Which checkpoints stay: the `newest`, the `best`, the first at or after each multiple of `every`."""

    newest: int
    best: int = 1
    every: Every | None = None

    def told(self) -> int | str:
        """Return it in its shortest form for people and other processes: a number, if that is all."""
        if (self.best, self.every) == (1, None):
            return self.newest
        return f"newest {self.newest}, best {self.best}" + (f", every {self.every}" if self.every else "")


class Facts(NamedTuple):
    """The facts that decide whether a checkpoint stays; `saved` is a time.time()."""

    number: int
    step: int
    epoch: int = 0
    saved: float = 0.0
    metrics: Mapping[str, float] = MappingProxyType({})


def facts_of(about: Manifest) -> Facts:
    """Return the facts that decide whether the checkpoint of a manifest stays."""
    return Facts(about.number, about.step, about.epoch, moment(about.saved) or 0.0, about.metrics)


def to_prune(
    facts: Sequence[Facts], keep: Keep | None, goal: Goal | None, protect: Iterable[int | None]
) -> list[int]:
    """Return the save numbers of the checkpoints to remove, given all of them oldest first.

    >>> to_prune([Facts(number, step=10 * number) for number in (1, 2, 3, 4)], Keep(newest=2), None, [1])
    [2]
    """
    if keep is None:
        return []
    stay = {*protect, *(one.number for one in facts[-keep.newest :])}
    if goal:
        stay |= _best_numbers(facts, goal, keep.best)
    if keep.every:
        stay |= _milestones(facts, keep.every)
    return [one.number for one in facts if one.number not in stay]


def _best_numbers(facts: Iterable[Facts], goal: Goal, count: int) -> set[int]:
    sign = -1 if goal.maximize else 1
    values = ((one.metrics.get(goal.metric), one.number) for one in facts)
    # The older of two equal ones.
    found = sorted(
        (sign * value, number)
        for value, number in values
        if value is not None and is_better(goal, value, None)
    )
    return {number for _, number in found[:count]}


def _milestones(facts: Sequence[Facts], every: Every) -> set[int]:
    found = _nearest(((one.number, one.step, (one.step,)) for one in facts), every.steps)
    found |= _nearest(((one.number, one.epoch, (one.epoch, one.step)) for one in facts), every.epochs)
    return found | _nearest(
        ((one.number, one.saved, (one.saved, one.number)) for one in facts), every.seconds
    )


def _nearest(places: Iterable[tuple[int, float, tuple[float, ...]]], length: float | None) -> set[int]:
    """Return the numbers of the first saves at or after each multiple.

    A save that is left out never counts again: pruning after each save keeps the same as pruning at the end.
    After a restore, a second one at the same multiple stays too: the first may be on the abandoned branch.
    """
    found: set[int] = set()
    nearest: dict[float, tuple[float, ...]] = {}
    for number, place, order in places:
        multiple = place // length if length else 0
        if multiple and order <= nearest.get(multiple, order):
            nearest[multiple] = order
            found.add(number)
    return found


def room(keep: Keep | None, goal: Goal | None, size: int, there: int, free: int) -> str | None:
    """Return a warning if `free` bytes are too few; `there` checkpoints of `size` bytes exist already.

    >>> print(room(Keep(3), Goal("acc", True), size=1_400_000_000, there=3, free=1_100_000_000))
    a checkpoint takes about 1.4 GB; 3 + best and the one being written need 7 GB, 4.2 GB of it are there \
already, and 1.1 GB are free. Make room, or keep fewer (keep=).
    """
    takes, are_free = f"a checkpoint takes about {bytes_of(size)}", f"{bytes_of(free)} are free"
    if keep is None:
        few = (
            f"{takes}; keep=None keeps all of them, and {are_free}. Make room, or say how many stay (keep=3)."
        )
        return few if free < 2 * size else None
    best = keep.best if goal else 0
    stay = min(there, keep.newest + best)
    need = size * (keep.newest + best + 1)
    if need - size * stay <= free:
        return None
    held = f", {bytes_of(size * stay)} of it are there already" if stay else ""
    more = f" What every {keep.every} keeps comes on top." if keep.every else ""
    kept = f"{keep.newest}" + (" + best" if best == 1 else f" + {best} best" if best else "")
    return (
        f"{takes}; {kept} and the one being written need {bytes_of(need)}{held}, and {are_free}.{more} "
        "Make room, or keep fewer (keep=)."
    )


def bytes_of(size: float) -> str:
    """Return a size in readable form.

    >>> bytes_of(999), bytes_of(1_440_000_000)
    ('999 B', '1.44 GB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def duration(seconds: float) -> str:
    """Return a duration in readable form.

    >>> duration(0.21), duration(90), duration(3600), duration(250)
    ('0.21 s', '90 s', '1 h', '4.2 min')
    """
    for length, unit in ((86400, "day"), (3600, "h"), (60, "min")):
        if seconds == length or seconds >= 2 * length:
            plural = "s" if unit == "day" and seconds > length else ""
            return f"{_rounded(seconds / length)} {unit}{plural}"
    return f"{_rounded(seconds)} s"


def percent(share: float) -> str:
    """Return a share in percent.

    >>> percent(0.005)
    '0.5 %'
    """
    return f"{_rounded(100 * share)} %"


def _rounded(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def counted(count: int, unit: str) -> str:
    """Return a number of things: "1 step", "2 steps"."""
    return f"{count} {unit}" if count == 1 else f"{count} {unit}s"
