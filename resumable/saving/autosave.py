"""Whether to save, or to save and leave, at the boundary where a training stands."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path

from ..boundary import Due
from ..processes.ranks import Ranks
from ..processes.rendezvous import Rendezvous
from ..processes.signals import Signals
from ..run import policy
from ..run.policy import Every, Interval, Since
from .save_cost import SaveCost


class Autosave:
    """Decides at each boundary; of several processes, all decide the same.

    What is counted each finds by itself. What a clock or a signal tells one of them it lets all others
    know, and they do it together a little later.
    """

    def __init__(
        self, ranks: Ranks, signals: Signals, pace: SaveCost, every: Every, max_time: float | None
    ) -> None:
        self._ranks = ranks
        self._signals = signals
        self._pace = pace
        self._every = every
        self._leaves_at = None if max_time is None else began() + max_time
        self._calls = None if ranks.is_alone else Rendezvous(ranks, pace.body)
        self._waiting: Due | None = None
        """What was due at an epoch's last batch, and waits for the end of the epoch's body."""
        self._always_asks = bool(self._calls or max_time is not None or every.measured())
        """Whether what is due depends on the other processes, or on what was measured meanwhile."""
        self._count_from(0, 0)

    @property
    def is_on(self) -> bool:
        """Whether it saves by time, steps or epochs, and not only on a signal."""
        return self._every != Every() or self._leaves_at is not None

    @property
    def chosen(self) -> Interval | None:
        """How often to save, if that follows from what saves cost."""
        return policy.interval(self._every, self._pace.cost)

    def saved(self, step: int, epoch: int) -> None:
        """Note that there is a save of this place: the rules count from here."""
        self._count_from(step, epoch)
        if self._waiting and not self._waiting.leaves:
            self._waiting = None

    def _count_from(self, step: int, epoch: int) -> None:
        self._saved_at, self._step, self._epoch = time.monotonic(), step, epoch
        self._next_step = step + (self._every.steps or math.inf)
        self._next_epoch = epoch + (self._every.epochs or math.inf)
        self._next_time = self._saved_at + (math.inf if self._every.seconds is None else self._every.seconds)

    def is_overdue(self) -> bool:
        """Whether the time between two saves has passed."""
        return time.monotonic() >= self._next_time

    def may_be_due(self, step: int, epoch: int, now: float) -> bool:
        """Whether anything may be due here, at this time of the monotonic clock; if not, do not ask `due`."""
        if self._always_asks or self._signals.received is not None:
            return True
        return step >= self._next_step or epoch >= self._next_epoch or now >= self._next_time

    def due(self, step: int, epoch: int, *, is_rest_next: bool, is_saving: bool) -> Due | None:
        """Return what is to be done here; `is_rest_next`: only the rest of the epoch's body comes next.

        A resume at an epoch's last batch runs that rest with nothing of what the loop before it left. So
        what is due there waits for the end of the body, a signal as long as its grace allows.
        """
        waiting, self._waiting = self._waiting, None
        found = self._due(step, epoch, is_rest_next=is_rest_next, is_saving=is_saving)
        if waiting and not (found and found.leaves):
            found = waiting
        if found and self._can_wait(found, is_rest_next):
            # One process finds it due again there; several agree on it only once.
            self._waiting, found = found if self._calls else None, None
        return found

    def _can_wait(self, found: Due, is_rest_next: bool) -> bool:
        can_wait = is_rest_next and (found.leaves is None or self._is_in_time(found))
        # Epochs may differ in length between processes, so that their last batches are at other boundaries.
        return all(self._ranks.agree("the end of the epoch", lambda: can_wait))

    def _is_in_time(self, found: Due) -> bool:
        left = _GRACE
        if found.why == _MAX_TIME and self._leaves_at is not None:
            left = self._leaves_at - time.time()
        elif self._signals.received:
            left -= time.monotonic() - self._signals.received_at
        return self._pace.is_rest_known and self._pace.time_to_leave(is_rest_next=True) < left

    def _due(self, step: int, epoch: int, *, is_rest_next: bool, is_saving: bool) -> Due | None:
        since = Since(time.monotonic() - self._saved_at, step - self._step, epoch - self._epoch)
        leaves = self._leaves(is_rest_next)
        by_count = policy.due_by_count(self._every, since)
        by_time = None
        # A second save would make the training wait for the first.
        if self._ranks.is_first and not is_saving:
            by_time = policy.due_by_time(self._every, since, self.chosen)
        if self._calls:
            return self._called(self._calls, leaves, by_time) or (Due(by_count) if by_count else None)
        why = by_count or by_time
        return leaves or (Due(why) if why else None)

    def _called(self, calls: Rendezvous, leaves: Due | None, by_time: str | None) -> Due | None:
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
        # Only Linux has these files; elsewhere the time before this import is not counted.
        return _IMPORTED


_MAX_TIME = "max_time"
_GRACE = 30.0  # seconds from a signal to SIGKILL: what SLURM, Kubernetes and torchrun give if nothing is said
_IMPORTED = time.time()
