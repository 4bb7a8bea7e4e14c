"""Makes all processes of a training do something at the same boundary when one of them asks for it."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..files.strict_json import Json
from .ranks import Ranks


@dataclass(slots=True)
class _Call:
    """A request, and the boundary at which all ranks act on it."""

    turn: int
    asked: Json = None
    """What is to be done: the request of the process that asked first."""
    promised: int | None = None
    """The boundary that this process does not pass until all have promised."""
    is_posted: bool = False
    place: int | None = None
    """The boundary at which it is to be done."""

    def key(self, rank: int | None = None) -> str:
        return f"call/{self.turn}" if rank is None else f"call/{self.turn}/{rank}"


class Rendezvous:
    """Finds a boundary for all: each process promises one that it will not pass; the last is taken.

    The thread that listens to the others makes the promise while the training runs; the training waits only
    if it reaches its promised boundary before all have promised. Boundaries are counted, so every process
    has to pass the same ones.
    """

    def __init__(self, ranks: Ranks, pace: Callable[[], float]) -> None:
        self._ranks = ranks
        self._pace = pace
        self._lock = threading.Lock()
        self._passed = 0
        self._call = _Call(0)
        self._wanted: dict[str, Json] = {}
        """The requests of this process, by kind."""
        ranks.listen(self._listen)

    def want(self, kind: str, why: str) -> None:
        """Request that all processes do something; it is due where `passed` returns it."""
        with self._lock:
            if kind in self._wanted:
                return
            self._wanted[kind] = {"kind": kind, "why": why}
        self._ranks.hurry()

    def passed(self) -> tuple[str, str] | None:
        """Count a boundary; return what is due at it, and why."""
        with self._lock:
            self._passed += 1
            call = self._call
            has_come_far = call.promised is not None and self._passed >= call.promised
        if has_come_far and call.place is None:
            call.place = max(self._promises(call))
        if call.place is None or self._passed < call.place:
            return None
        with self._lock:
            self._wanted.pop(call.asked["kind"], None)
            self._call = _Call(call.turn + 1)
        return call.asked["kind"], call.asked["why"]

    def _promises(self, call: _Call) -> Sequence[Json]:
        keys = {rank: call.key(rank) for rank in range(self._ranks.size)}
        what = f"no place was found where all {call.asked['kind']} ({call.asked['why']})"
        return self._ranks.wait(keys, what)

    def _listen(self, store: Any) -> bool:
        """Post requests and promises and read those of the others; return whether a promise is missing."""
        with self._lock:
            call, wanted = self._call, next(iter(self._wanted.values()), None)
        if call.place is not None:
            return False
        if wanted and call.asked is None:
            store.compare_set(call.key(), "", json.dumps(wanted))
        if call.asked is None and not store.check([call.key()]):
            return False
        if call.promised is None:
            asked = json.loads(store.get(call.key()))
            with self._lock:
                # Under the lock: a boundary passed meanwhile could be the promised one.
                call.asked, call.promised = asked, self._passed + self._boundaries_ahead()
        if not call.is_posted:
            store.set(call.key(self._ranks.rank), json.dumps(call.promised))
            call.is_posted = True
        keys = [call.key(rank) for rank in range(self._ranks.size)]
        if not store.check(keys):
            return True
        call.place = max(json.loads(store.get(key)) for key in keys)
        self._forget(store, _Call(call.turn - 1))
        return False

    def _boundaries_ahead(self) -> int:
        # As many as pass before all others have read the request: then no process waits for another.
        pace = self._pace()
        return 2 if pace <= 0 else min(2 + math.ceil(1.5 * self._ranks.every / pace), _MOST)

    def _forget(self, store: Any, call: _Call) -> None:
        # A process that promises for this call has finished with the one before.
        if self._ranks.is_first and call.turn >= 0:
            for key in (call.key(), *map(call.key, range(self._ranks.size))):
                store.delete_key(key)


_MOST = 10_000
