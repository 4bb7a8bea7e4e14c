"""The charts of a report, drawn by plotly: metrics and interruptions, the cost of saves, sizes."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..errors import printable
from ..files.strict_json import Json
from ..run.markup import Markup
from ..run.policy import bytes_of, duration, when

Row = Mapping[str, Any]
Point = tuple[Any, Any, str]
"""x, y and the text at the pointer."""

MOST = 600
"""How many saves of a run are shown: as many as a curve needs and a page can hold."""
_MOST_EVENTS = 150

_COLOURS = ("#0072b2", "#c4500a", "#00795a", "#a3508a", "#7a6000", "#4b5563")
"""Colours that the colour-blind can tell apart."""
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "hexagon", "pentagon")
_EVENTS = {
    "resume": ("resumes", "triangle-right"),
    "back": ("went back", "triangle-left"),
    "preempted": ("preemptions", "square"),
    "failed": ("failures", "x"),
    "odd": ("NaN or infinite", "diamond-open"),
}
_HEIGHT = 240
_CONFIG = {"displayModeBar": False, "responsive": True}


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


def of_metrics(runs: Sequence[Row], saves: Sequence[Sequence[Row]], names: Sequence[str]) -> Any:
    """Return a figure with a row for each metric over the steps, and one for what happened."""
    from plotly.subplots import make_subplots  # type: ignore[import-untyped, unused-ignore]

    count = len(names) + 1
    figure = make_subplots(
        count, 1, shared_xaxes=True, subplot_titles=[*map(_safe, names), ""], vertical_spacing=0.25 / count
    )
    x = _axis(runs)
    for index, (run, of_run) in enumerate(zip(runs, saves, strict=True)):
        for row, name in enumerate(names, 1):
            for trace in _curves(index, run, of_run, name, x):
                figure.add_scatter(**trace, row=row, col=1)
        for trace in _events(index, run, of_run, x):
            figure.add_scatter(**trace, row=count, col=1)
    # One entry for each run, which shows or hides all that it has.
    for trace in {one.legendgroup: one for one in reversed(figure.data)}.values():
        trace.showlegend = True
    figure.update_xaxes(title_text=_AXES[x], row=count, col=1)
    figure.update_yaxes(automargin=True)
    scales = [
        {"label": label, "method": "relayout", "args": [{f"{axis}.type": kind for axis in axes}]}
        for axes in [[f"yaxis{row or ''}" for row in [0, *range(2, count)]]]
        for label, kind in (("linear", "linear"), ("log", "log"))
    ]
    menu = {"type": "buttons", "direction": "right", "buttons": scales, "x": 1, "xanchor": "right"}
    figure.update_layout(
        updatemenus=[{**menu, "y": 1 + 40 / (_HEIGHT * count), "yanchor": "bottom"}], showlegend=len(runs) > 1
    )
    return figure.update_layout(height=_HEIGHT * count)


_OWN_ENTRY = {"legendgroup": None, "showlegend": True}
_AXES = {"step": "step", "number": "save number"}


def _axis(runs: Sequence[Row]) -> str:
    return "step" if any(save["step"] for run in runs for save in run["saves"]) else "number"


def _curves(index: int, run: Row, saves: Sequence[Row], name: str, x: str) -> Iterator[dict[str, Any]]:
    """Yield the traces of a run and a metric: its curve, abandoned branches, the best checkpoint."""
    finite = [save for save in saves if _is_finite(save["metrics"].get(name)) and save[x] is not None]
    at = {save["number"]: (save[x], save["metrics"][name], hover_text(save, run)) for save in finite}
    points = [at[save["number"]] for save in finite if not save["abandoned"]]
    colour, symbol = _COLOURS[index % 6], _SYMBOLS[index % 6]
    if points:
        marker = {"symbol": symbol, "size": 4 if len(points) > 100 else 7}
        yield _trace(index, run, points, colour, mode="lines+markers", marker=marker)
    if left := [*branches([save for save in finite if save["abandoned"]], at, run["saves"])]:
        look = {"symbol": f"{symbol}-open", "size": 7}
        yield _trace(index, run, left, colour, mode="lines+markers", marker=look, line={"dash": "dot"})
    if run["goal"] and run["goal"]["metric"] == name and run["best"] in at:
        look = {"symbol": "star", "size": 15, "line": {"color": "white", "width": 1}}
        yield _trace(index, run, [at[run["best"]]], colour, mode="markers", marker=look)


def branches(left: Sequence[Row], at: Mapping[int, Point], saves: Sequence[Row]) -> Iterator[Point]:
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
        else:
            yield from (at[number], (None, None, ""))


def _events(index: int, run: Row, saves: Sequence[Row], x: str) -> Iterator[dict[str, Any]]:
    places = {save["number"]: save[x] for save in run["saves"]}
    found: dict[str, list[Point]] = {kind: [] for kind in _EVENTS}
    for event in run["events"]:
        place = event["step"] if x == "step" else places.get(event["number"])
        if place is not None:
            found[event["kind"]].append((place, _EVENTS[event["kind"]][0], hover_text_of_event(event)))
    odd = [save for save in saves if not all(map(_is_finite, save["metrics"].values()))]
    found["odd"] = [(s[x], _EVENTS["odd"][0], hover_text(s, run)) for s in odd if s[x] is not None]
    for kind, points in found.items():
        if points:
            look = {"symbol": _EVENTS[kind][1], "size": 11}
            shown = _spread(points, _MOST_EVENTS)
            yield _trace(index, run, shown, _COLOURS[index % 6], mode="markers", marker=look)


def _trace(index: int, run: Row, points: Sequence[Point], colour: str, **look: Any) -> dict[str, Any]:
    xs, ys, texts = ([*values] for values in zip(*points, strict=True))
    look["marker"] = {"color": colour, **look.get("marker", {})}
    name = {"name": _safe(run["run"]), "legendgroup": str(index), "showlegend": False}
    return {"x": xs, "y": ys, "hovertext": texts, "hoverinfo": "text", **name, **look}


def of_costs(runs: Sequence[Row], saves: Sequence[Sequence[Row]]) -> Any:
    """Return a figure of what saving cost; None if the history does not say."""
    import plotly.graph_objects as go  # type: ignore[import-untyped, unused-ignore]

    figure, x = go.Figure(), _axis(runs)
    for index, (run, of_run) in enumerate(zip(runs, saves, strict=True)):
        for key, title, form in (("lost", "held up", ""), ("durable", "durable after", "-open")):
            points = [(save[x], save[key], hover_text(save)) for save in of_run if save[key] is not None]
            if points:
                look = {"symbol": _SYMBOLS[index % 6] + form, "size": 8}
                trace = _trace(index, run, points, _COLOURS[index % 6], mode="markers", marker=look)
                named = f"{trace['name']}: {title}" if len(runs) > 1 else title
                figure.add_scatter(**trace | {"name": named, **_OWN_ENTRY})
    figure.update_layout(xaxis_title=_AXES[x], yaxis_ticksuffix=" s", yaxis_rangemode="tozero")
    return figure if figure.data else None


def of_sizes(run: Row, saves: Sequence[Row]) -> Any:
    """Return a figure of the sizes of a run's checkpoints; None if it has none."""
    import plotly.graph_objects as go  # type: ignore[import-untyped, unused-ignore]

    here = [save for save in saves if save["size"] and save["own"] is not None]
    if not here:
        return None
    own = [(save["number"], save["own"], hover_text(save)) for save in here]
    rest = [(save["number"], max(0, save["size"] - save["own"]), hover_text(save)) for save in here]
    figure = go.Figure()
    for title, points, pattern in (("not shared", own, ""), ("shared with others", rest, "/")):
        if any(size for _, size, _ in points) or not pattern:
            trace = _trace(0, run, points, _COLOURS[0], marker={"pattern": {"shape": pattern}})
            figure.add_bar(**trace | {"name": title, **_OWN_ENTRY})
    figure.update_layout(barmode="stack", xaxis_title=_AXES["number"], yaxis_ticksuffix="B")
    return figure.update_layout(xaxis_type="category" if len(here) <= 12 else "linear")


