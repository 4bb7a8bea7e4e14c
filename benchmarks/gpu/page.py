"""The result as a table, for the terminal and for benchmarks/README.md."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

README = Path(__file__).parents[1] / "README.md"
FAILURES = ("FAILED", "ERROR")
"""How the outcome of a test begins that did not pass."""
COLUMNS = {
    "lost": ("lost to a save, ms", 1e3),
    "item": ("longer .item(), ms", 1e3),
    "call": ("call, ms", 1e3),
    "durable": ("until durable, s", 1.0),
    "load": ("load, s", 1.0),
    "memory": ("host memory / state", 1.0),
    "memory_device": ("device memory / state", 1.0),
}
"""By figure: its heading, and the factor from seconds."""


class Goal(NamedTuple):
    """What a save is to take at most."""

    what: str
    limit: float
    value: Callable[[Mapping[str, Any]], float | None]


def _ours(figure: str, factor: float = 1.0) -> Callable[[Mapping[str, Any]], float | None]:
    def value(size: Mapping[str, Any]) -> float | None:
        values = size.get("contenders", {}).get("resumable", {}).get(figure)
        return statistics.median(values) * factor if values else None

    return value


def _over_raw(size: Mapping[str, Any]) -> float | None:
    writes = [statistics.median(v) for name, v in size.get("limits", {}).items() if name.startswith("write")]
    durable = _ours("durable")(size)
    return durable / min(writes) if writes and durable is not None else None


GOALS = (
    Goal("training time lost to a save, ms", 8.0, _ours("lost", 1e3)),
    Goal("longer .item() while a save is copied, ms", 1.0, _ours("item", 1e3)),
    Goal("until durable, over the best raw write", 1.10, _over_raw),
    Goal("verified load into live objects, s", 0.25, _ours("load")),
    Goal("extra memory on the device, over the state", 0.02, _ours("memory_device")),
)


def text(result: Mapping[str, Any]) -> str:
    """Return everything, as Markdown that is also readable as it is."""
    lines = [f"- {what}: {value}" for what, value in result["machine"].items()]
    lines.append(f"- {result['seconds']} s in all{', tiny sizes on the CPU' if result['is_tiny'] else ''}")
    lines += ["", *_tests(result["tests"])]
    for label, size in result["sizes"].items():
        lines += ["", *_size(label, size)]
    return "\n".join(lines)


def has_failed(result: Mapping[str, Any]) -> bool:
    """Whether a test failed, or something has no result."""
    outcomes = [one for file in result["tests"].values() for one in file["outcomes"].values()]
    errors = [one.get("error") for one in (*result["tests"].values(), *result["sizes"].values())]
    return any(one.startswith(FAILURES) for one in outcomes) or any(errors)


def put_into_readme(result: Mapping[str, Any]) -> Path:
    """Put the tables into the page, and return where the figures themselves belong."""
    gpu = result["machine"]["gpu"].partition(",")[0]
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    marked = re.compile(r"(<!-- cuda: .*? -->\n).*?(<!-- cuda ends -->)", re.DOTALL)
    content = f"\n{text(result)}\n\nThe figures: [results/cuda-{name}.json](results/cuda-{name}.json)\n\n"
    page = marked.sub(lambda found: found[1] + content + found[2], README.read_text(), count=1)
    README.write_text(page)
    return README.parent / "results" / f"cuda-{name}.json"


def _tests(tests: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, found in tests.items():
        outcomes = found["outcomes"]
        counts = Counter(one.partition(" ")[0].rstrip(":").lower() for one in outcomes.values())
        told = ", ".join(f"{count} {one}" for one, count in counts.items())
        lines.append(f"- tests of {name}: {told or 'none selected'}")
        lines += [f"  - {test}: {one}" for test, one in outcomes.items() if one.startswith(FAILURES)]
        lines += [f"  - {line}" for line in (found["error"] or "").splitlines()]
    return lines


def _size(label: str, size: Mapping[str, Any]) -> list[str]:
    lines = []
    if state := size.get("state"):
        count, step = state["tensors"], 1e3 * state["step_seconds"]
        lines += [f"{label}: {state['bytes'] / 1e6:,.0f} MB in {count:,} tensors, steps of {step:.1f} ms", ""]
    headings = [heading for heading, _ in COLUMNS.values()]
    lines += [_row([label, *headings]), _row(["---", *["--:"] * len(headings)])]
    for name, figures in size.get("contenders", {}).items():
        lines.append(_row([name, *(_cell(figures.get(key), factor) for key, (_, factor) in COLUMNS.items())]))
    lines.append("")
    for name, values in size.get("limits", {}).items():
        rate = size["state"]["bytes"] / statistics.median(values) / 1e9
        lines.append(f"- raw {name}: {statistics.median(values):.3f} s ({rate:.1f} GB/s)")
    lines += ["", _row(["goal", "at most", "measured"]), _row(["---", "--:", "--:"])]
    for goal in GOALS:
        value = goal.value(size)
        lines.append(
            _row([goal.what, f"{goal.limit:g}", "not measured" if value is None else f"{value:.3g}"])
        )
    for name, errors in size.get("errors", {}).items():
        lines += ["", *(f"- {name}: {what}: {why}" for what, why in errors.items())]
    return [*lines, *(f"- {line}" for line in (size.get("error") or "").splitlines())]


def _cell(values: list[float] | None, factor: float) -> str:
    if not values:
        return "-"
    value = statistics.median(values) * factor
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
