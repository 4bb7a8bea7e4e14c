"""The history of a run: a line for each start, save, restore and end."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TypeGuard

from ..errors import CannotRead, ResumableError, warn
from ..files import jsonl
from ..files.jsonl import Line
from ..files.strict_json import Json
from .checkpoint import HIGHEST
from .directory import Run
from .manifest import Manifest
from .policy import Took

NAME = "history.jsonl"

CLOSED = ("closed", "left without close()")
"""How a process ends that was not stopped."""

NO_EXIT = "killed or crashed (no exit recorded)"
"""How a process ended that has not noted its end."""


class History:
    """The history of a run, written by the process that holds the run's lock.

    It never stops a training: if it cannot be written, it warns once and retries with each line.

    >>> run = Run("runs/exp")
    >>> run.acquire()
    >>> history = History(run)
    >>> history.begin({"host": "node7", "pid": 4711}, came_from=None)
    1
    >>> history.ended("closed", epoch=2, batch=0, step=20)
    >>> [(line["event"], line["attempt"]) for line in read(run.path)]
    [('start', 1), ('end', 1)]
    >>> run.release()
    """

    def __init__(self, run: Run, *, by_hand: bool = False) -> None:
        self._run = run
        # A push or a pull by hand belongs to no attempt.
        self._by_hand = by_hand
        self._path = run.path / NAME
        # A save is noted in the background, while the script may restore or end.
        self._guard = threading.Lock()
        self._parents: dict[int, int | None] = {}
        self._superseded: set[int] = set()
        # Lines that are not in the file yet; bounded, because the file may stay unwritable.
        self._due: deque[Line] = deque(maxlen=_MOST_DUE)
        self._marks: dict[int, bool] = {}
        self._replaced: set[int] = set()
        self._has_warned = False
        self.last_took: tuple[float | None, float] | None = None
        """The cost of the last save of earlier attempts: seconds lost, if known, and until durable."""
        self.stands_on: int | None = None
        """The checkpoint that the training continues: the loaded one, then the last save."""
        self._planned: Mapping[str, int] = {}
        """The last loop that was noted."""
        self.attempt: int | None = None
        """The number of this start of the run, from 1; None before it, after its end, and if unknown."""

    @property
    def highest(self) -> int:
        """The highest known save number, including checkpoints that no longer exist."""
        return max([number for number in self._parents if number <= HIGHEST], default=0)

    def begin(self, facts: Mapping[str, Json], came_from: int | None) -> int | None:
        """Note that a process, described by `facts`, resumes from a checkpoint or starts fresh."""
        with self._guard:
            try:
                lines = read(self._run.path)
            except CannotRead as exc:
                self._tell(exc)
                return None
            self._take_in(lines)
            self.last_took = next(filter(None, map(_took, reversed(lines))), None)
            last = max([line["attempt"] for line in filter(_is_start, lines)], default=0)
            late = [_save(about, last or None) for about in self._unknown()]
            self._take_in(late)
            self.attempt = last + 1
            previous = _how_it_ended(last, [*lines, *late], facts)
            self._go_on_from(came_from)
            self._write(*late, self._line("start", **facts, **{"from": came_from}, previous=previous))
            return self.attempt

    def saved(
        self,
        about: Manifest,
        why: str,
        *,
        interval: Mapping[str, Json] | None = None,
        took: Took | None = None,
    ) -> None:
        """Note that a checkpoint is durable, before anything is pruned.

        `interval`: the interval that the rule chose, and why.
        """
        with self._guard:
            if self.attempt is None:
                return
            # The folder has lost its newest checkpoints: this is another one of the same number.
            self._replaced |= {about.number} & self._parents.keys()
            self.stands_on = None
            times = {key: _rounded(seconds) for key, seconds in (took or Took())._asdict().items()}
            line = _save(about, self.attempt, why=why, interval=interval, **times)
            self._take_in([line])
            self._write(line)

    def loop(self, **total: int) -> None:
        """Note, with the next line, how many epochs or steps the outermost loop will have done at its end."""
        with self._guard:
            # The training would wait for the disk here, and a script may begin a loop at every step.
            if self.attempt is not None and total != self._planned:
                self._planned = total
                self._due.append(self._line("loop", **total))

    def went_back(self, number: int | None, what: str) -> None:
        """Note that the training was restored to a checkpoint; None means one of another run."""
        with self._guard:
            if self.attempt is not None:
                self._go_on_from(number)
                self._write(self._line("restore", **{"from": number}, what=what))

    def skip(self, number: int, problem: str) -> None:
        """Note that resuming from this checkpoint failed, so that the next start skips it."""
        with self._guard:
            if self.attempt is not None:
                self._write(self._line("skip", number=number, problem=problem[:_LONGEST_TEXT]))

    def pushed(
        self, number: int, to: str, *, sent: int, copied: int, seconds: float, removed: Sequence[int] = ()
    ) -> None:
        """Note that a checkpoint is complete on the remote, and which ones were pruned there."""
        took = {"sent": sent, "copied": copied, "seconds": _rounded(seconds), "removed": [*removed]}
        self._moved("push", number=number, to=to, **took)

    def pulled(self, number: int, origin: str, *, size: int, seconds: float) -> None:
        """Note that a checkpoint was pulled from a remote."""
        self._moved("pull", number=number, origin=origin, size=size, seconds=_rounded(seconds))

    def _moved(self, event: str, **about: Json) -> None:
        with self._guard:
            if self.attempt is not None or self._by_hand:
                self._write(self._line(event, **about))

    def ended(self, how: str, **place: int) -> None:
        """Note how and where this process has ended; only the first call counts."""
        with self._guard:
            if self.attempt is not None:
                line = self._line("end", how=how[:_LONGEST_TEXT], **place)
                self.attempt = None
                self._write(line)

    def _line(self, event: str, **about: Json) -> Line:
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        return {"event": event, "attempt": self.attempt, "time": now, **about}

    def _unknown(self) -> Iterator[Manifest]:
        # A process killed between the commit and the line has left a checkpoint without one.
        numbers: list[int] = []
        with contextlib.suppress(ResumableError):
            numbers = self._run.numbers()
        for number in numbers:
            # The next start looks again.
            with contextlib.suppress(ResumableError):
                if number not in self._parents:
                    yield self._run.open(number).about

    def _take_in(self, lines: Iterable[Line]) -> None:
        for line in filter(is_save, lines):
            self._parents[line["number"]] = line["parent"]
            (self._superseded.add if line["superseded"] else self._superseded.discard)(line["number"])

    def _go_on_from(self, number: int | None) -> None:
        self.stands_on = number
        left = abandoned(self._parents, number, self._superseded)
        self._marks |= {other: other in left for other in left ^ self._superseded}
        self._superseded = left

    def _write(self, *lines: Line) -> None:
        self._due.extend(lines)
        for line in filter(is_save, self._due):
            line["superseded"] = self._marks.pop(line["number"], line["superseded"])
        try:
            if self._marks or self._replaced:
                jsonl.rewrite(self._path, partial(_marked, self._marks, self._replaced), self._due)
            else:
                jsonl.append(self._path, self._due)
        except OSError as exc:
            self._tell(exc)
        else:
            self._due.clear()
            self._marks.clear()
            self._replaced.clear()

    def _tell(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            problem = f"{self._path} cannot be written: {error.strerror or error}."
            problem = error.problem if isinstance(error, CannotRead) else problem
            rest = "The checkpoints do" if self._by_hand else "The training continues; its checkpoints do"
            warn(f"{problem} {rest} not need it.")


def read(folder: Path) -> list[Line]:
    """Return the history of the run in a folder, oldest first, without damaged lines."""
    return jsonl.parsed(content(folder))


def content(folder: Path) -> bytes:
    """Return the bytes of the history of the run in a folder."""
    try:
        return jsonl.content(folder / NAME)
    except OSError as exc:
        raise CannotRead(
            f"{folder / NAME} cannot be read: {exc.strerror}.",
            fix="mend the cause, or move the file away; the checkpoints do not need it.",
        ) from exc


def attempts(lines: Sequence[Line]) -> list[Line]:
    """Return a summary of each start: the process, its checkpoint, its last save, how it ended.

    >>> start = {"event": "start", "attempt": 1, "time": "2026-07-30T12:00:00+00:00", "host": "node7"}
    >>> [found] = attempts([start, {"event": "end", "attempt": 1, "how": "SIGTERM"}])
    >>> found["host"], found["ended"]
    ('node7', 'SIGTERM')
    """
    starts = {line["attempt"]: line for line in lines if _is_start(line)}
    told = {then["attempt"]: then["how"] for line in starts.values() if (then := _previous(line))}
    ends = told | {line["attempt"]: line["how"] for line in lines if _is_end(line)}
    saves = {line["attempt"]: line["number"] for line in lines if is_save(line)}
    return [
        {key: start.get(key) for key in _SUMMARY} | {"last": saves.get(number), "ended": ends.get(number)}
        for number, start in starts.items()
    ]


def pushed(lines: Iterable[Line]) -> dict[str, set[int]]:
    """Return the checkpoints that are complete on each remote, according to the history.

    >>> line = {"event": "push", "to": "s3://b/exp"}
    >>> pushed([line | {"number": 1, "removed": []}, line | {"number": 2, "removed": [1]}])
    {'s3://b/exp': {2}}
    """
    there: dict[str, set[int]] = {}
    for line in lines:
        if line.get("event") == "push" and _holds(line, number=int, to=str, removed=list):
            there.setdefault(line["to"], set()).add(line["number"])
            there[line["to"]] -= {number for number in line["removed"] if type(number) is int}
        elif line.get("event") == "pull" and _holds(line, number=int, origin=str):
            there.setdefault(line["origin"], set()).add(line["number"])
    return there


def skipped(folder: Path) -> dict[int, str]:
    """Return the checkpoints that a start must not resume from, and why."""
    found: dict[int, str] = {}
    # A training needs no history; the writer reports one that cannot be read.
    with contextlib.suppress(OSError):
        if jsonl.mentions(folder / NAME, b'"skip"'):
            for line in jsonl.read(folder / NAME):
                if line.get("event") == "skip" and _holds(line, number=int, problem=str):
                    found[line["number"]] = line["problem"]
                elif is_save(line):
                    # The folder had lost its newest checkpoint: this is another one of the same number.
                    found.pop(line["number"], None)
    return found


def exists(folder: Path) -> bool:
    """Return whether the run in a folder has a history."""
    return (folder / NAME).exists()


def allowed(folder: Path) -> list[str]:
    """Return the patterns of `allow=` that earlier starts resumed with."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        for line in jsonl.read(folder / NAME):
            if line.get("event") == "start" and _holds(line, allowed=list):
                found += [one for one in line["allowed"] if isinstance(one, str)]
    return found


