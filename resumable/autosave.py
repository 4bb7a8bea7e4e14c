"""Whether to save, or to save and leave, at the boundary where a training stands."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from . import policy
from .calls import Calls
from .pace import Pace
from .policy import Every, Interval, Since
from .ranks import Ranks
from .signals import Signals


@dataclass(frozen=True, slots=True)
class Due:
    """What is to be done at a boundary: to save, and perhaps to leave as a signal asks."""

    why: str
    leaves: signal.Signals | None = None


class Autosave:
    """Decides at each boundary; of several processes, all decide the same.

    What is counted each finds by itself. What a clock or a signal tells one of them it lets all others
    know, and they do it together a little later.
    """

    def __init__(
        self, ranks: Ranks, signals: Signals, pace: Pace, every: Every, max_time: float | None
    ) -> None:
        self._ranks = ranks
        self._signals = signals
        self._pace = pace
        self._every = every
        self._leaves_at = None if max_time is None else began() + max_time
        self._calls = None if ranks.is_alone else Calls(ranks, pace.body)
        self._saved_at, self._step, self._epoch = time.monotonic(), 0, 0

    @property
    def chosen(self) -> Interval | None:
        """How often to save, if that follows from what saves cost."""
        return policy.interval(self._every, self._pace.cost)

    def saved(self, step: int, epoch: int) -> None:
        """Note that there is a save of this place: the rules count from here."""
        self._saved_at, self._step, self._epoch = time.monotonic(), step, epoch

    def due(self, step: int, epoch: int, *, is_rest_next: bool, is_saving: bool) -> Due | None:
        """Return what is to be done here."""
        since = Since(time.monotonic() - self._saved_at, step - self._step, epoch - self._epoch)
        leaves = self._leaves(is_rest_next)
        by_count = policy.due_by_count(self._every, since)
        by_time = None
        # (a second save would wait for the first, and the training with it)
        if self._ranks.is_first and not is_saving:
            by_time = policy.due_by_time(self._every, since, self.chosen)
        if self._calls:
            return self._called(self._calls, leaves, by_time) or (Due(by_count) if by_count else None)
        why = by_count or by_time
        return leaves or (Due(why) if why else None)

    def _called(self, calls: Calls, leaves: Due | None, by_time: str | None) -> Due | None:
        if leaves:
            calls.want("leave", leaves.why)
        elif by_time:
            calls.want("save", by_time)
        if (called := calls.passed()) is None:
            return None
        kind, why = called
        return Due(why, _signal(why)) if kind == "leave" else Due(why)

    def _leaves(self, is_rest_next: bool) -> Due | None:
        if received := self._signals.received:
            return Due(received.name, received)
        if self._leaves_at is None or not self._ranks.is_first:
            return None
        left = self._leaves_at - time.time()
        return Due(_MAX_TIME, _signal(_MAX_TIME)) if left <= self._pace.time_to_leave(is_rest_next) else None


def _signal(why: str) -> signal.Signals:
    # A queue whose limit is near would send this one.
    return signal.SIGTERM if why == _MAX_TIME else signal.Signals[why]


def began() -> float:
    """Return when the limit of the time began to count: with the queue's job, or with this process."""
    job = os.environ.get("SLURM_JOB_START_TIME", "")
    if job.isdecimal():
        return float(job)
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
        return time.time() - up + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        # (elsewhere than on Linux) What came before, mostly imports, is not counted then.
        return _IMPORTED


_MAX_TIME = "max_time"
_IMPORTED = time.time()
