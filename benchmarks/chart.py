"""The result as a chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import ratios, table
from .scenarios import Result

PANELS = {
    "lost": "training time lost to a save (s)",
    "call": "time until save() returns (s)",
    "pause": "worst pause of the main thread (s)",
    "durable": "time until durable (s)",
    "load": "load into the live objects (s)",
    "memory": "peak extra memory (x state)",
    "tensors_durable": "save many small tensors (s)",
    "tensors_load": "load many small tensors (s)",
    "frozen_bytes": "bytes written, 90 % frozen (x state)",
}
LIMITS = {"durable": "write", "load": "read"}


def draw(result: Result, path: Path) -> None:
    """Write the chart of a result."""
    # Only who draws needs it, and it takes a second to import.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name in result.settings["contenders"] if result.contenders.get(name)]
    height = 1.2 + 0.22 * len(names)
    figure, axes = pyplot.subplots(3, 3, figsize=(13, 3 * height), sharey=True, layout="constrained")
    for axis, (key, title) in zip(axes.flat, PANELS.items(), strict=True):
        _panel(axis, result, names, key, title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panel(axis: Any, result: Result, names: list[str], key: str, title: str) -> None:
    values = [ratios.middle(result.contenders[name].get(key, [])) for name in names]
    is_time = title.endswith("(s)")
    drawn = [value for value in values if value is not None and (value > 0 or not is_time)]
    floor = min(drawn, default=1.0) / 3 if is_time else 0.0
    axis.set_yticks(range(len(names)), names)
    for row, (name, value) in enumerate(zip(names, values, strict=True)):
        color = "#0b6e4f" if name == ratios.OURS else "#8a8a8a"
        # On a scale of logarithms what is not more than nothing has no place but the edge.
        place = max(floor, value or 0.0)
        axis.plot([floor, place], [row, row], color=color, linewidth=2, alpha=0.35)
        axis.plot([place], [row], "o" if value is not None else "", color=color, markersize=6)
        label = "-" if value is None else table.duration(value) if is_time else f"{value:.2f}"
        axis.annotate(
            label, (place, row), (7, 0), textcoords="offset points", va="center", fontsize=8, color=color
        )
    limit = ratios.middle(ratios.best_limit(result, LIMITS[key])) if key in LIMITS else None
    if limit:
        axis.axvline(limit, color="#c0392b", linestyle="--", linewidth=1)
        title += ", dashed: the raw limit"
    if is_time:
        axis.set_xscale("log")
    axis.set_xlim(
        min([floor, *([limit / 1.3] if limit else [])]), max(drawn, default=1.0) * (8 if is_time else 1.3)
    )
    axis.set_title(title, fontsize=10)
    axis.tick_params(labelsize=8)
    axis.grid(axis="x", alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    if not axis.yaxis_inverted():
        axis.invert_yaxis()
