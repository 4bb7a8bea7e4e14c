"""The result as tables: ratios, times, limits, goals, and where a peer wins."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .contenders import CONTENDERS
from .scenarios import ALL, Result

OURS, COMMON = "resumable", "torch.save"


@dataclass(frozen=True)
class Column:
    """A figure of every contender, and what it is divided by."""

    key: str
    heading: str
    over: str
    """"torch.save", "write" or "read" (the raw limit), or "" for what is a ratio already."""
    meaning: str
    compared_by: str = ""
    """The figure that two contenders are compared by, where this one is a ratio to its own."""


COLUMNS = (
    Column("call", "call", COMMON, "time until `save()` returns, over torch.save's with fsync"),
    Column("lost", "lost", COMMON, "training time lost to a save, over torch.save's with fsync"),
    Column("durable", "durable", "write", "time until the save is durable, over the best raw write"),
    Column("load", "load", "read", "load into the live objects, over the best raw read (warm cache)"),
    Column("memory", "memory", "", "peak extra host memory of saving, over the state's size"),
    Column(
        "first",
        "first",
        "",
        "the first save of a process, over its own later ones, until durable",
        "first_durable",
    ),
    Column(
        "pause", "pause", COMMON, "longest time that the main thread is kept from running, over torch.save's"
    ),
    Column("frozen_bytes", "90 % bytes", "", "with 90 % frozen: bytes written, over the state's size"),
    Column(
        "frozen_time",
        "90 % time",
        "",
        "with 90 % frozen: time until durable, over its own with nothing frozen",
        "frozen_durable",
    ),
    Column("tensors_durable", "small save", COMMON, "many small tensors: until durable, over torch.save's"),
    Column("tensors_load", "small load", COMMON, "many small tensors: load, over torch.load's"),
)
TIMES = {
    "call": "call",
    "lost": "training lost",
    "durable": "until durable",
    "load": "load",
    "pause": "worst pause",
    "tensors_durable": "save small tensors",
    "tensors_load": "load small tensors",
    "parameters_durable": "save small parameters",
    "parameters_load": "load small parameters",
}


@dataclass(frozen=True)
class Goal:
    """A ratio that this library is to reach."""

    what: str
    limit: float
    value: Callable[[Result], float | None]
    is_floor: bool = False

    def is_met(self, value: float) -> bool:
        """Return whether the goal is reached."""
        return value >= self.limit if self.is_floor else value <= self.limit


def pages(result: Result) -> str:
    """Return everything, as Markdown that is also readable as it is."""
    parts = (
        _about(result),
        _table(["ratios", *(column.heading for column in COLUMNS)], _ratio_rows(result)),
        "\n".join(f"- *{column.heading}*: {column.meaning}" for column in COLUMNS),
        "Medians, and the quartiles about them:",
        _table(["milliseconds", *TIMES.values()], _time_rows(result)),
        _table(["raw limit", "GB/s", "milliseconds"], _limit_rows(result)),
        _listing(result),
        _table(["goal", "limit", "measured", ""], _goal_rows(result)),
        _wins(result),
        _failures(result),
    )
    return "\n\n".join(part for part in parts if part)


def ratios(result: Result, name: str, column: Column) -> list[float]:
    """Return a figure of a contender over what it is measured by, round by round."""
    values = result.contenders.get(name, {}).get(column.key, [])
    if not column.over:
        return values
    base = _base(result, column)
    if len(base) == len(values):
        return [value / one for value, one in zip(values, base, strict=True)]
    return [value / statistics.median(base) for value in values] if base else []


def _base(result: Result, column: Column) -> list[float]:
    if column.over == COMMON:
        base = result.contenders.get(COMMON, {}).get(column.key, [])
        # Of differences of times the median is a sound base, a single one is not.
        return [statistics.median(base)] * len(base) if base else []
    return best_limit(result, column.over)


def best_limit(result: Result, what: str) -> list[float]:
    """Return the rounds of the way that is the fastest by its median."""
    ways = [values for name, values in result.limits.items() if name.startswith(f"{what}:")]
    return min(ways, key=statistics.median, default=[])


def middle(values: Sequence[float]) -> float | None:
    """Return the median, if there is one."""
    return statistics.median(values) if values else None


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the values between which the middle half of all lies."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _about(result: Result) -> str:
    state, settings = result.state, result.settings
    lines = [f"- {what}: {value}" for what, value in result.machine.items()]
    if state:
        lines.append(
            f"- state: {state['bytes'] / 1e6:,.0f} MB in {state['tensors']:,.0f} tensors (a GPT and AdamW); "
            f"a step takes {state['step_seconds'] * 1e3:.0f} ms; "
            f"small tensors: {settings['small']:,} of 256 bytes"
        )
    lines.append(
        f"- {settings['rounds']} rounds in turns on {settings['device']}, {result.seconds:.0f} s in all"
    )
    return "\n".join(lines)


def _names(result: Result) -> list[str]:
    return [name for name in result.settings["contenders"] if result.contenders.get(name)]


def _ratio_rows(result: Result) -> list[list[str]]:
    return [
        [name, *(_ratio(middle(ratios(result, name, column))) for column in COLUMNS)]
        for name in _names(result)
    ]


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if abs(value) < 0.1 else f"{value:.2f}"


def _time_rows(result: Result) -> list[list[str]]:
    return [[name, *(_time(result.contenders[name].get(key)) for key in TIMES)] for name in _names(result)]


def _time(values: Sequence[float] | None) -> str:
    if not values:
        return "-"
    low, high = quartiles(values)
    return f"{_milli(statistics.median(values))} ({_milli(low)}..{_milli(high)})"


def duration(seconds: float) -> str:
    """Return a time in the unit that it is read in."""
    return f"{_milli(seconds)} ms" if abs(seconds) < 1 else f"{seconds:.2f} s"


def _milli(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _limit_rows(result: Result) -> list[list[str]]:
    size = result.state.get("bytes", 0)
    return [
        [name, f"{size / statistics.median(values) / 1e9:.2f}", _time(values)]
        for name, values in result.limits.items()
    ]


def _listing(result: Result) -> str:
    if not result.listing:
        return ""
    many = f"{result.settings['checkpoints']:,}"
    load, few = _listed(result, "load_many"), _listed(result, "load_few")
    save, save_few = _listed(result, "save_many"), _listed(result, "save_few")
    return (
        f"A run of {many} checkpoints of a tiny model, next to one of a few: `load` finds the newest and "
        f"loads it in {_milli(load)} ms ({_milli(few)} ms among a few; `listdir` alone takes "
        f"{_milli(_listed(result, 'listdir'))} ms); a save takes {_milli(save)} ms ({_milli(save_few)} ms)."
    )


def _listed(result: Result, key: str) -> float:
    return statistics.median(result.listing[key])


def _of(key: str, name: str = OURS) -> Callable[[Result], float | None]:
    def value(result: Result) -> float | None:
        column = next(column for column in COLUMNS if column.key == key)
        return middle(ratios(result, name, column))

    return value


def _seconds(result: Result, name: str, key: str) -> float | None:
    return middle(result.contenders.get(name, {}).get(key, []))


def _over(numerator: float | None, denominator: float | None) -> float | None:
    # A difference of times that noise made negative measures nothing.
    if numerator is None or denominator is None or denominator <= 0:
        return None
    return numerator / denominator


def _over_best_async(result: Result) -> float | None:
    peers = [name for name, contender in CONTENDERS.items() if contender.is_async and name != OURS]
    found = [lost for name in peers if (lost := _seconds(result, name, "lost")) is not None]
    return _over(_seconds(result, OURS, "lost"), min(found, default=None))


def _growth(result: Result) -> float | None:
    # In pairs: a save takes milliseconds, which drift.
    if not result.listing:
        return None
    pairs = zip(result.listing["save_many"], result.listing["save_few"], strict=True)
    return statistics.median(many / few for many, few in pairs)


def _milliseconds(key: str) -> Callable[[Result], float | None]:
    def value(result: Result) -> float | None:
        seconds = _seconds(result, OURS, key)
        return None if seconds is None else seconds * 1e3

    return value


GOALS = (
    Goal("training time lost / torch.save and fsync", 0.1, _of("lost")),
    Goal("training time lost / best background save of a peer", 0.25, _over_best_async),
    Goal("until durable / raw write", 1.15, _of("durable")),
    Goal("load, verified / raw read", 1.3, _of("load")),
    Goal(
        "torch.load(mmap=True), every page touched / load",
        3.0,
        lambda result: _over(_seconds(result, "torch.save, tuned", "load"), _seconds(result, OURS, "load")),
        is_floor=True,
    ),
    Goal("peak extra memory / state", 1.02, _of("memory")),
    Goal("save of many tensors of 256 B, ms", 15, _milliseconds("tensors_durable")),
    Goal("load of many tensors of 256 B, ms", 10, _milliseconds("tensors_load")),
    Goal("90 % frozen: bytes written / state", 0.101, _of("frozen_bytes")),
    Goal("90 % frozen: time / nothing frozen", 0.25, _of("frozen_time")),
    Goal(
        "many checkpoints: load finds the newest, ms more than among few",
        5,
        lambda result: (
            (_listed(result, "load_many") - _listed(result, "load_few")) * 1e3 if result.listing else None
        ),
    ),
    Goal("many checkpoints: a save / one among few", 1.02, _growth),
)


def _goal_rows(result: Result) -> list[list[str]]:
    rows = []
    for goal in GOALS:
        value = goal.value(result)
        sign = "at least" if goal.is_floor else "at most"
        met = "not told" if value is None else "met" if goal.is_met(value) else "**not met**"
        rows.append([goal.what, f"{sign} {goal.limit:g}", _ratio(value), met])
    return rows


def _wins(result: Result) -> str:
    """Say where a peer is better than this library, by the medians and by more than 2 %."""
    found = []
    if OURS not in _names(result):
        return ""
    for column in COLUMNS:
        key = column.compared_by or column.key
        ours = _seconds(result, OURS, key)
        if ours is None:
            continue
        better = {
            name: value
            for name in _names(result)
            if (value := _seconds(result, name, key)) is not None and value < ours - 0.02 * abs(ours)
        }
        told = [
            f"{name} ({_told(better[name], key)})" for name in sorted(better, key=lambda name: better[name])
        ]
        if told:
            found.append(f"- *{column.heading}*: {', '.join(told)}; {OURS} {_told(ours, key)}")
    return "\n".join(["**Where a peer wins:**", "", *found]) if found else "No peer wins in any column."


def _told(value: float, key: str) -> str:
    return f"{value:.3f}" if key in ("memory", "frozen_bytes") else duration(value)


def _failures(result: Result) -> str:
    lines = []
    for name, reasons in result.errors.items():
        lines += [
            f"- {name}: {what if what != ALL else 'not measured'}: {why}" for what, why in reasons.items()
        ]
    for name, columns in result.contenders.items():
        if not all(columns.get("exact", [1.0])):
            lines.append(f"- {name}: what it loads is not the state at the save, bit for bit")
    return "\n".join(["**What does not work:**", "", *lines]) if lines else ""


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    every = [headings, *rows]
    widths = [max(len(row[index]) for row in every) for index in range(len(headings))]
    lines = [_line(row, widths) for row in every]
    lines.insert(
        1,
        "|"
        + "|".join(f"{'-' * (width + 1)}{':' if index else '-'}" for index, width in enumerate(widths))
        + "|",
    )
    return "\n".join(lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
    return "| " + " | ".join([f"{first.strip():<{widths[0]}}", *others]) + " |"
