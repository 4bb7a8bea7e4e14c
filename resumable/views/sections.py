"""The sections of a report, from top to bottom: the figures at a glance, the charts, the tables."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import printable
from ..files.strict_json import Json
from ..run.markup import Markup, escaped, scrolling, section, table, tag
from ..run.policy import bytes_of, counted, duration, percent, when
from .charts import KINDS, Curves, number, sentence

Row = Mapping[str, Any]
Chart = dict[str, Json]

AT_ONCE, MOST_METRICS = 4, 24
"""How many metrics are shown at once, and how many at most."""

SHAPES = {
    "run-0": "M8 2a6 6 0 1 0 .01 0z",
    "run-1": "M3 3h10v10H3z",
    "run-2": "M8 1l7 7-7 7-7-7z",
    "run-3": "M8 2l7 12H1z",
    "run-4": "M8 1l6 3.5v7L8 15l-6-3.5v-7z",
    "run-5": "M8 1l7 5-2.7 8.5H3.7L1 6z",
    "save": "M8 4a4 4 0 1 0 .01 0z",
    "abandoned": "M8 4a4 4 0 1 0 .01 0zM8 5.6a2.4 2.4 0 1 1-.01 0z",
    "best": "M8 1l2.1 4.7 5.1.5-3.9 3.4 1.2 5L8 12l-4.5 2.6 1.2-5L.8 6.2l5.1-.5z",
    "resume": "M4 2l10 6-10 6z",
    "back": "M12 2L2 8l10 6z",
    "preempted": "M3 3h10v10H3z",
    "failed": "M3 5l2-2 3 3 3-3 2 2-3 3 3 3-2 2-3-3-3 3-2-2 3-3z",
    "odd": "M8 1l7 7-7 7-7-7zM8 4L4 8l4 4 4-4z",
}
"""The marks of the legend, as they are drawn in the charts."""


class Page:
    """The body of a report, and the data of its charts."""

    def __init__(self, curves: Curves, metrics: Sequence[str]) -> None:
        self.charts: list[Chart] = []
        self._curves, self._runs = curves, curves.runs
        self._metrics = metrics[:MOST_METRICS]
        self._left_out = len(metrics) - len(self._metrics)

    def make(self) -> Markup:
        """Return all sections."""
        alone = len(self._runs) == 1
        glance = tag("div", *map(_glance, self._runs), class_="cards")
        parts = [section("At a glance", 2, glance), self._curves_section(), self._cost_section()]
        for index, run in enumerate(self._runs):
            inner = [*self._about_run(index, 2 if alone else 3)]
            parts += inner if alone else [section(run["run"], 2, *inner)]
        return _joined(parts)

    def _curves_section(self) -> Markup:
        drawn = [self._figure(self._curves.metric(name), name) for name in self._metrics]
        if not drawn:
            empty = "No save was given a metric: state.save(loss=loss) draws a curve here."
            return section("Metrics", 2, tag("p", empty, class_="empty"))
        parts = [self._tools(), tag("div", *drawn[:AT_ONCE], class_="charts")]
        if rest := drawn[AT_ONCE:]:
            summary = tag("summary", f"{counted(len(rest), 'more metric')}")
            parts.append(tag("details", summary, tag("div", *rest, class_="charts")))
        if self._left_out:
            more = f"{counted(self._left_out, 'further metric')}: see resumable report --json."
            parts.append(tag("p", more, class_="quiet"))
        return section("Metrics", 2, *parts)

    def _tools(self) -> Markup:
        runs = [_toggle("run", str(i), run["run"], f"run-{i % 6}") for i, run in enumerate(self._runs)]
        kinds = [_toggle("kind", kind, KINDS[kind], kind) for kind in self._curves.kinds()]
        views = [("in", "Zoom in"), ("out", "Zoom out"), ("reset", "Reset zoom")]
        buttons = [tag("button", label, type="button", data_zoom=way) for way, label in views]
        buttons.append(tag("button", "Log scale", type="button", data_log="", aria_pressed="false"))
        groups = [("Runs", runs if len(runs) > 1 else []), ("Marks", kinds), ("View", buttons)]
        shown = (tag("div", *ones, role="group", aria_label=name) for name, ones in groups if ones)
        return tag("div", *shown, class_="tools", hidden="")

    def _figure(self, chart: Chart, title: str) -> Markup:
        self.charts.append(chart)
        label = f"Chart of {title} by {chart['x']}. The tables of checkpoints have its figures."
        place = tag("div", class_="plot", role="img", aria_label=label, data_chart=str(len(self.charts) - 1))
        return tag("figure", tag("figcaption", title), place)

    def _cost_section(self) -> Markup:
        chart = self._curves.cost()
        if chart is None:
            return section("What saving costs", 2, tag("p", "The history has no save.", class_="empty"))
        about = (
            "How long each save held up the training, and how long until it was durable, in the background."
        )
        return section("What saving costs", 2, tag("p", about), self._figure(chart, "Seconds per save"))

    def _about_run(self, index: int, level: int) -> Iterator[Markup]:
        run, shown = self._runs[index], self._curves.shown[index]
        parts: list[Markup] = []
        if run["problem"]:
            parts.append(tag("p", run["problem"], class_="bad"))
        parts += [tag("p", save["problem"], class_="bad") for save in run["saves"] if save["problem"]][:20]
        if chart := self._curves.sizes(index):
            parts.append(self._figure(chart, "Size of the checkpoints that are kept"))
        if shown:
            parts.append(self._saves(run, shown))
        else:
            parts.append(tag("p", "Nothing was saved yet.", class_="empty"))
        yield section("Checkpoints", level, *parts)
        yield section("What happened", level, _happened(run))
        yield section("Attempts", level, _attempts(run))

    def _saves(self, run: Row, shown: Sequence[Row]) -> Markup:
        of_all = len(run["saves"])
        some = f"{len(shown):,} of {of_all:,}" if len(shown) < of_all else f"{of_all:,}"
        caption = f"Checkpoints of {run['run']}: {some}, newest first"
        names = [name for name in self._metrics if any(name in save["metrics"] for save in shown)]
        columns = [column for column in _columns(run, names) if any(column[2](save) for save in shown)]
        head = [title for title, _, _ in columns]
        words = [index for index, (_, is_word, _) in enumerate(columns) if is_word]
        rows = ([cell(save) for _, _, cell in columns] for save in reversed(shown))
        return scrolling(table(caption, head, rows, words), caption)


def runs_named(names: Sequence[str]) -> str:
    """Return the heading of the page."""
    return ", ".join(map(escaped, names))


def _glance(run: Row) -> Markup:
    facts = [tag("div", tag("dt", title), tag("dd", *about)) for title, about in _facts(run)]
    return tag("article", tag("h3", run["run"]), tag("dl", *facts), class_="card")


def _facts(run: Row) -> Iterator[tuple[str, list[Markup]]]:
    at = {save["number"]: save for save in run["saves"]}
    newest, best = at.get(run["newest"]), at.get(run["best"])
    yield "Newest", _fact(f"step {newest['step']:,}", _where(newest)) if newest else _fact("none", "")
    if goal := run["goal"]:
        way = "highest" if goal["maximize"] else "lowest"
        place = f"checkpoint {run['best']}" + (f", step {best['step']:,}" if best else "")
        yield f"Best ({way} {printable(goal['metric'], but='')})", _fact(number(goal["value"]), place)
    here = [save for save in run["saves"] if save["here"]]
    yield "On the disk", _fact(bytes_of(run["size"]), _kept(run, here))
    yield "Attempts", _fact(str(len(run["attempts"])), _interruptions(run))
    lost = [save["lost"] for save in run["saves"] if save["lost"] is not None]
    if lost:
        yield "Lost to saving", _fact(duration(sum(lost)), _share(run, lost))
    yield "Integrity", _integrity(run, here)
    yield "Remote", _remote(run, here)


def _fact(value: str, more: str) -> list[Markup]:
    return [tag("strong", value), tag("span", more)] if more else [tag("strong", value)]


def _where(save: Row) -> str:
    place = f"checkpoint {save['number']}, epoch {save['epoch']}, batch {save['batch']}"
    return f"{place}; {when(save['time'])}" if when(save["time"]) else place


def _kept(run: Row, here: Sequence[Row]) -> str:
    kept = f"{len(here):,} of {counted(len(run['saves']), 'checkpoint')} kept"
    spared = run["size_unshared"] - run["size"]
    return f"{kept}; shared files spare {bytes_of(spared)}" if spared else kept


def _interruptions(run: Row) -> str:
    kinds = [event["kind"] for event in run["events"]]
    words = [("resume", "resume"), ("preempted", "preemption"), ("failed", "failure")]
    found = [counted(kinds.count(kind), word) for kind, word in words if kind in kinds]
    back = kinds.count("back")
    return ", ".join(found + ([f"went back {counted(back, 'time')}"] if back else []))


def _share(run: Row, lost: Sequence[float]) -> str:
    each = f"{duration(statistics.median(lost))} a save"
    trained = sum(attempt["seconds"] or 0 for attempt in run["attempts"])
    return f"{each}; {percent(sum(lost) / trained)} of the time" if trained > sum(lost) else each


def _integrity(run: Row, here: Sequence[Row]) -> list[Markup]:
    damaged = sum(bool(save["problem"]) for save in here)
    if damaged:
        return [tag("strong", f"{damaged} of {len(here)} damaged", class_="bad")]
    if not here:
        return _fact("nothing to check", "")
    if run["checked"] == "bytes":
        return _fact("intact", "every byte was read and is as it was written")
    return _fact(
        "no damage seen", "manifests are intact, files have their sizes; resumable verify reads every byte"
    )


def _remote(run: Row, here: Sequence[Row]) -> list[Markup]:
    if not run["remote"]:
        return _fact("none", "")
    there = sum(save["pushed"] for save in run["saves"])
    more = f"{run['remote']['url']} (push {run['remote']['push']}), as far as the history says"
    return _fact(f"{counted(there, 'checkpoint')} pushed", more)


def _columns(run: Row, names: Sequence[str]) -> list[tuple[str, bool, Any]]:
    """Return the columns of the table: the title, whether it holds words, and what makes a cell."""

    def metric(name: str) -> tuple[str, bool, Any]:
        return printable(name, but=""), False, lambda save: number(save["metrics"].get(name))

    return [
        ("number", False, lambda save: str(save["number"])),
        ("state", True, lambda save: _state(run, save)),
        ("step", False, lambda save: _grouped(save["step"])),
        ("epoch", False, lambda save: _grouped(save["epoch"])),
        ("batch", False, lambda save: _grouped(save["batch"])),
        *map(metric, names),
        ("why", True, lambda save: _short(save["why"] or "")),
        ("saved, UTC", True, lambda save: _time(save["time"])),
        ("held up", False, lambda save: _seconds(save["lost"])),
        ("durable after", False, lambda save: _seconds(save["durable"])),
        ("size", False, lambda save: "" if save["size"] is None else bytes_of(save["size"])),
        ("not shared", False, lambda save: _unshared(run, save)),
        ("attempt", False, lambda save: "" if save["attempt"] is None else str(save["attempt"])),
    ]


def _state(run: Row, save: Row) -> Markup:
    words = [word for word in ("newest", "best") if save["number"] == run[word]]
    words += ["damaged"] if save["problem"] else []
    words += [word for word in ("abandoned", "pushed") if save[word]]
    words += [] if save["here"] else ["not kept"]
    return _joined([tag("span", word, class_=f"badge {word.replace(' ', '-')}") for word in words])


def _unshared(run: Row, save: Row) -> str:
    is_known = save["own"] is not None and run["size"] != run["size_unshared"]
    return bytes_of(save["own"]) if is_known else ""


def _time(time: str | None) -> Markup:
    return tag("time", when(time).removesuffix(" UTC"))


def _happened(run: Row) -> Markup:
    events = run["events"]
    if not events:
        text = "It was never interrupted." if run["attempts"] else "The history is empty."
        return tag("p", text, class_="empty")
    shown = events[-200:]
    some = f"the last {len(shown)} of {len(events):,}" if len(shown) < len(events) else "all"
    caption = f"Resumes, preemptions and the like of {run['run']}: {some}, oldest first"
    rows = ([_time(e["time"]), _text(sentence(e)), _grouped(e["step"]), _grouped(e["epoch"])] for e in shown)
    return scrolling(table(caption, ["when, UTC", "what", "at step", "epoch"], rows, (0, 1)), caption)


def _attempts(run: Row) -> Markup:
    attempts = run["attempts"]
    if not attempts:
        return tag("p", "The history has no start of a process.", class_="empty")
    caption = f"Processes that trained {run['run']}"
    head = ["attempt", "started, UTC", "went on from", "ended", "on", "ran", "differed"]
    if len(attempts) > 100:
        caption += f": the last 100 of {len(attempts):,}"
    rows = [_attempt(one) for one in attempts[-100:]]
    return scrolling(table(caption, head, rows, range(1, 7)), caption)


def _attempt(one: Row) -> list[object]:
    came_from = one["from"]
    commit = f"commit {str(one['git'])[:10]}{', changed since' if one['dirty'] else ''}" if one["git"] else ""
    argv = one["argv"] if isinstance(one["argv"], list) else []
    took = [] if one["seconds"] is None else [f"for {duration(one['seconds'])}"]
    return [
        str(one["attempt"]),
        _lines([_time(one["time"]), ", ".join([*took, counted(one["saves"], "save")])]),
        "fresh" if came_from is None else f"checkpoint {came_from}",
        _text(one["ended"] or "running or crashed (no exit recorded)"),
        _lines([f"{one['host']}, process {one['pid']}", *_environment(one)]),
        _lines([" ".join(map(str, argv)), commit]),
        _lines([*_differed(one)]),
    ]


def _environment(one: Row) -> Iterator[str]:
    versions = one["versions"] if isinstance(one["versions"], dict) else {}
    known = one["environment"] or {}
    yield ", ".join(f"{name} {versions[name]}" for name in versions)
    gpus = known.get("gpus")
    counts = Counter(map(str, gpus)) if isinstance(gpus, list) else {}
    named = [f"{count} x {gpu}" for gpu, count in counts.items()]
    yield ", ".join(named or [str(known[key]) for key in ("platform", "cpu") if known.get(key)])


def _differed(one: Row) -> Iterator[str]:
    for row in one["changed"]:
        yield f"{row.get('name')}: {row.get('then')} -> {row.get('now')} ({row.get('effect')})"
    known = {row.get("name") for row in one["changed"]}
    for row in one["differs"]:
        if row["name"] not in known:
            length = 10 if row["name"] == "git" else 80
            yield f"{row['name']}: {_short(row['then'], length)} -> {_short(row['now'], length)}"


def _short(value: Json, length: int = 80) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _lines(texts: Sequence[object]) -> Markup:
    return tag("div", *(tag("div", text) for text in texts if text), class_="text")


def _toggle(kind: str, value: str, label: str, shape: str) -> Markup:
    path = Markup(f'<svg viewBox="0 0 16 16" aria-hidden="true"><path d="{SHAPES[shape]}"/></svg>')
    given = {f"data_{kind}": value}
    return tag("button", path, label, type="button", aria_pressed="true", **given)


def _joined(parts: Sequence[Markup]) -> Markup:
    return Markup("".join(parts))


def _grouped(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:,.3f} s"


def _text(value: object) -> Markup:
    return tag("div", value, class_="text")