def remote(lines: Sequence[Line]) -> dict[str, str] | None:
    """Return the remote of the last start (`url`) and which checkpoints it pushes; None without one.

    >>> time, where = "2026-07-30T12:00:00+00:00", {"url": "s3://b/exp", "push": "newest"}
    >>> remote([{"event": "start", "attempt": 1, "time": time, "remote": where}])
    {'url': 's3://b/exp', 'push': 'newest'}
    """
    last = next(filter(_is_start, reversed(lines)), {})
    found = last.get("remote")
    if isinstance(found, dict) and _holds(found, url=str, push=str):
        return {"url": found["url"], "push": found["push"]}
    return None


def is_save(line: Line) -> bool:
    """Return whether a line is a save, as this library writes it."""
    if line.get("event") != "save" or not _holds(line, number=int, superseded=bool):
        return False
    return {type(line.get("parent", "")), type(line.get("attempt", ""))} <= {int, type(None)}


def abandoned(parents: Mapping[int, int | None], number: int | None, before: Iterable[int]) -> set[int]:
    """Return the saves that are not ancestors of checkpoint `number`.

    Of the saves before one with an unknown parent, those are returned that were abandoned `before`.

    >>> sorted(abandoned({1: None, 2: 1, 3: 1, 4: 3}, 3, before=[2]))
    [2, 4]
    >>> sorted(abandoned({1: None, 2: 1, 5: 4, 6: 5}, 5, before=[1]))
    [1, 6]
    """
    passed: set[int] = set()
    while number is not None and number in parents and number not in passed:
        passed.add(number)
        number = parents[number]
    earlier = {other for other in parents if number is not None and other < number}
    return (parents.keys() - passed - earlier) | (earlier & {*before})


