"""What a start needs of a history: saves are found with one pattern, and few other lines are parsed."""

from __future__ import annotations

import contextlib
import json
import re
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeGuard

from ..files import jsonl
from ..files.jsonl import Line
from ..files.strict_json import Json
from ..files.threads import no_garbage_collection
from . import history


@dataclass(slots=True)
class Scan:
    """What the lines of a history say to a start, without damaged ones."""

    others: list[Line] = field(default_factory=list)
    """The starts and the ends, oldest first."""
    parents: dict[int, int | None] = field(default_factory=dict)
    superseded: set[int] = field(default_factory=set)
    skipped: dict[int, str] = field(default_factory=dict)
    """The checkpoints that a start must not resume from, and why."""
    last: dict[int | None, int] = field(default_factory=dict)
    """The highest save number of each attempt."""
    times: Line | str | None = None
    """The last save with a time until it was durable, or the part of its line with the times."""
    noted: deque[str] = field(default_factory=lambda: deque(maxlen=_MOST_NOTED))
    """JSON texts of how the disk was written, oldest first; not checked."""

    def save(self, attempt: int | None, number: int, parent: int | None, is_superseded: bool) -> None:
        """Take in a save."""
        self.parents[number] = parent
        self.last[attempt] = max(number, self.last.get(attempt, number))
        (self.superseded.add if is_superseded else self.superseded.discard)(number)
        # The folder had lost its newest checkpoint: this is another one of the same number.
        self.skipped.pop(number, None)

    def line(self, line: Line) -> None:
        """Take in a parsed line."""
        if not history.is_save(line):
            self.others.append(line)
            self.skipped |= {line["number"]: line["problem"]} if history.is_skip(line) else {}
            return
        self.save(line["attempt"], line["number"], line["parent"], line["superseded"])
        self.times = line if _is_time(line.get("durable")) else self.times
        if "wrote" in line:
            self.noted.append(json.dumps(line["wrote"]))

    def took(self) -> tuple[float | None, float] | None:
        """Return the cost of the last save that has one: seconds lost, if known, and until durable."""
        if self.times is None:
            return None
        found = json.loads(self.times) if isinstance(self.times, str) else self.times
        lost = found.get("lost")
        return lost if _is_time(lost) else None, found["durable"]


@no_garbage_collection()
def scan(data: bytes) -> Scan:
    """Return what the bytes of a history say to a start.

    >>> line = b'{"event": "save", "attempt": 1, "number": 2, "parent": 1, "superseded": true}'
    >>> scan(line).parents, scan(line).superseded
    ({2: 1}, {2})
    """
    found = Scan()
    if len(data) < _LONG:
        for line in jsonl.parsed(data):
            found.line(line)
        return found
    # What is not UTF-8 becomes surrogates, which are not in the pattern: such a line is parsed, and refused.
    rows = re.findall(_LINE, data.decode(errors=_ESCAPE), re.MULTILINE)
    for attempt, number, parent, times, wrote, superseded, other in rows:
        if not other:
            found.save(_count(attempt), int(number), _count(parent), superseded == "true")
            found.times = f"{{{times}}}" if times else found.times
            if wrote:
                found.noted.append(wrote)
        elif _NEEDED.search(other):
            for line in jsonl.parsed(other.encode(errors=_ESCAPE)):
                found.line(line)
    return found


def skipped(folder: Path) -> dict[int, str]:
    """Return the checkpoints that a start must not resume from, and why."""
    # A training needs no history; the writer reports one that cannot be read.
    with contextlib.suppress(OSError):
        data = jsonl.content(folder / history.NAME)
        # Searched first, because a start that failed in this way is rare.
        return scan(data).skipped if b'"skip"' in data else {}
    return {}


def allowed(folder: Path) -> list[str]:
    """Return the patterns of `allow=` that earlier starts resumed with."""
    starts: list[Line] = []
    with contextlib.suppress(OSError):
        starts = [
            one for one in scan(jsonl.content(folder / history.NAME)).others if one.get("event") == "start"
        ]
    lists = [line["allowed"] for line in starts if isinstance(line.get("allowed"), list)]
    return [one for each in lists for one in each if isinstance(one, str)]


def _count(text: str) -> int | None:
    return None if text == "null" else int(text)


def _is_time(value: Json) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1 << 53


_ESCAPE = "surrogateescape"
_MOST_NOTED = 256

# Compiling the pattern takes as long as parsing so many bytes.
_LONG = 256 << 10

# Escaped, these words can look like anything.
_NEEDED = re.compile(r'"(?:start|end|skip|save)"|\\')

# Only lines that strict JSON takes too match: a number has no leading zero and is finite, a text no escapes.
_COUNT = r"(?:0|[1-9][0-9]{0,14})"
_TIME = rf"{_COUNT}(?:\.[0-9]+)?(?:e-[0-9]{{1,2}})?"
_NUMBER = rf"-?{_COUNT}(?:\.[0-9]+)?(?:e[-+][0-9]{{1,2}})?"
_TEXT = r'"[^"\\\x00-\x1f\ud800-\udfff]*"'
_PLAIN = rf"(?:{_NUMBER}|null|{_TEXT}|true|false)"
_OBJECT = rf"\{{(?:{_TEXT}: {_PLAIN}(?:, (?=\")|(?=\}}))){{0,99}}\}}"
_LINE = (
    rf'^(?:\{{"event": "save", "attempt": ({_COUNT}|null), "number": ({_COUNT}), "parent": ({_COUNT}|null), '
    rf'"time": {_TEXT}, "epoch": {_COUNT}, "batch": {_COUNT}, "step": {_COUNT}, "samples": {_COUNT}, '
    rf'"metrics": {_OBJECT}, "size": {_COUNT}, "why": (?:{_TEXT}|null), "interval": (?:{_OBJECT}|null), '
    rf'(?:("lost": (?:{_TIME}|null), "durable": {_TIME})|"lost": null, "durable": null)'
    rf'(?:, "held": (?:{_TIME}|null))?(?:, "wrote": ({_OBJECT}))?, "superseded": (true|false)\}}|(.+))$'
)
