"""How long the bodies of a loop take, and how much of that saves have taken."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

from ..run.policy import Cost


class SaveCost:
    """Measures what a save costs the training.

    The cost is the time by which bodies take longer during a save: the call itself, the copies that a step
    waits for, the cores and the memory that the writer uses.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._last: float | None = None
        """When the body before this one ended, if the two follow each other."""
        self._quiet: deque[float] = deque(maxlen=_REMEMBERED)
        """The durations of bodies during which nothing was saved."""
        self._rest = 0.0
        self.is_rest_known = False
        """Whether an epoch has ended, so that the time after its last body is known."""
        self._is_lost_known = True
        """Whether bodies could be compared when the cost was measured."""
        self._save: _Save | None = None
        self.cost: Cost | None = None
        """The cost of the recent saves; newer ones count more."""

    def expect(self, lost: float | None, durable: float) -> None:
        """Take a save to cost what one did in an earlier process, until one has been measured here."""
        if self.cost is None:
            self.cost, self._is_lost_known = Cost(lost or 0.0, durable), lost is not None

    def begin(self) -> None:
        """Note that a loop begins: what was before is no body."""
        self._last = self._now()

    def rest_ended(self) -> None:
        """Note that an epoch has ended, and with it what came after its last body."""
        if self._last is not None:
            self._rest, self.is_rest_known = max(self._rest, self._now() - self._last), True
        self._last = None

    def body_ended(self) -> None:
        """Note that a body has ended, and the next one begins."""
        now, last, save = self._now(), self._last, self._save
        self._last = now
        if save is None:
            if last is not None:
                self._quiet.append(now - last)
            return
        ended = save.ended
        # Without a body to compare with, the whole of this one would count as the cost of the save.
        if last is not None and self._quiet:
            during = min(now if ended is None else ended, now) - max(save.began, last)
            save.lost += max(0.0, min(now - last - self.body(), during))
        if ended is not None:
            self._count(save, ended)

    def body(self) -> float:
        """Return the usual duration of a body during which nothing is saved; 0 if it is unknown."""
        return statistics.median(self._quiet) if self._quiet else 0.0

    def save_began(self, waited: float = 0.0) -> Callable[[], float]:
        """Note that a save has begun, that many seconds ago; call what is returned when it is durable.

        It returns how long that took.
        """
        if self._save and self._save.ended is not None:
            self._count(self._save, self._save.ended)
        self._save = save = _Save(self._now() - waited)

        def ended() -> float:
            save.ended = self._now()
            return save.ended - save.began

        return ended

    def _count(self, save: _Save, ended: float) -> None:
        found, self._save = Cost(save.lost, ended - save.began), None
        # Every save may meet a busy disk; one alone is not to turn everything around.
        if self.cost is not None and self._is_lost_known:
            self.cost = _between(self.cost, found)
        else:
            self.cost, self._is_lost_known = found, bool(self._quiet)

    def time_to_leave(self, is_rest_next: bool) -> float:
        """Return how long it may take until the next boundary, and until a save there is durable.

        Next is a body, or the rest of an epoch (an evaluation).
        """
        durable = self.cost.durable if self.cost else _UNKNOWN
        longest = max([self._rest] if is_rest_next else [*self._quiet, 0.0])
        return longest + _MARGIN * durable + _AT_LEAST


class _Save:
    __slots__ = ("began", "ended", "lost")

    def __init__(self, began: float) -> None:
        self.began = began
        self.ended: float | None = None
        self.lost = 0.0


def _between(before: Cost, found: Cost) -> Cost:
    return Cost(
        before.lost + _WEIGHT * (found.lost - before.lost),
        before.durable + _WEIGHT * (found.durable - before.durable),
    )


_REMEMBERED = 64
_WEIGHT = 0.3
_MARGIN = 2.0
_UNKNOWN = 30.0
_AT_LEAST = 2.0
