"""What a start needs of a history: the summary in its last start or end, and the lines after that.

Without a summary all lines count: saves are found with one pattern, and few other lines are parsed.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import deque
from pathlib import Path

from ..files import jsonl
from ..files.jsonl import Line
from ..files.threads import no_garbage_collection
from . import history, history_summary
from .checkpoint import HIGHEST
from .history_summary import Summary, is_time


class Scan:
    """What the lines of a history say to a start, without damaged ones."""

    def __init__(self) -> None:
        self.others: list[Line] = []
        """The starts and the ends, oldest first."""
        self.parents: dict[int, int | None] = {}
        self.superseded: set[int] = set()
        self.last: dict[int | None, int] = {}
        """The highest save number of each attempt."""
        self.noted: deque[str] = deque(maxlen=_MOST_NOTED)
        """JSON texts of how the disk was written, oldest first; not checked."""
        self.stands_on: int | None = None
        """The checkpoint that the training stood on at the end; None if that cannot be told."""
        self.times: Line | str | None = None
        """The last save with a time until it was durable, or the part of its line with the times."""
        self.before: Summary | None = None
        """What stood before these lines; None if they are all."""
        self.summed_up = 0
        """The attempt whose line has the summary."""

    @property
    def attempt(self) -> int:
        """The last attempt; 0 without one."""
        starts: list[int] = [line["attempt"] for line in self.others if history.is_start(line)]
        return max([self.summed_up, *starts])

    @property
    def highest(self) -> int:
        """The highest save number."""
        before = self.before.highest if self.before else 0
        return max([before, *(number for number in self.parents if number <= HIGHEST)])

    def save(self, attempt: int | None, number: int, parent: int | None, is_superseded: bool) -> None:
        """Take in a save."""
        self.parents[number], self.stands_on = parent, number
        self.last[attempt] = max(number, self.last.get(attempt, number))
        (self.superseded.add if is_superseded else self.superseded.discard)(number)

    def line(self, line: Line) -> None:
        """Take in a parsed line."""
        if not history.is_save(line):
            self._other(line)
            return
        self.save(line["attempt"], line["number"], line["parent"], line["superseded"])
        self.times = line if is_time(line.get("durable")) else self.times
        self.note(line)

    def note(self, save: Line) -> None:
        """Take in how a save wrote the disk."""
        if "wrote" in save:
            self.noted.append(json.dumps(save["wrote"]))

    def _other(self, line: Line) -> None:
        self.others.append(line)
        if line.get("event") in ("start", "restore", "pull"):
            # A pull has brought a checkpoint that may be older than others, and has no line yet.
            came_from = line.get("from")
            self.stands_on = came_from if type(came_from) is int else None

    def warned(self) -> int:
        """Return how many warnings the last attempt has kept."""
        mine = [line for line in self.others if line.get("attempt") == self.attempt]
        told = [line.get("warnings") for line in mine if history.is_end(line)]
        return next(filter(history.is_attempt, told), sum(map(history.is_warning, mine)))

    def took(self) -> tuple[float | None, float] | None:
        """Return the cost of the last save that has one: seconds lost, if known, and until durable."""
        if self.times is None:
            return self.before.took if self.before else None
        found = json.loads(self.times) if isinstance(self.times, str) else self.times
        lost = found.get("lost")
        return lost if is_time(lost) else None, found["durable"]


@no_garbage_collection()
def scan(data: bytes, found: Scan | None = None) -> Scan:
    """Return what the bytes of a history say to a start, added to what was found before them.

    >>> line = b'{"event": "save", "attempt": 1, "number": 2, "parent": 1, "superseded": true}'
    >>> scan(line).parents, scan(line).superseded
    ({2: 1}, {2})
    """
    found = Scan() if found is None else found
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


def scan_end(folder: Path) -> Scan:
    """Return what the history of the run in a folder says from its last summary on; all without one."""
    if found := _after_summary(history.content(folder, _END)):
        return found
    data = history.content(folder)
    return _after_summary(data) or scan(data)


def _after_summary(data: bytes) -> Scan | None:
    begin = data.rfind(b"\n", 0, max(0, data.rfind(_SUMMARY))) + 1
    text, _, rest = data[begin:].partition(b"\n")
    line = next(iter(jsonl.parsed(text)), {})
    summary = history_summary.parsed(line.get(history_summary.KEY))
    attempt = line.get("attempt")
    if summary is None or not history.is_attempt(attempt):
        return None
    found = Scan()
    found.line(line)
    found.before, found.stands_on = summary, summary.stands_on
    found.summed_up = attempt
    if summary.last is not None:
        found.last[attempt] = summary.last
    # The last ways to write are few: they are searched in what was read anyhow.
    for one in jsonl.parsed(b"\n".join(each for each in data[-_END:begin].split(b"\n") if _WROTE in each)):
        if history.is_save(one):
            found.note(one)
    return scan(rest, found)


def allowed(folder: Path) -> list[str]:
    """Return the patterns of `allow=` that earlier starts resumed with."""
    starts: list[Line] = []
    # A training needs no history; the writer reports one that cannot be read.
    with contextlib.suppress(OSError):
        starts = [one for one in scan(history.content(folder)).others if one.get("event") == "start"]
    lists = [line["allowed"] for line in starts if isinstance(line.get("allowed"), list)]
    return [one for each in lists for one in each if isinstance(one, str)]


def _count(text: str) -> int | None:
    return None if text == "null" else int(text)


_END = 64 << 10
_SUMMARY = f'"{history_summary.KEY}": {{'.encode()
_WROTE = b'"wrote": '
_ESCAPE = "surrogateescape"
_MOST_NOTED = 256

# Compiling the pattern takes as long as parsing so many bytes.
_LONG = 256 << 10

# Escaped, these words can look like anything.
_NEEDED = re.compile(r'"(?:start|end|save|restore|pull|warning)"|\\')

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
