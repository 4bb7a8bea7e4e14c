"""Something that all processes of a training are to do at the same boundary, though one alone asks for it."""

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
    turn: int
    asked: Json = None
    """What is asked for, by whichever process came first."""
    promised: int | None = None
    """The boundary that this process does not pass before all have promised."""
    is_told: bool = False
    place: int | None = None
    """The boundary at which it is to be done."""

    def key(self, rank: int | None = None) -> str:
        return f"call/{self.turn}" if rank is None else f"call/{self.turn}/{rank}"


class Calls:
    """Finds the boundary: each process promises how far it does not go, and the farthest of these it is.

    A process promises from the thread that listens to the others, while the training goes on; it waits
    only if it comes as far as that before all have spoken. Boundaries are counted, so all processes have
    to come to the same ones.
    """

    def __init__(self, ranks: Ranks, pace: Callable[[], float]) -> None:
        self._ranks = ranks
        self._pace = pace
        self._lock = threading.Lock()
        self._passed = 0
        self._call = _Call(0)
        self._wanted: dict[str, Json] = {}
        """What this process asks for, by kind."""
        ranks.listen(self._listen)

    def want(self, kind: str, why: str) -> None:
        """Ask for something to be done by all; it is done where `passed` returns it."""
        with self._lock:
            if kind in self._wanted:
                return
            self._wanted[kind] = {"kind": kind, "why": why}
        self._ranks.hurry()

    def passed(self) -> tuple[str, str] | None:
        """Count a boundary; return what is to be done at it, and why."""
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
        """Ask, promise and look for the others' promises; return whether one of these is still to come."""
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
                # (under the lock: a boundary that is passed meanwhile would make the promise a lie)
                call.asked, call.promised = asked, self._passed + self._boundaries_ahead()
        if not call.is_told:
            store.set(call.key(self._ranks.rank), json.dumps(call.promised))
            call.is_told = True
        keys = [call.key(rank) for rank in range(self._ranks.size)]
        if not store.check(keys):
            return True
        call.place = max(json.loads(store.get(key)) for key in keys)
        self._forget(store, _Call(call.turn - 1))
        return False

    def _boundaries_ahead(self) -> int:
        # As many as pass before all others have heard of it: then nobody waits for anybody.
        pace = self._pace()
        return 2 if pace <= 0 else min(2 + math.ceil(1.5 * self._ranks.every / pace), _MOST)

    def _forget(self, store: Any, call: _Call) -> None:
        # (who promises for this call has done with the one before)
        if self._ranks.is_first and call.turn >= 0:
            for key in (call.key(), *map(call.key, range(self._ranks.size))):
                store.delete_key(key)


_MOST = 10_000
