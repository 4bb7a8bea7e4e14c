"""What was trained since the last save, which the end of a loop and `close()` save."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from ..errors import RankLost, warn
from ..position.position import Position
from ..processes.ranks import Ranks


class Rest:
    """Knows what the last save has, and whether there is more."""

    def __init__(self, position: Position, *, is_saved: bool) -> None:
        self._position, self._is_saved = position, is_saved
        self._work: tuple[int, ...] = (0, 0, 0)
        self._epoch = 0

    def note_saved(self) -> None:
        """Note that a checkpoint has all that was trained."""
        self._work, self._epoch = self._position.work(), self._position.counters()["epoch"]

    def is_lost(self) -> bool:
        """Whether something was trained that no checkpoint has, and not all saves are the script's."""
        return self._is_saved and self._position.work() > self._work

    def warn_at_exit(self, run: str) -> None:
        """Warn, at the interpreter's end, of what is lost where the script has not closed the training."""
        if _is_at_exit() and self.is_lost():
            # A warning may be an error.
            with contextlib.suppress(Warning):
                warn(
                    f"{run} was not closed, and what was trained since the last save is in no checkpoint. "
                    "Call state.close() at the end, or write `with RunState.load(...) as state:`."
                )

    def is_due(self, why: str, ranks: Ranks, *, is_boundary: bool) -> bool:
        """Return whether all processes save here; they all ask."""
        if not self._is_saved:
            return False
        lost, position = self.is_lost(), self._position
        has_more = lost or (is_boundary and position.epoch > self._epoch)
        try:
            found = ranks.agree(why, lambda: [has_more, is_boundary, *position.stands_at()])
        except RankLost:
            if lost:
                raise
            return False
        if not any(has_more for has_more, *_ in found):
            return False
        if all(one[1:] == [True, *found[0][2:]] for one in found):
            return True
        if lost:
            warn(
                f"{_reason(found)} and what was trained since the last save is in no checkpoint. Call save() "
                "before the loop is left."
            )
        return False


def _reason(found: list[list[Any]]) -> str:
    if all(is_boundary for _, is_boundary, *_ in found):
        return "the processes have trained different numbers of batches,"
    return "the loop was left before its end,"


def _is_at_exit() -> bool:
    # Whatever drops a session before the interpreter's end has a frame of the script around it.
    frame = sys._getframe(1)
    while frame.f_back:
        frame = frame.f_back
    return frame.f_code.co_name == "_exitfunc"
