"""How long the bodies of a loop take, and how much of that saves have taken."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from ..run.policy import Cost

Waiting = Callable[[], contextlib.AbstractContextManager[None]]
"""Entered while the training waits for a save."""


class SaveCost:
    """Measures what a save costs the training.

    The cost is the time in which the training waits (in the call, and in the step that waits for the copies),
    and the time by which bodies take longer during a save, because of the cores and the memory that the
    writer uses.
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
        self._waiting_since: float | None = None
        self._waited = 0.0
        """The seconds of the current body in which the training waited."""
        self._lost = self._told = 0.0
        self.cost: Cost | None = None
        """The cost of the recent saves; newer ones count more."""

    def expect(self, lost: float | None, durable: float) -> None:
        """Take a save to cost what one did in an earlier process, until one has been measured here."""
        if self.cost is None:
            self.cost, self._is_lost_known = Cost(lost or 0.0, durable), lost is not None

    def begin(self) -> None:
        """Note that a loop begins: what was before is no body."""
        self._last, self._waited = self._now(), 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as time that the training loses."""
        if self._waiting_since is not None:
            yield
            return
        self._waiting_since = began = self._now()
        try:
            yield
        finally:
            waited = self._now() - began
            self._waiting_since = None
            self._waited += waited
            self._lose(waited)

    def _lose(self, seconds: float) -> None:
        self._lost += seconds
        if self._save:
            self._save.lost += seconds

    def lost_since(self) -> float:
        """Return the seconds that the training has lost since the last call; the sum of all is the total."""
        since = self._waiting_since
        lost = self._lost - self._told + (0.0 if since is None else self._now() - since)
        # The writer asks, so a wait may end meanwhile and be missed: the next call has it.
        self._told += (new := max(0.0, lost))
        return new

    def rest_ended(self) -> None:
        """Note that an epoch has ended, and with it what came after its last body."""
        if self._last is not None:
            self._rest, self.is_rest_known = max(self._rest, self._now() - self._last), True
        self._last, self._waited = None, 0.0

    def body_ended(self, now: float | None = None) -> None:
        """Note that a body has ended, and the next one begins; `now`: the clock's time, if it was read."""
        now = self._now() if now is None else now
        last, save, waited = self._last, self._save, self._waited
        self._last, self._waited = now, 0.0
        if save is None:
            if last is not None:
                self._quiet.append(now - last - waited)
            return
        ended = save.ended
        # Without a body to compare with, the whole of this one would count as the cost of the save.
        if last is not None and self._quiet:
            during = min(now if ended is None else ended, now) - max(save.began, last)
            self._lose(max(0.0, min(now - last - self.body(), during) - waited))
        if ended is not None:
            self._count(save, ended)

    def body(self) -> float:
        """Return the usual duration of a body during which nothing is saved; 0 if it is unknown."""
        return median(self._quiet) if self._quiet else 0.0

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


def median(values: Iterable[float]) -> float:
    """Return the middle one of some numbers, or the mean of the two in the middle.

    `statistics` imports decimal numbers and fractions for its own, which takes 2 ms at each start.

    >>> median([9.0, 1.0, 2.0]), median([1.0, 2.0])
    (2.0, 1.5)
    """
    ordered = sorted(values)
    half = len(ordered) // 2
    return (ordered[half] + ordered[~half]) / 2
