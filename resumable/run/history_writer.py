"""Writing the history of a run: a line for each start, save, restore and end."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial

from ..errors import CannotRead, ResumableError, warn
from ..files import jsonl
from ..files.jsonl import Line
from ..files.strict_json import Json
from . import history, history_summary
from .checkpoint import HIGHEST
from .directory import Run
from .history_scan import Scan, scan, scan_end
from .history_summary import Summary
from .manifest import Manifest
from .policy import Took


class History:
    """The history of a run, written by the process that holds the run's lock.

    It never stops a training: if it cannot be written, it warns once and retries with each line.

    >>> run = Run("runs/exp")
    >>> run.acquire()
    >>> written = History(run)
    >>> written.begin({"host": "node7", "pid": 4711}, came_from=None)
    1
    >>> written.ended("closed", epoch=2, batch=0, step=20)
    >>> [(line["event"], line["attempt"]) for line in history.read(run.path)]
    [('start', 1), ('end', 1)]
    >>> run.release()
    """

    def __init__(self, run: Run, *, by_hand: bool = False, issued: Iterable[str] = ()) -> None:
        self._run = run
        self._issued = issued
        """The texts of all warnings so far; more may come at any moment, and in any thread."""
        self._warned: list[str] = []
        """Those that have a line."""
        self.warned_before = 0
        """How many warnings the start before this one has kept."""
        # A push or a pull by hand belongs to no attempt.
        self._by_hand = by_hand
        self._path = run.path / history.NAME
        # A save is noted in the background, while the script may restore or end.
        self._guard = threading.Lock()
        self._parents: dict[int, int | None] | None = None
        """All saves; None until something asks for them."""
        self._superseded: set[int] = set()
        self.highest = 0
        """The highest known save number, including checkpoints that no longer exist."""
        self._last: int | None = None
        self._branch: int | None = None
        self._is_marked = True
        """Whether the saves that are not on this branch are known."""
        # Lines that are not in the file yet; bounded, because the file may stay unwritable.
        self._due: deque[Line] = deque(maxlen=_MOST_DUE)
        self._marks: dict[int, bool] = {}
        self._replaced: set[int] = set()
        self._has_warned = False
        self._is_summed_up = True
        """Whether every checkpoint that was made since the start has its line."""
        self.last_took: tuple[float | None, float] | None = None
        """The cost of the last save of earlier attempts: seconds lost, if known, and until durable."""
        self.wrote: Sequence[Json] = ()
        """What earlier attempts have noted of how the disk was written, oldest first; not checked."""
        self.stands_on: int | None = None
        """The checkpoint that the training continues: the loaded one, then the last save."""
        self._planned: Mapping[str, int] = {}
        """The last loop that was noted."""
        self.attempt: int | None = None
        """The number of this start of the run, from 1; None before it, after its end, and if unknown."""

    def begin(self, facts: Mapping[str, Json], came_from: int | None) -> int | None:
        """Note that a process, described by `facts`, resumes from a checkpoint or starts fresh."""
        with self._guard:
            try:
                found = self._read(came_from)
            except CannotRead as exc:
                self._tell(exc)
                return None
            self.highest, self._branch = found.highest, found.stands_on
            self.wrote, self.last_took = [*map(json.loads, found.noted)], found.took()
            last, self.warned_before = found.attempt, found.warned()
            late = [_save(about, last or None) for about in self._unknown()]
            self._take_in(late)
            saves = [*late, {"number": found.last[last]}] if last in found.last else late
            newest = max([line["number"] for line in saves], default=None)
            self.attempt = last + 1
            previous = _how_it_ended(last, newest, found.others, facts)
            self._go_on_from(came_from)
            self._write(*late, self._end("start", **facts, **{"from": came_from}, previous=previous))
            return self.attempt

    def _read(self, came_from: int | None) -> Scan:
        """Read as little as a start that continues from a checkpoint needs."""
        found = scan_end(self._run.path)
        with contextlib.suppress(ResumableError):
            if found.before and came_from is not None and came_from == found.stands_on:
                # A number without a line: its save failed after the commit, or its process was killed.
                has_all = found.highest == found.before.highest + len(found.parents)
                if has_all and (self._run.highest() or 0) <= found.highest:
                    return found
        return self._read_all()

    def _read_all(self) -> Scan:
        found = scan(history.content(self._run.path))
        self._parents, self._superseded = found.parents, found.superseded
        return found

    def saved(
        self,
        about: Manifest,
        why: str,
        *,
        interval: Mapping[str, Json] | None = None,
        took: Took | None = None,
        wrote: Mapping[str, Json] | None = None,
    ) -> None:
        """Note that a checkpoint is durable, before anything is pruned.

        `interval`: the interval that the rule chose, and why. `wrote`: how the disk was written.
        """
        with self._guard:
            if self.attempt is None:
                return
            self._is_summed_up &= about.number == self.highest + 1
            if about.number in (range(self.highest + 1) if self._parents is None else self._parents):
                # The folder has lost its newest checkpoints: this is another one of the same number.
                self._replaced.add(about.number)
            self.stands_on = None
            times = {key: _rounded(seconds) for key, seconds in (took or Took())._asdict().items()}
            more = {"wrote": wrote} if wrote else {}
            line = _save(about, self.attempt, why=why, interval=interval, **times, **more)
            self._take_in([line])
            self._last, self._branch = about.number, about.number
            if (durable := times["durable"]) is not None:
                self.last_took = times["lost"], durable
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

    def pushed(
        self, number: int, to: str, *, sent: int, copied: int, seconds: float, removed: Sequence[int] = ()
    ) -> None:
        """Note that a checkpoint is complete on the remote, and which ones were pruned there."""
        took = {"sent": sent, "copied": copied, "seconds": _rounded(seconds), "removed": [*removed]}
        self._moved("push", number=number, to=to, **took)

    def pulled(self, number: int, origin: str, *, size: int, seconds: float) -> None:
        """Note that a checkpoint was pulled from a remote."""
        self._is_summed_up = False
        self._moved("pull", number=number, origin=origin, size=size, seconds=_rounded(seconds))

    def _moved(self, event: str, **about: Json) -> None:
        with self._guard:
            if self.attempt is not None or self._by_hand:
                self._write(self._line(event, **about))

    def ended(self, how: str, **place: int) -> None:
        """Note how and where this process has ended; only the first call counts."""
        with self._guard:
            if self.attempt is not None:
                issued = self._warnings()
                told = {"warnings": len(self._warned)} if self._warned else {}
                line = self._end("end", how=how[:_LONGEST_TEXT], **place, **told)
                self.attempt = None
                self._write(*issued, line)

    def _warnings(self) -> list[Line]:
        """Return lines for the warnings that have none."""
        new = [*self._issued][len(self._warned) :] if self.attempt is not None else []
        self._warned += new
        return [self._line("warning", text=text[:_LONGEST_TEXT]) for text in new]

    def _line(self, event: str, **about: Json) -> Line:
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        return {"event": event, "attempt": self.attempt, "time": now, **about}

    def _end(self, event: str, **about: Json) -> Line:
        """Return a line from which on the next start reads."""
        stands_on = self._branch if self._is_summed_up else None
        known = Summary(self.highest, stands_on, self._last, self.last_took)
        return self._line(event, **about, **{history_summary.KEY: known.to_json()})

    def _unknown(self) -> Iterator[Manifest]:
        # A process killed between the commit and the line has left a checkpoint without one.
        numbers: list[int] = []
        parents = self._parents
        with contextlib.suppress(ResumableError):
            numbers = [n for n in self._run.numbers() if n not in parents] if parents is not None else []
        for number in numbers:
            # The next start looks again.
            with contextlib.suppress(ResumableError):
                yield self._run.open(number).about

    def _take_in(self, lines: Iterable[Line]) -> None:
        for line in filter(history.is_save, lines):
            self.highest = max(self.highest, line["number"] if line["number"] <= HIGHEST else 0)
            if self._parents is not None:
                self._parents[line["number"]] = line["parent"]
            (self._superseded.add if line["superseded"] else self._superseded.discard)(line["number"])

    def _go_on_from(self, number: int | None) -> None:
        self.stands_on = number
        self._is_marked &= self._parents is None and number == self._branch
        self._branch = number
        self._mark()

    def _mark(self) -> None:
        if self._is_marked:
            return
        if self._parents is None:
            try:
                self._read_all()
            except CannotRead as exc:
                self._tell(exc)
                return
            self._take_in(self._due)
        left = history.abandoned(self._parents or {}, self._branch, self._superseded)
        self._marks |= {other: other in left for other in left ^ self._superseded}
        self._superseded, self._is_marked = left, True

    def _write(self, *lines: Line) -> None:
        self._due.extend([*lines, *self._warnings()])
        self._mark()
        for line in filter(history.is_save, self._due):
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


# Each is about 500 bytes.
_MOST_DUE = 1000
_LONGEST_TEXT = 1000


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
    if not history.is_save(line):
        return line
    number = line["number"]
    if number in replaced:
        return None
    return {**line, "superseded": marks[number]} if number in marks else line


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def _how_it_ended(
    attempt: int, last: int | None, lines: Sequence[Line], now: Mapping[str, Json]
) -> Line | None:
    if not attempt:
        return None
    mine = [line for line in lines if line.get("attempt") == attempt]
    word = next(filter(history.is_end, mine), {}).get("how")
    start = next(filter(history.is_start, mine), {})
    return {"attempt": attempt, "how": word or _what_is_likely(start, now), "last": last}


def _what_is_likely(then: Line, now: Mapping[str, Json]) -> str:
    """Describe the end of a process that has not noted it, as far as it can be known."""
    likely = history.NO_EXIT
    boots = then.get("boot"), now.get("boot")
    # Containers on one machine have host names of their own.
    if boots[0] and boots[0] == boots[1]:
        return likely
    if then.get("host") != now.get("host"):
        return f"{likely}; it was on {then.get('host')}, the next start on {now.get('host')}"
    if None in boots:
        return likely
    return f"{likely}; the machine was started again since, or the next start was on another of its name"
