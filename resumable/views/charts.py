"""The series that the charts of a report show: which saves, and what is known about each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..errors import printable
from ..files.strict_json import Json
from ..run.policy import moment

Row = Mapping[str, Any]

MOST = 2500
"""How many saves are drawn, over all runs."""
_MOST_EVENTS = 150
_LONGEST = 200


def metrics(runs: Iterable[Row]) -> list[str]:
    """Return the metrics of some runs, first those that decide which checkpoint is best."""
    goals = [run["goal"]["metric"] for run in runs if run["goal"]]
    return [
        *dict.fromkeys(goals + [name for run in runs for save in run["saves"] for name in save["metrics"]])
    ]


def shown(run: Row, most: int) -> list[Row]:
    """Return the saves of a run that are shown: of very many, those that matter and the curves' extremes.

    >>> run = {"saves": [{"number": n, "metrics": {"acc": (n - 500) ** 2}} for n in range(1000)]}
    >>> few = shown(run | {"newest": 999, "best": 7, "goal": None, "events": []}, most=40)
    >>> len(few) <= 40, {0, 7, 500, 999} <= {save["number"] for save in few}
    (True, True)
    """
    saves = run["saves"]
    if len(saves) <= most:
        return [*saves]
    stays = {run["newest"], run["best"], saves[0]["number"], saves[-1]["number"]}
    marked = [event["number"] for event in run["events"]]
    marked += [save["number"] for save in saves if save.get("problem")]
    stays |= {*_spread(marked, most // 4)}
    names = metrics([run])[:3]
    length = -(-len(saves) // max(1, (most - len(stays)) // (2 * max(1, len(names)))))
    for start in range(0, len(saves), length):
        stays |= {*_extremes(saves[start : start + length], names)}
    return [save for save in saves if save["number"] in stays]


def _spread(values: Sequence[Any], most: int) -> Sequence[Any]:
    return values[:: -(-len(values) // most)] if len(values) > most else values


def _extremes(saves: Sequence[Row], names: Sequence[str]) -> Iterator[int]:
    if not names:
        yield saves[0]["number"]
    for name in names:
        known = [(float(s["metrics"][name]), s["number"]) for s in saves if is_finite(s["metrics"].get(name))]
        if known:
            yield min(known)[1]
            yield max(known)[1]


def is_finite(value: Json) -> bool:
    """Return whether a metric can be drawn."""
    return isinstance(value, (int, float))


def data(runs: Sequence[Row], names: Sequence[str]) -> dict[str, Any]:
    """Return what the page's script draws, as JSON: the runs by columns, one value for each save."""
    most = max(MOST // 5, MOST // len(runs))
    x = "step" if any(save["step"] for run in runs for save in run["saves"]) else "number"
    return {
        "x": {"step": "step", "number": "save number"}[x],
        "metrics": [_safe(name) for name in names],
        "runs": [_run(run, names, x, most) for run in runs],
    }


def _run(run: Row, names: Sequence[str], x: str, most: int) -> dict[str, Any]:
    saves = [save for save in shown(run, most) if save[x] is not None]
    # A run that was put back has later saves at earlier steps.
    saves.sort(key=lambda save: (save[x], save["number"]))
    return {
        "name": _safe(run["run"]),
        "x": [save[x] for save in saves],
        **{key: [save[key] for save in saves] for key in ("number", "epoch", "batch", "held", "durable")},
        "time": [save["time"] and moment(save["time"]) for save in saves],
        "state": [", ".join(states(run, save)) for save in saves],
        "why": [save["why"] and _safe(save["why"]) for save in saves],
        "metrics": [[_value(save["metrics"].get(name)) for save in saves] for name in names],
        "best": run["best"],
        "goal": names.index(run["goal"]["metric"])
        if run["goal"] and run["goal"]["metric"] in names
        else None,
        "branches": [*_branches(run, saves)],
        "events": [*_events(run, x)],
    }


def states(run: Row, save: Row) -> list[str]:
    """Return the words for what a save is: the newest, damaged, not kept and so on."""
    words = [word for word in ("newest", "best") if save["number"] == run[word]]
    words += ["damaged"] if save["problem"] else []
    words += [word for word in ("abandoned", "pushed") if save[word]]
    return words + ([] if save["here"] else ["not kept"])


def _value(value: Json) -> Json:
    # Nine digits tell any two float32 apart.
    return float(f"{value:.9g}") if isinstance(value, float) else value


def _branches(run: Row, saves: Sequence[Row]) -> Iterator[tuple[int | None, int]]:
    """Yield for each abandoned save the indices of the save before it on its branch, and of itself."""
    at = {save["number"]: index for index, save in enumerate(saves)}
    parents = {save["number"]: save["parent"] for save in run["saves"]}
    for save in saves:
        if save["abandoned"]:
            parent = parents[save["number"]]
            # A parent is always older: the loop has to end in a damaged history too.
            while parent is not None and parent not in at:
                before, parent = parent, parents.get(parent)
                parent = parent if parent is not None and parent < before else None
            is_older = parent is not None and parent < save["number"]
            yield (at[parent] if parent is not None and is_older else None), at[save["number"]]


def _events(run: Row, x: str) -> Iterator[dict[str, Any]]:
    places = {save["number"]: save[x] for save in run["saves"]}
    found = [
        (event["step"] if x == "step" else places.get(event["number"]), event) for event in run["events"]
    ]
    for place, event in _spread([pair for pair in found if pair[0] is not None], _MOST_EVENTS):
        yield {"x": place, "kind": event["kind"], "text": _safe(sentence(event))}


def sentence(event: Row) -> str:
    """Return an event in words.

    >>> sentence({"kind": "resume", "attempt": 2, "number": 41, "how": None})
    'attempt 2 resumed from checkpoint 41'
    """
    attempt = f"attempt {event['attempt']}"
    if event["kind"] == "resume":
        return f"{attempt} resumed from checkpoint {event['number']}"
    if event["kind"] == "back":
        return f"{attempt} went back to checkpoint {event['number']}"
    what = "was preempted" if event["kind"] == "preempted" else "ended"
    place = (
        f", after step {event['step']:,}" if is_unrecorded_end(event) and event["step"] is not None else ""
    )
    return f"{attempt} {what}: {event['how'].splitlines()[0]}{place}"


def is_unrecorded_end(event: Row) -> bool:
    """Return whether an attempt ended at an unknown moment after its last save, which the event names."""
    return event["kind"] in ("preempted", "failed") and event["number"] is not None


def number(value: Json) -> str:
    """Return a metric as text.

    >>> number(0.123456789), number("nan"), number(None)
    ('0.123457', 'nan', '')
    """
    return f"{value:.6g}" if isinstance(value, (int, float)) else str(value or "")


def _safe(text: str) -> str:
    line = printable(text, but="")
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"
