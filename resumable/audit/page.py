"""The page about an audit: the verdict, what is wrong, and all that the trials have shown."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import printable
from ..run.html import Markup, escaped, scrolling, section, table, tag
from ..run.policy import counted, duration
from ..trace.trace_file import At
from ..views import html_page
from . import verdicts
from .audit import Verdict
from .diagnosis import REPEAT, SCRIPT, Finding, Lost

Row = Mapping[str, Any]

MOST = 300
"""Up to how many boundaries are all shown."""

_ENDS = {"batch": "batch", "step": "step", "epoch": "epoch's end", "outside": "save()"}
_STOPPED = "stopped and resumed"
_WORDS = {True: "equal", False: "differs", None: "not reached"}


def check(path: str | os.PathLike[str]) -> None:
    """Check that the page can be written there: nothing but an older one is replaced."""
    html_page.check(path, "audit")


def write(verdict: Verdict, path: str | os.PathLike[str]) -> None:
    """Write a page about it."""
    check(path)
    html_page.write(path, page(verdict))


def page(verdict: Verdict) -> str:
    """Return the page."""
    command = shlex.join(verdict.command)
    return html_page.page("audit", title=command, heading=command, body=Markup("".join(_sections(verdict))))


def _sections(verdict: Verdict) -> Iterator[Markup]:
    yield section("Verdict", 2, _verdict(verdict), _glance(verdict))
    if verdict.findings:
        first, *more = verdict.findings
        told = [_finding(verdict, first, is_said=True), *(_finding(verdict, one) for one in more)]
        yield section("What is wrong", 2, *told)
    if verdict.lost:
        yield section("What a resume does not bring back", 2, _lost(verdict.lost))
    if notes := verdicts.notes_of(verdict):
        yield section("Good to know", 2, tag("ul", *(tag("li", note) for note in notes)))
    if verdict.rows:
        yield section("Boundaries", 2, _boundaries(verdict))
    yield section("What was started", 2, *_attempts(verdict))
    if verdict.settings:
        yield section("Settings", 2, _settings(verdict.settings))


def _verdict(verdict: Verdict) -> Markup:
    word, rest = verdicts.headline(verdict)
    kind = "good" if verdict.is_exact else "bad"
    return tag("p", tag("strong", word, class_=kind), ": ", printable(rest, but=""), class_="verdict")


def _glance(verdict: Verdict) -> Markup:
    facts = (
        tag("div", tag("dt", title), tag("dd", tag("strong", value), *(tag("span", one) for one in more)))
        for title, value, *more in _facts(verdict)
    )
    return tag("div", tag("article", tag("h3", "In short"), tag("dl", *facts), class_="card"), class_="cards")


def _facts(verdict: Verdict) -> Iterator[tuple[str, ...]]:
    for finding in verdict.findings[:1]:
        yield "Class", verdicts.WORDS[finding.kind]
        if finding.at:
            title = "Not reached" if finding.kind == SCRIPT else "First difference"
            yield title, f"step {finding.at.step}", finding.what
    stops = [verdicts.step_of(at) for at in _stops(verdict)]
    yield "Stopped and resumed", counted(len(stops), "time") if stops else "never", *stops
    if verdict.rows:
        others = len(verdict.rows[0]["alike"])
        yield "Compared", verdicts.boundaries(len(verdict.rows)), f"of {counted(others + 1, 'training')}"
    seconds = sum(one["seconds"] for one in verdict.attempts)
    yield "Took", duration(seconds), f"{counted(len(verdict.attempts), 'start')} of the script"


def _finding(verdict: Verdict, finding: Finding, *, is_said: bool = False) -> Markup:
    """Return a card about it; what the verdict says already is not said again."""
    names = [tag("li", verdicts.with_values(name, verdict.lost)) for name in finding.names]
    equal = "" if is_said and finding.kind != REPEAT else verdicts.equal(finding)
    text = None if is_said else verdicts.text_of(finding)
    return tag(
        "article",
        tag("h3", finding.what),
        tag("p", tag("span", verdicts.WORDS[finding.kind], class_="badge differs"), " ", text),
        tag("ul", *names) if names else None,
        tag("p", f"There {equal}.", class_="quiet") if equal else None,
        tag("p", tag("strong", "Fix: "), finding.fix),
        class_="card",
    )


def _lost(lost: Sequence[Lost]) -> Markup:
    caption = "What changes in the training, is in no part, and is another one after a resume"
    rows = (
        [_text(tag("div", one.name), *_about(one)), _text(one.fix), _text(*_first_lost(one))] for one in lost
    )
    return scrolling(table(caption, ["name", "fix", "first lost"], rows, range(3)), caption)


def _about(one: Lost) -> Iterator[Markup]:
    for told in filter(None, (one.kind, one.where)):
        yield tag("div", told, class_="quiet")
    if one.weight == "state":
        yield tag("span", "state of the training", class_="badge differs")
    else:
        yield tag("span", "may not matter", class_="badge")


def _first_lost(one: Lost) -> Iterator[Markup]:
    yield tag("div", str(one.at))
    for value, when in ((one.before, "without a stop"), (one.after, "after one")):
        if told := verdicts.value_of(value):
            yield tag("div", f"{told} {when}", class_="quiet")


def _boundaries(verdict: Verdict) -> Markup:
    marks = {at: [*_marks(verdict, at)] for at in {*_stops(verdict), *_first(verdict)}}
    shown = [*_shown(verdict.rows, marks)]
    trials = [*verdict.rows[0]["alike"]]
    caption = (
        f"{verdicts.boundaries(len(verdict.rows))}, and whether each training was there as the first one"
    )
    if len(shown) < len(verdict.rows):
        caption += f": the {len(shown)} at which that changes, or a stop was"
    # (on a phone what differs has to be seen without scrolling)
    head = ["step", *trials, "", "after", "epoch", "batch"]
    rows = (
        [
            f"{row['step']:,}",
            *(_alike(row["alike"][trial]) for trial in trials),
            Markup("".join(marks.get(_at(row), ()))),
            _ENDS.get(row["kind"], row["kind"]),
            *(f"{row[key]:,}" for key in ("epoch", "batch")),
        ]
        for row in shown
    )
    return scrolling(table(caption, head, rows, range(1, len(head) - 2)), caption)


def _shown(rows: Sequence[Row], marks: Mapping[At, Any]) -> Iterator[Row]:
    for before, row in zip([None, *rows], rows, strict=False):
        is_other = before is None or before["alike"] != row["alike"] or row is rows[-1]
        if is_other or len(rows) <= MOST or _at(row) in marks:
            yield row


def _alike(value: bool | None) -> Markup:
    return tag("span", _WORDS[value], class_=f"badge {_WORDS[value].replace(' ', '-')}")


def _marks(verdict: Verdict, at: At) -> Iterator[Markup]:
    if at in verdict.stops:
        yield tag("span", "stopped and resumed", class_="badge")
    if at in _first(verdict):
        yield tag("span", "first difference", class_="badge differs")


def _stops(verdict: Verdict) -> list[At]:
    """Return the boundaries at which the training was stopped: those that it came to."""
    reached = {_at(row) for row in verdict.rows if [*row["alike"].values()][-1] is not None}
    return [at for at in verdict.stops if at in reached]


def _first(verdict: Verdict) -> list[At]:
    """Return the boundary of the first difference, if there is one."""
    return [one.at for one in verdict.findings[:1] if one.at and one.kind != SCRIPT]


def _at(row: Row) -> At:
    return At(row["kind"], row["epoch"], row["batch"], row["step"])


def _attempts(verdict: Verdict) -> Iterator[Markup]:
    about = "Each start of the script, and what it printed last."
    yield tag("p", about, class_="quiet")
    left = _left(verdict)
    for number, one in enumerate(verdict.attempts, 1):
        is_wanted = number == len(verdict.attempts) and verdicts.log_of(verdict)
        # (a wide line scrolls in a box of its own, which the keyboard has to reach)
        named = {"tabindex": "0", "role": "region", "aria_label": f"what start {number} printed last"}
        yield tag(
            "details",
            tag("summary", f"{number}. {one['trial']}: {_end(one, next(left))}, {duration(one['seconds'])}"),
            tag("pre", one["log"] or "It printed nothing.", **named),
            **({"open": ""} if is_wanted else {}),
        )


def _left(verdict: Verdict) -> Iterator[str]:
    """Yield where each start was told to leave."""
    stops = [f"stopped at {at}" for at in verdict.stops]
    for one in verdict.attempts:
        at = stops.pop(0) if one["trial"] == _STOPPED and stops else ""
        yield at or "ended after the last boundary that was asked for"


def _end(attempt: Row, left: str) -> str:
    if attempt["has_hung"]:
        return "it did not leave, and was ended" if attempt["has_left"] else "it hung, and was ended"
    code = f"exit code {attempt['code']}"
    return f"{left}, {code}" if attempt["has_left"] else code


def _settings(settings: Mapping[str, Any]) -> Markup:
    caption = "What decides whether a training repeats itself, as the script has set it"
    rows = ([name, _text(escaped(value) or "not set")] for name, value in settings.items())
    return scrolling(table(caption, ["setting", "value"], rows, (0, 1)), caption)


def _text(*told: object) -> Markup:
    return tag("div", *told, class_="text")
