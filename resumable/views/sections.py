"""The sections of a report below its head: the charts, the tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import printable
from ..files.strict_json import Json
from ..run import history
from ..run.markup import Markup, scrolling, section, table, tag
from ..run.policy import bytes_of, counted, duration, when
from . import charts, headline
from .charts import number, sentence

Row = Mapping[str, Any]

MOST_METRICS = 24
_MOST_ROWS, _MOST_EVENTS, _MOST_ATTEMPTS, _LONGEST = 300, 200, 100, 80


def body(runs: Sequence[Row]) -> Markup:
    """Return all sections."""
    names = charts.metrics(runs)
    first = headline.of_one(runs[0]) if len(runs) == 1 else headline.of_several(runs)
    parts = [first, *_charts(runs, names)]
    level = 2 if len(runs) == 1 else 3
    for run in runs:
        inner = [*_about(run, names[:MOST_METRICS], level)]
        parts += inner if level == 2 else [section(run["run"], 2, *inner)]
    return Markup("".join(parts))


def _charts(runs: Sequence[Row], names: Sequence[str]) -> Iterator[Markup]:
    bar = tag("div", class_="bar")
    if names:
        figures = [_figure(f"metric {index}", name) for index, name in enumerate(names[:MOST_METRICS])]
        rest = counted(len(names) - len(figures), "further metric")
        more = [tag("p", f"{rest}: see resumable report --json.")] if len(names) > len(figures) else []
        yield section("Metrics", 2, bar, tag("div", *figures, class_="charts"), *more)
    else:
        yield section(
            "Metrics", 2, tag("p", "No save was given a metric: state.save(loss=loss) draws a curve here.")
        )
    figures = [
        _figure(key, title)
        for key, title in (
            ("held", "Training held up, seconds"),
            ("durable", "Durable in the background after, seconds"),
        )
        if any(save[key] is not None for run in runs for save in run["saves"])
    ]
    drawn = [*([] if names else [bar]), tag("div", *figures, class_="charts")]
    saved = "not recorded: the history has no times of saves."
    yield section("What saving costs", 2, *(drawn if figures else [tag("p", saved.capitalize())]))


def _figure(key: str, title: str) -> Markup:
    name = printable(title, but="")
    label = f"{name} by step. The table of checkpoints has the figures."
    drawing = tag("svg", class_="plot", role="img", tabindex="0", aria_label=label)
    return tag("figure", tag("figcaption", name, tag("span")), drawing, data_series=key)


def _about(run: Row, names: Sequence[str], level: int) -> Iterator[Markup]:
    problems = filter(None, [run["problem"], *(save["problem"] for save in run["saves"])])
    parts = [tag("p", text, class_="bad") for text in problems][:20]
    saves = charts.shown(run, _MOST_ROWS)
    parts.append(_saves(run, saves, names) if saves else tag("p", "Nothing was saved yet."))
    yield section("Checkpoints", level, *parts)
    if any(one["warnings"] for one in run["attempts"]):
        yield section("Warnings", level, _warnings(run))
    yield section("What happened", level, _happened(run))
    yield section("Attempts", level, _attempts(run))


def _saves(run: Row, saves: Sequence[Row], names: Sequence[str]) -> Markup:
    shows_own = run["size"] != run["size_unshared"]
    rows = [
        {
            "number": str(save["number"]),
            "state": ", ".join(charts.states(run, save)),
            **{key: _text(save[key]) for key in ("step", "epoch", "batch")},
            **{f"metric {name}": number(save["metrics"].get(name)) for name in names},
            "why": tag("div", _short(save["why"])) if save["why"] else "",
            "saved, UTC": when(save["time"]).removesuffix(" UTC"),
            "held up": "" if save["held"] is None else f"{save['held']:,.3f} s",
            "durable after": "" if save["durable"] is None else f"{save['durable']:,.3f} s",
            "size": "" if save["size"] is None else bytes_of(save["size"]),
            "not shared": bytes_of(save["own"]) if shows_own and save["own"] is not None else "",
            "attempt": _text(save["attempt"]),
        }
        for save in reversed(saves)
    ]
    columns = [key for key in rows[0] if any(row[key] for row in rows)]
    head = [key.removeprefix("metric ") for key in columns]
    words = [place for place, key in enumerate(columns) if key in ("state", "why", "saved, UTC")]
    some = f"{len(saves):,} of " if len(saves) < len(run["saves"]) else ""
    caption = f"Checkpoints of {run['run']}: {some}{len(run['saves']):,}, newest first"
    return _table(caption, head, [[row[key] for key in columns] for row in rows], words)


def _warnings(run: Row) -> Markup:
    starts = dict[str, list[str]]()
    for one in run["attempts"]:
        for text in one["warnings"]:
            starts.setdefault(text, []).append(str(one["attempt"]))
    shown = [*starts.items()][-_MOST_EVENTS:]
    texts = [
        tag("div", *(tag("div", line) for line in text.splitlines()), class_="text") for text, _ in shown
    ]
    rows = [[_short(", ".join(found)), text] for (_, found), text in zip(shown, texts, strict=True)]
    return _table(f"Warnings of {run['run']}", ["attempt", "warning"], rows, (1,))


def _happened(run: Row) -> Markup:
    shown = run["events"][-_MOST_EVENTS:]
    if not shown:
        return tag("p", "It was never interrupted." if run["attempts"] else "The history is empty.")
    some = f"the last {len(shown)} of {len(run['events']):,}" if len(shown) < len(run["events"]) else "all"
    caption = f"Resumes, preemptions and the like of {run['run']}: {some}, oldest first"
    rows = [[when(e["time"]), tag("div", sentence(e)), _at(e), _text(e["epoch"])] for e in shown]
    return _table(caption, ["when", "what", "at step", "epoch"], rows, (0, 1))


def _at(event: Row) -> str:
    step = _text(event["step"])
    return f"after {step}" if step and charts.is_unrecorded_end(event) else step


def _attempts(run: Row) -> Markup:
    attempts = run["attempts"]
    if not attempts:
        return tag("p", "The history has no start of a process.")
    caption = f"Processes that trained {run['run']}"
    if len(attempts) > _MOST_ATTEMPTS:
        caption += f": the last {_MOST_ATTEMPTS} of {len(attempts):,}"
    head = ["attempt", "started", "resumed from", "ended", "on", "ran", "changed"]
    ended = ["crashed"] * (len(attempts) - 1) + [run["state"]]
    rows = [*map(_attempt, attempts, ended)][-_MOST_ATTEMPTS:]
    used = [place for place in range(len(head)) if any(row[place] for row in rows)]
    shown = [[row[place] for place in used] for row in rows]
    return _table(caption, [head[place] for place in used], shown, range(1, len(used)))


def _attempt(one: Row, state: str) -> list[object]:
    commit = f"commit {known}" if (known := headline.commit_of(one)) else ""
    argv = one["argv"] if isinstance(one["argv"], list) else []
    least = "at least " if headline.is_unrecorded(one) and state != "running" else ""
    took = (
        []
        if one["seconds"] is None or (least and not one["seconds"])
        else [f"for {least}{duration(one['seconds'])}"]
    )
    return [
        str(one["attempt"]),
        _lines([when(one["time"]), ", ".join([*took, counted(one["saves"], "save")])]),
        "fresh" if one["from"] is None else f"checkpoint {one['from']}",
        _lines([one["ended"] or _UNENDED.get(state, "running or crashed (no exit recorded)")]),
        _lines([f"{one['host']}, process {one['pid']}", *_environment(one)]),
        _lines([" ".join(map(str, argv)), commit]),
        _lines(
            [
                f"{c.get('name')}: {c.get('then')} -> {c.get('now')} ({c.get('effect')})"
                for c in one["changed"]
            ]
        ),
    ]


_UNENDED = {"running": "running", "crashed": history.NO_EXIT}


def _environment(one: Row) -> Iterator[str]:
    versions = one["versions"] if isinstance(one["versions"], dict) else {}
    known = one["environment"] or {}
    yield ", ".join(f"{name} {versions[name]}" for name in versions)
    gpus = known.get("gpus")
    counts = Counter(map(str, gpus)) if isinstance(gpus, list) else {}
    named = [f"{count} x {gpu}" for gpu, count in counts.items()]
    yield ", ".join(named or [str(known[key]) for key in ("platform", "cpu") if known.get(key)])


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _text(value: Json) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _lines(texts: Sequence[str]) -> Markup:
    lines = [tag("div", text) for text in texts if text]
    return tag("div", *lines) if lines else Markup("")


def _table(
    caption: str, head: Sequence[str], rows: Sequence[Sequence[object]], to_the_left: Sequence[int]
) -> Markup:
    titles = [tag("div", printable(title, but="")) for title in head]
    return scrolling(table(caption, titles, rows, to_the_left), caption)
