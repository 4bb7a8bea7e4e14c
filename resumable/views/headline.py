"""What a report says first: how a run stands and what it was started with, or what tells several apart."""

from __future__ import annotations

import shlex
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import printable
from ..run.markup import Markup, escaped, scrolling, section, table, tag
from ..run.policy import bytes_of, counted, duration, percent, when
from .charts import is_finite, metrics, number

Row = Mapping[str, Any]
Fact = tuple[str, list[str]]
"""A title, and the lines below it."""


def badge(run: Row) -> Markup:
    """Return the word for the state of a run."""
    return tag("span", run["state"], class_=f"badge {run['state'].split()[0]}")


def of_one(run: Row) -> Markup:
    """Return what stands at the head of the page about one run."""
    facts = (fact for fact in _facts(run) if fact != ("remote", ["none"]))
    cards = (tag("div", tag("dt", title), tag("dd", *_divs(lines))) for title, lines in facts)
    parts = [tag("dl", *cards, class_="cards")]
    if command := _command(run):
        parts.insert(0, tag("p", tag("code", command), class_="command"))
    if settings := started_with(run):
        parts.append(_settings(settings, "Started with"))
    return Markup("".join(parts))


def of_several(runs: Sequence[Row]) -> Markup:
    """Return a table with a column for each run: how it stands, its metrics, and what differs."""
    rows: list[tuple[str, list[object]]] = [("state", [badge(run) for run in runs])]
    settings = [started_with(run) for run in runs]
    unlike, alike = _compared(settings)
    # An earlier version has recorded no settings.
    is_known = [bool(run["attempts"] and run["attempts"][-1]["settings"]) for run in runs]
    both = [(one, "none" if known else "not recorded") for one, known in zip(settings, is_known, strict=True)]
    rows += [
        (name, [tag("div", tag("b", one.get(name, unknown))) for one, unknown in both]) for name in unlike
    ]
    for facts in zip(*map(_facts, runs), strict=True):
        if any(lines != ["none"] for _, lines in facts):
            rows.append((facts[0][0], [_cell(lines) for _, lines in facts]))
    rows += [(name, [_cell(_values(run, name)) for run in runs]) for name in metrics(runs)[:_MOST_METRICS]]
    if len({_command(run) for run in runs}) > 1:
        rows.append(("command", [tag("div", tag("code", _command(run))) for run in runs]))
    names = [printable(run["run"], but="") for run in runs]
    label = "Bold: what the runs were started with and does not agree" if unlike else "Runs side by side"
    lines = [[title, *cells] for title, cells in rows]
    side_by_side = table(label, ["", *names], lines, range(len(names) + 1))
    parts = [tag("div", scrolling(side_by_side, label), class_="whole")]
    if alike:
        parts.append(_settings({name: settings[0][name] for name in alike}, "The same in all"))
    return section("Side by side", 2, *parts)


def started_with(run: Row) -> dict[str, str]:
    """Return the settings, the versions and the commit of the last start, as text."""
    if not run["attempts"]:
        return {}
    last = run["attempts"][-1]
    versions = last["versions"] if isinstance(last["versions"], dict) else {}
    found = {
        **(last["settings"] or {}),
        **{name: str(version) for name, version in versions.items()},
        **({"commit": commit} if (commit := commit_of(last)) else {}),
    }
    return {name: _grouped(name, text) for name, text in found.items() if text not in ("[]", "{}")}


def _grouped(name: str, text: str) -> str:
    return f"{int(text):,}" if name.endswith(".parameters") and text.isdecimal() else text


def commit_of(attempt: Row) -> str:
    """Return the commit of a start in short; empty if it is unknown."""
    return (
        f"{str(attempt['git'])[:10]}{', changed since' if attempt['dirty'] else ''}" if attempt["git"] else ""
    )


def _compared(settings: Sequence[Mapping[str, str]]) -> tuple[list[str], list[str]]:
    names = [*dict.fromkeys(name for one in settings for name in one)]
    unlike = [name for name in names if len({one.get(name) for one in settings}) > 1]
    return unlike, [name for name in names if name not in unlike]


def _settings(settings: Mapping[str, str], title: str) -> Markup:
    """Return settings below a line with the most important of them."""
    known = [name for name, text in settings.items() if text != "None"]
    telling = [name for name in known if name.rpartition(".")[2] in _TELLING][:_MOST_TELLING]
    first = [Markup(f"{escaped(name)}&nbsp;<b>{escaped(settings[name])}</b>") for name in telling]
    rest = f"{'and ' if first else ''}{len(settings) - len(first)} more" if len(settings) > len(first) else ""
    line = ", ".join([*first, *([rest] if rest else [])])
    pairs = (tag("div", tag("dt", name), tag("dd", text)) for name, text in settings.items())
    return tag("details", tag("summary", f"{title} ", Markup(line)), tag("dl", *pairs, class_="settings"))


def _command(run: Row) -> str:
    argv = run["attempts"][-1]["argv"] if run["attempts"] else None
    return shlex.join(["python", *map(str, argv)]) if isinstance(argv, list) and argv else ""


