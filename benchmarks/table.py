"""The result as tables: ratios, times, limits, goals, and where a peer wins."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from .goals import GOALS
from .ratios import COLUMNS, COMMON, OURS, durable, fresh, middle, quartiles, ratios, seconds
from .rounds import Values
from .scenarios import ALL, Result

TIMES = {
    "call": "call",
    "lost": "training lost",
    "durable": "until durable",
    "load": "load",
    "pause": "worst pause",
    "tensors_durable": "save small tensors",
    "tensors_call": "call, small tensors",
    "tensors_load": "load small tensors",
    "parameters_durable": "save small parameters",
    "parameters_call": "call, small parameters",
    "parameters_load": "load small parameters",
}


def pages(result: Result) -> str:
    """Return everything, as Markdown that is also readable as it is."""
    parts = (
        _about(result),
        aligned(["ratios", *(column.heading for column in COLUMNS)], _ratio_rows(result)),
        "\n".join(f"- *{column.heading}*: {column.meaning}" for column in COLUMNS),
        "Medians, and the quartiles about them:",
        aligned(["milliseconds", *TIMES.values()], _time_rows(result)),
        aligned(["raw limit", "GB/s", "milliseconds"], _limit_rows(result)),
        *_sizes(result),
        _fresh(result),
        _times("a batch, us", result.batches, 1e6),
        _times("start, ms", result.start),
        _busy(result),
        _listing(result),
        aligned(["goal", "limit", "measured", ""], _goal_rows(result)),
        _wins(result),
        _failures(result),
    )
    return "\n\n".join(part for part in parts if part)


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


def _sizes(result: Result) -> list[str]:
    return [
        aligned(
            [f"{float(size):,.0f} MB", "milliseconds", "over the best raw write"],
            [
                [name, _time(values), _spread(durable(result, float(size))) if name == OURS else "-"]
                for name, values in found.items()
            ],
        )
        for size, found in result.sizes.items()
    ]


def _fresh(result: Result) -> str:
    # The weights are there, the moments are not: their memory is fresh, and so is that of the raw reads.
    rows = [
        [OURS if name == "load" else name, _time(values), _spread(fresh(result)) if name == "load" else "-"]
        for name, values in result.fresh.items()
    ]
    return aligned(["load in a fresh process", "milliseconds", "over the best raw read"], rows)


def _busy(result: Result) -> str:
    names = (OURS, COMMON)
    rows = [
        [others, *(_time(found[f"{name}: lost"]) for name in names), _spread(found["ratio"])]
        for others, found in result.busy.items()
    ]
    return aligned(["processes beside the training; ms lost to a save", *names, "ratio"], rows)


def _times(heading: str, figures: Mapping[str, Values], scale: float = 1e3) -> str:
    rows = [
        [name, column, _spread([value * scale for value in values])]
        for name, columns in figures.items()
        for column, values in columns.items()
    ]
    return aligned([heading, "", "median (quartiles)"], rows)


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    low, high = quartiles(values)
    return f"{statistics.median(values):.3g} ({low:.3g}..{high:.3g})"


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
        ours = seconds(result, OURS, key)
        if ours is None:
            continue
        better = {
            name: value
            for name in _names(result)
            if (value := seconds(result, name, key)) is not None and value < ours - 0.02 * abs(ours)
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


def aligned(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose columns stand below each other."""
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
