"""The charts of a report, as traces for plotly: which saves they show, where, and each point's hover text."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..errors import printable
from ..files.strict_json import Json
from ..run.policy import bytes_of, duration, when

Row = Mapping[str, Any]
Trace = dict[str, Json]

MOST = 600
"""How many saves of a run are shown: as many as a curve needs and a page can hold."""

KINDS = {
    "save": "saves",
    "abandoned": "abandoned branches",
    "best": "the best",
    "resume": "resumes",
    "back": "went back",
    "preempted": "preemptions",
    "failed": "failures",
    "odd": "NaN or infinite",
}
"""The marks in the charts, which can be hidden."""


def metrics(runs: Iterable[Row]) -> list[str]:
    """Return the metrics of some runs, first those that decide which checkpoint is best."""
    goals = [run["goal"]["metric"] for run in runs if run["goal"]]
    return [
        *dict.fromkeys(goals + [name for run in runs for save in run["saves"] for name in save["metrics"]])
    ]


def shown(run: Row, most: int = MOST) -> list[Row]:
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
        known = [
            (float(s["metrics"][name]), s["number"]) for s in saves if _is_finite(s["metrics"].get(name))
        ]
        if known:
            yield min(known)[1]
            yield max(known)[1]


def _is_finite(value: Json) -> bool:
    return isinstance(value, (int, float))


class Curves:
    """The saves of some runs that are shown, and the charts of them."""

    def __init__(self, runs: Sequence[Row]) -> None:
        self.runs = runs
        self.shown = [shown(run, min(MOST, max(MOST // 6, 2 * MOST // len(runs)))) for run in runs]
        has_steps = any(save["step"] for run in runs for save in run["saves"])
        self.x = "step" if has_steps else "number"

    def metric(self, name: str) -> dict[str, Json]:
        """Return the chart of a metric over the steps."""
        every = (trace for index in range(len(self.runs)) for trace in self._traces(index, name))
        traces = [trace for trace in every if trace["x"]]
        # Marks last: no curve hides them.
        traces.sort(key=lambda trace: trace["kind"] not in ("curve", "branch", "save", "abandoned"))
        return {"title": printable(name, but=""), "kind": "metric", "x": _AXES[self.x], "traces": traces}

    def cost(self) -> dict[str, Json] | None:
        """Return the chart of what saving cost; None if the history does not say."""
        traces = []
        for index, saves in enumerate(self.shown):
            for kind in ("lost", "durable"):
                known = [save for save in saves if save[kind] is not None]
                points = [(save[self.x], save[kind], hover_text(save)) for save in known]
                traces += [_trace(index, kind, points)] if points else []
        return {"title": "seconds", "kind": "cost", "x": _AXES[self.x], "traces": traces} if traces else None

    def sizes(self, index: int) -> dict[str, Json] | None:
        """Return the chart of the sizes of a run's checkpoints; None if it has none."""
        here = [save for save in self.shown[index] if save["size"] and save["own"] is not None]
        own = [(save["number"], save["own"], hover_text(save)) for save in here]
        rest = [(save["number"], max(0, save["size"] - save["own"]), hover_text(save)) for save in here]
        if not here:
            return None
        traces = [_trace(index, "own", own)]
        traces += [_trace(index, "shared", rest)] if any(size for _, size, _ in rest) else []
        return {"title": "bytes", "kind": "sizes", "x": _AXES["number"], "traces": traces}

    def kinds(self) -> list[str]:
        """Return the marks that the charts of metrics have."""
        saves = [save for saves in self.shown for save in saves]
        there = {event["kind"] for run in self.runs for event in run["events"]}
        there |= {"save"} if saves else set()
        there |= {"abandoned"} if any(save["abandoned"] for save in saves) else set()
        there |= {"best"} if any(run["best"] is not None for run in self.runs) else set()
        odd = (value for save in saves for value in save["metrics"].values())
        there |= set() if all(map(_is_finite, odd)) else {"odd"}
        return [kind for kind in KINDS if kind in there]

    def _traces(self, index: int, name: str) -> Iterator[Trace]:
        run, saves = self.runs[index], self.shown[index]
        given = [save for save in saves if name in save["metrics"] and save[self.x] is not None]
        finite = [save for save in given if _is_finite(save["metrics"][name])]
        at = {save["number"]: (save[self.x], save["metrics"][name], hover_text(save, run)) for save in finite}
        stayed = [save for save in finite if not save["abandoned"]]
        left = [save for save in finite if save["abandoned"]]
        if not given:
            return
        yield _trace(index, "curve", [at[save["number"]] for save in stayed])
        yield _trace(index, "branch", [*_branches(left, at, run["saves"])])
        yield _trace(index, "save", [at[save["number"]] for save in stayed])
        yield _trace(index, "abandoned", [at[save["number"]] for save in left])
        if run["goal"] and run["goal"]["metric"] == name and run["best"] in at:
            yield _trace(index, "best", [at[run["best"]]])
        # What has no place on the curve is marked in a row below it.
        odd = [(s[self.x], 0, hover_text(s, run)) for s in given if not _is_finite(s["metrics"][name])]
        yield _trace(index, "odd", odd)
        for kind in ("resume", "back", "preempted", "failed"):
            yield _trace(index, kind, [*self._events(index, kind)])

    def _events(self, index: int, kind: str) -> Iterator[tuple[Any, Any, str]]:
        run = self.runs[index]
        places = {save["number"]: save[self.x] for save in run["saves"]}
        for event in _spread([one for one in run["events"] if one["kind"] == kind], MOST // 4):
            x = event["step"] if self.x == "step" else places.get(event["number"])
            if x is not None:
                yield x, 0, hover_text_of_event(event)


_AXES = {"step": "step", "number": "save number"}


def _branches(
    left: Sequence[Row], at: Mapping[int, tuple[Any, Any, str]], saves: Sequence[Row]
) -> Iterator[tuple[Any, Any, str]]:
    """Yield a line for each abandoned save, from the last save before it on its branch that is shown."""
    parents = {save["number"]: save["parent"] for save in saves}
    for save in left:
        number = save["number"]
        parent = parents.get(number)
        # A parent is always older: the loop has to end in a damaged history too.
        while parent is not None and parent not in at:
            before, parent = parent, parents.get(parent)
            parent = parent if parent is not None and parent < before else None
        if parent is not None and parent < number:
            yield from (at[parent], at[number], (None, None, ""))


def _trace(index: int, kind: str, points: Sequence[tuple[Any, Any, str]]) -> Trace:
    xs, ys, texts = [list(values) for values in zip(*points, strict=True)] if points else ([], [], [])
    is_line = kind in ("curve", "branch")
    return {"run": index, "kind": kind, "x": xs, "y": ys} | ({} if is_line else {"text": texts})


def hover_text(save: Row, run: Row | None = None) -> str:
    """Return the lines about a save that plotly shows at its point."""
    named = [word for word in ("best", "newest") if run and save["number"] == run[word]]
    named += ["abandoned"] if save["abandoned"] else []
    title = f"checkpoint {save['number']}"
    costs = [f"held up training for {duration(save['lost'])}"] if save["lost"] is not None else []
    costs += [f"durable after {duration(save['durable'])}"] if save["durable"] is not None else []
    lines = [
        f"<b>{', '.join([title, *named])}</b>",
        _place(save),
        *(f"{_safe(name)} {number(value)}" for name, value in [*save["metrics"].items()][:8]),
        " · ".join(filter(None, (when(save["time"]), save["why"] and f"why: {_safe(save['why'])}"))),
        ", ".join(costs),
        f"{bytes_of(save['size'])}{_whether_here(save)}" if save["size"] is not None else "",
    ]
    return "<br>".join(line for line in lines if line)


def _whether_here(save: Row) -> str:
    if save["problem"]:
        return ", damaged"
    return "" if save["here"] else ", not kept"


def hover_text_of_event(event: Row) -> str:
    """Return the lines about a resume, a preemption or the like that plotly shows at its point."""
    lines = [f"<b>{_safe(sentence(event))}</b>", _place(event), when(event["time"])]
    return "<br>".join(line for line in lines if line)


def sentence(event: Row) -> str:
    """Return an event in words.

    >>> sentence({"kind": "resume", "attempt": 2, "number": 41, "how": None})
    'attempt 2 went on from checkpoint 41'
    """
    attempt = f"attempt {event['attempt']}"
    if event["kind"] == "resume":
        return f"{attempt} went on from checkpoint {event['number']}"
    if event["kind"] == "back":
        return f"{attempt} went back to checkpoint {event['number']}"
    what = "was preempted" if event["kind"] == "preempted" else "ended"
    return f"{attempt} {what}: {event['how'].splitlines()[0]}"


def _place(row: Row) -> str:
    known = [f"{key} {row[key]:,}" for key in ("step", "epoch", "batch") if row[key] is not None]
    return ", ".join(known)


def number(value: Json) -> str:
    """Return a metric as text.

    >>> number(0.123456789), number("nan"), number(None)
    ('0.123457', 'nan', '')
    """
    return f"{value:.6g}" if isinstance(value, (int, float)) else str(value or "")


def _safe(text: str) -> str:
    # Plotly takes what looks like HTML for HTML.
    line = printable(text, but="")
    return html.escape(line if len(line) <= 200 else f"{line[:199]}…", quote=False)