def _facts(run: Row) -> Iterator[Fact]:
    at = {save["number"]: save for save in run["saves"]}
    newest, best, goal = at.get(run["newest"]), at.get(run["best"]), run["goal"]
    here = [save for save in run["saves"] if save["here"]]
    yield "done", _done(run)
    yield "trained for", [_trained(run), _interruptions(run)]
    leader = ["none", "load() was given no maximize= or minimize="]
    if goal:
        step = f", step {best['step']:,}" if best else ""
        way = "highest" if goal["maximize"] else "lowest"
        leader = [number(goal["value"]), f"{way} {goal['metric']}: checkpoint {run['best']}{step}"]
    yield "best", leader
    yield "newest", _where(newest) if newest else ["none"]
    yield "lost to saving", _lost(run)
    kept = f"{len(here):,} of {counted(len(run['saves']), 'checkpoint')} kept"
    spared = run["size_unshared"] - run["size"]
    shared = f", {bytes_of(spared)} shared" if spared else ""
    yield "on the disk", [bytes_of(run["size"]), kept + shared, *_integrity(run, here)]
    yield "remote", _remote(run)


def _done(run: Row) -> list[str]:
    done, planned = run["done"], run["planned"] or {}
    if done is None:
        return ["nothing"]
    unit = "step" if "steps" in planned or (not done["epoch"] and not planned) else "epoch"
    total = planned.get(f"{unit}s")
    first = f"{unit} {done[unit]:,}" + (f" of {total:,}" if total is not None else "")
    return [first, f"step {done['step']:,}" if unit == "epoch" else f"epoch {done['epoch']:,}"]


def is_unrecorded(attempt: Row) -> bool:
    """Return whether no end of an attempt was recorded, so that its last save is the last that is known."""
    return not attempt["ended"] or attempt["ended"].startswith("killed")


def _trained(run: Row) -> str:
    seconds, attempts = run["seconds"], run["attempts"]
    if seconds is None:
        return "not recorded"
    ended = attempts[:-1] if run["state"] == "running" else attempts
    least = "at least " if any(map(is_unrecorded, ended)) else ""
    # The history has whole seconds.
    return f"{least}{duration(seconds)}" if seconds else "under 1 s"


def _where(save: Row) -> list[str]:
    place = f"step {save['step']:,}, epoch {save['epoch']:,}, batch {save['batch']:,}"
    return [f"checkpoint {save['number']}", *filter(None, (place, when(save["time"])))]


def _interruptions(run: Row) -> str:
    kinds = Counter(event["kind"] for event in run["events"])
    words = [("resume", "resume"), ("preempted", "preemption"), ("failed", "failure"), ("back", "step back")]
    found = [counted(kinds[kind], word) for kind, word in words if kinds[kind]]
    return ", ".join([counted(len(run["attempts"]), "attempt"), *found])


def _lost(run: Row) -> list[str]:
    held = [save["held"] for save in run["saves"] if save["held"] is not None]
    if not held:
        return ["not recorded"]
    rest = len(run["saves"]) - len(held)
    each = f"median {duration(statistics.median(held))} a save" + (f", {rest:,} not recorded" if rest else "")
    # The history has whole seconds: a share of a few of them would be a guess.
    is_share = not rest and (run["seconds"] or 0) >= max(10 * len(run["attempts"]), sum(held))
    return [
        duration(sum(held)),
        f"{percent(sum(held) / run['seconds'])} of the time; {each}" if is_share else each,
    ]


def _integrity(run: Row, here: Sequence[Row]) -> list[str]:
    if damaged := sum(bool(save["problem"]) for save in here):
        return [f"{damaged} of {len(here)} damaged"]
    if not here:
        return []
    if run["checked"] == "bytes":
        return ["intact: every byte was read"]
    return ["no file is missing or cut short"]


def _remote(run: Row) -> list[str]:
    if not run["remote"]:
        return ["none"]
    there = counted(sum(save["pushed"] for save in run["saves"]), "checkpoint")
    return [f"{there} pushed", f"to {run['remote']['url']} (push {run['remote']['push']}), by the history"]


def _values(run: Row, name: str) -> list[str]:
    """Return the last value of a metric, and between which it was."""
    found = [
        save["metrics"][name] for save in run["saves"] if name in save["metrics"] and not save["abandoned"]
    ]
    known = [value for value in found if is_finite(value)]
    between = [f"{number(min(known))} to {number(max(known))}"] if len(known) > 1 else []
    return [number(found[-1]), *between] if found else []


def _divs(lines: Sequence[str]) -> list[Markup]:
    return [
        tag("div", text, **({} if place == 0 else {"class_": "quiet"})) for place, text in enumerate(lines)
    ]


def _cell(lines: Sequence[str]) -> Markup:
    return tag("div", *_divs(lines))


_MOST_METRICS = 24
_MOST_TELLING = 12
_TELLING = {"lr", "batch_size", "weight_decay", "parameters", "seed", "every", "keep", "processes", "commit"}