def left_behind(lines: Iterable[Line], here: Mapping[int, int | None], newest: int | None) -> set[int]:
    """Return the saves that are not ancestors of the newest checkpoint; those `here` know their parent.

    >>> left_behind([], {1: None, 2: 1, 3: 1}, newest=3)
    {2}
    """
    saves = [line for line in lines if is_save(line)]
    before = {line["number"] for line in saves if line["superseded"]}
    if newest is None:
        return before
    return abandoned({**{line["number"]: line["parent"] for line in saves}, **here}, newest, before)


# Each is about 500 bytes.
_MOST_DUE = 1000
_LONGEST_TEXT = 1000
_SUMMARY = ("attempt", "time", "host", "pid", "argv", "git", "dirty", "versions", "from")


def _save(about: Manifest, attempt: int | None, why: str | None = None, **more: Json) -> Line:
    took = {"interval": None, **Took()._asdict(), **more}
    return {
        "event": "save",
        "attempt": attempt,
        "number": about.number,
        "parent": about.parent,
        "time": about.saved,
        "epoch": about.epoch,
        "batch": about.batch,
        "step": about.step,
        "samples": about.samples,
        "metrics": dict(about.metrics),
        "size": about.size,
        "why": why,
        **took,
        "superseded": False,
    }


def _marked(marks: Mapping[int, bool], replaced: Container[int], line: Line) -> Line | None:
    if not is_save(line):
        return line
    number = line["number"]
    if number in replaced:
        return None
    return {**line, "superseded": marks[number]} if number in marks else line


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def _took(line: Line) -> tuple[float | None, float] | None:
    if not is_save(line):
        return None
    lost, durable = line.get("lost"), line.get("durable")
    return (lost if _is_time(lost) else None, durable) if _is_time(durable) else None


