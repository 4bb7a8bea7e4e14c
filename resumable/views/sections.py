"""The sections of a report, from top to bottom: the runs at a glance, the charts, the tables."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import printable
from ..files.strict_json import Json
from ..run.markup import Markup, scrolling, section, table, tag
from ..run.policy import bytes_of, counted, duration, percent, when
from . import charts
from .charts import number, sentence

Row = Mapping[str, Any]

MOST_METRICS = 24
_MOST_EVENTS, _MOST_ATTEMPTS, _LONGEST = 200, 100, 80


def body(runs: Sequence[Row], nonce: str) -> Markup:
    """Return all sections."""
    most = min(charts.MOST, max(charts.MOST // 6, 2 * charts.MOST // len(runs)))
    saves = [charts.shown(run, most) for run in runs]
    names = charts.metrics(runs)
    parts = [section("At a glance", 2, _glance(runs)), *_charts(runs, saves, names, nonce)]
    level = 2 if len(runs) == 1 else 3
    for run, shown in zip(runs, saves, strict=True):
        inner = [*_about(run, shown, names[:MOST_METRICS], level, nonce)]
        parts += inner if level == 2 else [section(run["run"], 2, *inner)]
    return Markup("".join(parts))


def _charts(
    runs: Sequence[Row], saves: Sequence[Sequence[Row]], names: Sequence[str], nonce: str
) -> Iterator[Markup]:
    if names:
        shown, label = names[:MOST_METRICS], "Metrics by step. The tables of checkpoints have the figures."
        drawn = charts.drawn(charts.of_metrics(runs, saves, shown), label, nonce)
        rest = counted(len(names) - len(shown), "further metric")
        more = [tag("p", f"{rest}: see resumable report --json.")] if len(names) > len(shown) else []
        yield section("Metrics", 2, drawn, *more)
    else:
        yield section("Metrics", 2, tag("p", "No save was given a metric: state.save(loss=loss)."))
    about = "How long each save held up the training, and how long until it was durable, in the background."
    costs = charts.of_costs(runs, saves)
    cost = charts.drawn(costs, about, nonce) if costs else tag("p", "The history has no save.")
    yield section("What saving costs", 2, tag("p", about), cost)


def _about(run: Row, saves: Sequence[Row], names: Sequence[str], level: int, nonce: str) -> Iterator[Markup]:
    problems = filter(None, [run["problem"], *(save["problem"] for save in run["saves"])])
    parts = [tag("p", text, class_="bad") for text in problems][:20]
    if sizes := charts.of_sizes(run, saves):
        parts.append(charts.drawn(sizes, "Sizes of the checkpoints that are kept.", nonce))
    parts.append(_saves(run, saves, names) if saves else tag("p", "Nothing was saved yet."))
    yield section("Checkpoints", level, *parts)
    yield section("What happened", level, _happened(run))
    yield section("Attempts", level, _attempts(run))


def _glance(runs: Sequence[Row]) -> Markup:
    rows = zip(*map(_facts, runs), strict=True)
    lines = [[row[0][0], *(tag("div", text) for _, text in row)] for row in rows]
    names = [printable(run["run"], but="") for run in runs]
    return _table("The runs at a glance", ["", *names], lines, range(len(runs) + 1))


def _facts(run: Row) -> list[tuple[str, str]]:
    at = {save["number"]: save for save in run["saves"]}
    newest, best, goal = at.get(run["newest"]), at.get(run["best"]), run["goal"]
    here = [save for save in run["saves"] if save["here"]]
    lost = [save["lost"] for save in run["saves"] if save["lost"] is not None]
    leader = "none"
    if goal:
        way = "highest" if goal["maximize"] else "lowest"
        step = f", step {best['step']:,}" if best else ""
        leader = f"{number(goal['value'])} ({way} {goal['metric']}): checkpoint {run['best']}{step}"
    spared = run["size_unshared"] - run["size"]
    kept = f"{len(here):,} of {counted(len(run['saves']), 'checkpoint')} kept"
    return [
        ("newest", _where(newest) if newest else "none"),
        ("best", leader),
        (
            "on the disk",
            f"{bytes_of(run['size'])}; {kept}" + (f"; {bytes_of(spared)} shared" if spared else ""),
        ),
        ("attempts", _interruptions(run)),
        ("lost to saving", _share(run, lost) if lost else "unknown"),
        ("integrity", _integrity(run, here)),
        ("remote", _remote(run)),
    ]


def _where(save: Row) -> str:
    place = (
        f"checkpoint {save['number']}: step {save['step']:,}, epoch {save['epoch']}, batch {save['batch']}"
    )
    return "; ".join(filter(None, (place, when(save["time"]))))


def _interruptions(run: Row) -> str:
    kinds = Counter(event["kind"] for event in run["events"])
    words = [("resume", "resume"), ("preempted", "preemption"), ("failed", "failure"), ("back", "step back")]
    found = [counted(kinds[kind], word) for kind, word in words if kinds[kind]]
    return ", ".join([str(len(run["attempts"])), *found])


def _share(run: Row, lost: Sequence[float]) -> str:
    each = f"{duration(sum(lost))}; {duration(statistics.median(lost))} a save"
    trained = sum(attempt["seconds"] or 0 for attempt in run["attempts"])
    return f"{each}; {percent(sum(lost) / trained)} of the time" if trained > sum(lost) else each


def _integrity(run: Row, here: Sequence[Row]) -> str:
    if damaged := sum(bool(save["problem"]) for save in here):
        return f"{damaged} of {len(here)} damaged"
    if not here:
        return "nothing to check"
    if run["checked"] == "bytes":
        return "intact: every byte was read and is as it was written"
    return "no damage seen: files have their sizes; resumable verify reads every byte"


def _remote(run: Row) -> str:
    if not run["remote"]:
        return "none"
    there = counted(sum(save["pushed"] for save in run["saves"]), "checkpoint")
    return f"{there} pushed to {run['remote']['url']} (push {run['remote']['push']}), as the history says"


def _saves(run: Row, saves: Sequence[Row], names: Sequence[str]) -> Markup:
    shows_own = run["size"] != run["size_unshared"]
    rows = [
        {
            "number": str(save["number"]),
            "state": _state(run, save),
            **{key: _text(save[key]) for key in ("step", "epoch", "batch")},
            **{f"metric {name}": number(save["metrics"].get(name)) for name in names},
            "why": _short(save["why"] or ""),
            "saved, UTC": when(save["time"]).removesuffix(" UTC"),
            "held up": "" if save["lost"] is None else f"{save['lost']:,.3f} s",
            "durable after": "" if save["durable"] is None else f"{save['durable']:,.3f} s",
            "size": "" if save["size"] is None else bytes_of(save["size"]),
            "not shared": bytes_of(save["own"]) if shows_own and save["own"] is not None else "",
            "attempt": _text(save["attempt"]),
        }
        for save in reversed(saves)
    ]
    columns = [key for key in rows[0] if any(row[key] for row in rows)]
    head = [printable(key.removeprefix("metric "), but="") for key in columns]
    words = [place for place, key in enumerate(columns) if key in ("state", "why", "saved, UTC")]
    some = f"{len(saves):,} of " if len(saves) < len(run["saves"]) else ""
    caption = f"Checkpoints of {run['run']}: {some}{len(run['saves']):,}, newest first"
    return _table(caption, head, [[row[key] for key in columns] for row in rows], words)


def _state(run: Row, save: Row) -> str:
    words = [word for word in ("newest", "best") if save["number"] == run[word]]
    words += ["damaged"] if save["problem"] else []
    words += [word for word in ("abandoned", "pushed") if save[word]]
    return ", ".join(words + ([] if save["here"] else ["not kept"]))


def _happened(run: Row) -> Markup:
    shown = run["events"][-_MOST_EVENTS:]
    if not shown:
        return tag("p", "It was never interrupted." if run["attempts"] else "The history is empty.")
    some = f"the last {len(shown)} of {len(run['events']):,}" if len(shown) < len(run["events"]) else "all"
    caption = f"Resumes, preemptions and the like of {run['run']}: {some}, oldest first"
    rows = [[when(e["time"]), tag("div", sentence(e)), _text(e["step"]), _text(e["epoch"])] for e in shown]
    return _table(caption, ["when", "what", "at step", "epoch"], rows, (0, 1))


def _attempts(run: Row) -> Markup:
    attempts = run["attempts"]
    if not attempts:
        return tag("p", "The history has no start of a process.")
    caption = f"Processes that trained {run['run']}"
    if len(attempts) > _MOST_ATTEMPTS:
        caption += f": the last {_MOST_ATTEMPTS} of {len(attempts):,}"
    head = ["attempt", "started", "resumed from", "ended", "on", "ran", "changed"]
    return _table(caption, head, [_attempt(one) for one in attempts[-_MOST_ATTEMPTS:]], range(1, 7))


def _attempt(one: Row) -> list[object]:
    commit = f"commit {str(one['git'])[:10]}{', changed since' if one['dirty'] else ''}" if one["git"] else ""
    argv = one["argv"] if isinstance(one["argv"], list) else []
    took = [] if one["seconds"] is None else [f"for {duration(one['seconds'])}"]
    return [
        str(one["attempt"]),
        _lines([when(one["time"]), ", ".join([*took, counted(one["saves"], "save")])]),
        "fresh" if one["from"] is None else f"checkpoint {one['from']}",
        _lines([one["ended"] or "running or crashed (no exit recorded)"]),
        _lines([f"{one['host']}, process {one['pid']}", *_environment(one)]),
        _lines([" ".join(map(str, argv)), commit]),
        _lines(
            [
                f"{c.get('name')}: {c.get('then')} -> {c.get('now')} ({c.get('effect')})"
                for c in one["changed"]
            ]
        ),
    ]


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
    return tag("div", *(tag("div", text) for text in texts if text))


def _table(
    caption: str, head: Sequence[str], rows: Sequence[Sequence[object]], to_the_left: Sequence[int]
) -> Markup:
    return scrolling(table(caption, head, rows, to_the_left), caption)
