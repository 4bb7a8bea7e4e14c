"""How a process lets go of its run."""

from __future__ import annotations

from ..errors import UsageError
from ..position.position import Position
from ..run.directory import Run
from ..run.history_writer import History


def closed(run: Run) -> UsageError:
    """Return the error of a call that comes after the end of the RunState."""
    return UsageError(
        f"this RunState of {run} has been closed, or another has taken its place.",
        fix="continue with the newer one, or make one with RunState.load(...).",
    )


def end(history: History, run: Run, position: Position, how: str) -> None:
    """Note how a process has ended, and let another one write the run."""
    try:
        epoch, batch, step = position.stands_at()
        history.ended(how, epoch=epoch, batch=batch, step=step)
    finally:
        run.release()