def _is_time(value: Json) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1 << 53


def _how_it_ended(attempt: int, lines: Sequence[Line], now: Mapping[str, Json]) -> Line | None:
    if not attempt:
        return None
    mine = [line for line in lines if line.get("attempt") == attempt]
    start = next(filter(_is_start, mine))
    word = next(filter(_is_end, mine), {}).get("how")
    last = max([line["number"] for line in filter(is_save, mine)], default=None)
    return {"attempt": attempt, "how": word or _what_is_likely(start, now), "last": last}


def _what_is_likely(then: Line, now: Mapping[str, Json]) -> str:
    """Describe the end of a process that has not noted it, as far as it can be known."""
    likely = NO_EXIT
    boots = then.get("boot"), now.get("boot")
    # Containers on one machine have host names of their own.
    if boots[0] and boots[0] == boots[1]:
        return likely
    if then.get("host") != now.get("host"):
        return f"{likely}; it was on {then.get('host')}, the next start on {now.get('host')}"
    if None in boots:
        return likely
    return f"{likely}; the machine was started again since, or the next start was on another of its name"


def _is_start(line: Line) -> bool:
    attempt = line.get("attempt")
    # Longer numbers than Python prints were not written by it.
    if line.get("event") != "start" or type(attempt) is not int or not 0 <= attempt < 1 << 53:
        return False
    with contextlib.suppress(ValueError, TypeError):
        return datetime.fromisoformat(line.get("time")).tzinfo is not None  # type: ignore[arg-type]
    return False


def _is_end(line: Line) -> bool:
    return line.get("event") == "end" and _holds(line, attempt=int, how=str)


def _previous(start: Line) -> Line | None:
    found = start.get("previous")
    return found if isinstance(found, dict) and _holds(found, attempt=int, how=str) else None


def _holds(line: Line, **kinds: type) -> bool:
    return [*map(type, map(line.get, kinds))] == [*kinds.values()]