def drawn(figure: Any, label: str, nonce: str) -> Markup:
    """Return the HTML of a figure; its scripts bear the nonce, without which the page runs none."""
    figure.update_layout(
        template="plotly_white", margin={"l": 8, "r": 12, "t": 60, "b": 8}, hovermode="closest"
    )
    text = figure.to_html(
        full_html=False, include_plotlyjs=False, config=_CONFIG, default_height=_HEIGHT, validate=False
    )
    scripts = text.replace("<script", f'<script nonce="{nonce}"')
    return Markup(f'<div class="plot" role="img" aria-label="{html.escape(label)}">{scripts}</div>')


def hover_text(save: Row, run: Row | None = None) -> str:
    """Return the lines about a save that plotly shows at its point."""
    named = [word for word in ("best", "newest") if run and save["number"] == run[word]]
    named += ["abandoned"] if save["abandoned"] else []
    title = f"checkpoint {save['number']}"
    costs = [f"held up training for {duration(save['lost'])}"] if save["lost"] is not None else []
    costs += [f"durable after {duration(save['durable'])}"] if save["durable"] is not None else []
    there = ", damaged" if save["problem"] else "" if save["here"] else ", not kept"
    lines = [
        f"<b>{', '.join([title, *named])}</b>",
        _place(save),
        *(f"{_safe(name)} {number(value)}" for name, value in [*save["metrics"].items()][:8]),
        " · ".join(filter(None, (when(save["time"]), save["why"] and f"why: {_safe(save['why'])}"))),
        ", ".join(costs),
        f"{bytes_of(save['size'])}{there}" if save["size"] is not None else "",
    ]
    return "<br>".join(filter(None, lines))


def hover_text_of_event(event: Row) -> str:
    """Return the lines about a resume, a preemption or the like that plotly shows at its point."""
    lines = [f"<b>{_safe(sentence(event))}</b>", _place(event), when(event["time"])]
    return "<br>".join(filter(None, lines))


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
    return f"{attempt} {what}: {event['how'].splitlines()[0]}"


def _place(row: Row) -> str:
    return ", ".join(f"{key} {row[key]:,}" for key in ("step", "epoch", "batch") if row[key] is not None)


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
