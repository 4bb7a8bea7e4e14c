"""Prints the result of an audit: the verdict in one line, and the details below it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..errors import printable
from ..files.strict_json import Json
from ..trace.trace_file import At
from ..views.tables import painted
from . import naming
from .audit import Verdict
from .diagnosis import REPEAT, SCRIPT, Finding, Lost
from .naming import joined

WORDS = {
    "repeat": "not repeatable",
    "data": "other data",
    "randomness": "other randomness",
    "state": "state is missing",
    "numbers": "other numbers from equal inputs",
    "script": "the script failed",
}
"""The words for each kind of finding."""

_OF_NUMBERS = ("operation", "threads", "benchmark", "unknown")
"""The causes of unrepeatable runs for which it matters what is equal."""

_MOST = 6
"""The most names of one kind that are listed."""


def print_it(verdict: Verdict) -> None:
    """Print the verdict in one line, and the details and fixes below it."""
    word, rest = headline(verdict)
    print(f"{painted(word)}: {_line(rest)}")
    for place, finding in enumerate(verdict.findings):
        print()
        if place:
            print(f"  {_line(text_of(finding))}")
        for line in _below(finding, verdict.lost):
            print(f"  {_line(line)}")
    if notes := notes_of(verdict):
        print()
    for note in notes:
        print(_line(f"note: {note}"))
    if any(finding.kind == SCRIPT for finding in verdict.findings):
        _print_log(log_of(verdict))


def _print_log(log: str) -> None:
    print("\nIt printed last:" if log.strip() else "\nIt printed nothing.")
    for line in log.splitlines():
        print(f"  {_line(line)}".rstrip())


def headline(verdict: Verdict) -> tuple[str, str]:
    """Return the verdict in one line: a word or two, and the sentence."""
    if not verdict.findings:
        return _fine(verdict)
    first = verdict.findings[0]
    if first.kind == SCRIPT:
        return "FAILED", text_of(first)
    names = [*dict.fromkeys(map(bare, first.names))]
    if first.kind == REPEAT:
        unsaid = [name for name in names if name not in first.text]
        return "NOT repeatable", text_of(first) + (f": {some(unsaid)}" if unsaid else "")
    why = f"{WORDS[first.kind]}: {some(names)}" if names else WORDS[first.kind]
    return "NOT exact", "; ".join(filter(None, [text_of(first), equal(first)])) + f" -> {why}"


def text_of(finding: Finding) -> str:
    """Return the text of a finding, with its rank if that is not the first."""
    return f"rank {finding.rank}: {finding.text}" if finding.rank else finding.text


def _fine(verdict: Verdict) -> tuple[str, str]:
    stops = joined([*map(step_of, verdict.stops)])
    text = f"stopped and resumed at {stops}, it does the same, bit for bit ({boundaries(verdict.boundaries)})"
    return "exact", text


def step_of(at: At) -> str:
    """Return a short description of where a stop was.

    >>> step_of(At("epoch", 1, 0, 6))
    "step 6 (an epoch's end)"
    """
    return f"step {at.step}" + (" (an epoch's end)" if at.kind == "epoch" else "")


def boundaries(count: int) -> str:
    """Return a number of boundaries in words."""
    return "1 boundary" if count == 1 else f"{count} boundaries"


def equal(finding: Finding) -> str:
    """Return what is equal at the first difference, in one sentence.

    >>> finding = Finding("data", "the batch", None, "", evidence=["the epochs are equal", "lr are equal"])
    >>> equal(finding)
    'the epochs and lr are equal'
    """
    names = [text.removesuffix(" are equal") for text in finding.evidence]
    return f"{joined(names)} are equal" if names else ""


def _below(finding: Finding, lost: Sequence[Lost]) -> Iterator[str]:
    for name in finding.names[:_MOST]:
        yield with_values(name, lost)
    if len(finding.names) > _MOST:
        yield f"and {len(finding.names) - _MOST} more, which --json tells"
    if finding.cause in _OF_NUMBERS and len(finding.evidence) > 1:
        yield f"There {equal(finding)}."
    yield f"Fix: {finding.fix}"


def with_values(name: str, lost: Sequence[Lost]) -> str:
    """Return a name, with its two values if they are short.

    >>> one = Lost("rate", "number", "", At("batch", 0, 3, 3), 0.1, 0.07)
    >>> with_values("rate (number)", [one])
    'rate (number): 0.1 without the stop, 0.07 after it'
    """
    met = next((one for one in lost if bare(name) == one.name), None)
    values = [value_of(met.before), value_of(met.after)] if met else []
    return f"{name}: {values[0]} without the stop, {values[1]} after it" if all(values) and values else name


def value_of(value: Json) -> str:
    """Return the text of a plain value; an empty one if there is none or it is long."""
    return "" if value is None else naming.shown(value)


def notes_of(verdict: Verdict) -> list[str]:
    """Return the notes, the most important first."""
    told = {bare(name) for finding in verdict.findings for name in finding.names}
    # Of an object that no checkpoint can have, what is in it may be told already.
    known = [one for name in told for one in (name, name.rpartition(".")[0])]
    idle = [one for one in verdict.lost if one.name not in known]
    if not idle:
        return [*verdict.notes]
    places = [f"{one.name} ({one.kind})" for one in idle]
    verb, them = ("is", "it") if len(idle) == 1 else ("are", "them")
    if any(finding.kind == SCRIPT for finding in verdict.findings):
        rest = f"what has failed may depend on {them}"
    else:
        rest = f"nothing that was trained here depends on {them}, but a longer training may"
    return [f"{some(places)} {verb} lost by a resume; {rest}", *verdict.notes]


def log_of(verdict: Verdict) -> str:
    """Return the last output of a script that failed."""
    failed = any(finding.kind == SCRIPT for finding in verdict.findings)
    return verdict.attempts[-1]["log"] if failed and verdict.attempts else ""


def bare(name: str) -> str:
    """Return a name without its kind.

    >>> bare("ema.shadow (4 tensors)")
    'ema.shadow'
    """
    return name.partition(" (")[0]


def some(names: Sequence[str]) -> str:
    """Return the first of many names, and the number of others.

    >>> some([*"abcdefgh"])
    'a, b, c, d, e, f and 2 more'
    """
    rest = len(names) - _MOST
    return joined(names if rest <= 0 else [*names[:_MOST], f"{rest} more"])


def _line(text: str) -> str:
    return printable(text, but="")
