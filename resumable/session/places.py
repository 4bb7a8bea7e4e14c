"""What to warn of where the script calls `save()`: a resume cannot continue exactly from there."""

from __future__ import annotations

from collections.abc import Iterator

from ..position.position import Position
from ..training import Training
from ..variables.variables import IN_INNER_LOOP


def look(training: Training) -> None:
    """Warn of a `save()` in the script at a place where a resume cannot continue exactly."""
    training.once.warn_of(_found(training.position))


def _found(position: Position) -> Iterator[str]:
    if any(loader.is_interrupted() for loader in position.loaders.values()):
        yield (
            "saved while handling an exception that left the loop over the batches: that is not a "
            "boundary, and a resume may draw other numbers for the batch. [R10]"
        )
    position.was_saved()
    if position.streams.has_late_read():
        yield (
            "random numbers were drawn between reading state.step (or another counter) and the loop that "
            "begins with it: a resume draws others. Read the counters in the head of the loop only, or use "
            "state.steps(). [R08]"
        )
    if position.streams.has_unseen_loop():
        yield (
            "this script reads neither state.step (or another counter) nor state.vars, so RunState does not "
            "see where its loop begins: a resume puts the random generators back in load, and what is drawn "
            "until the loop differs. Begin it with a counter, as in range(state.step, total). [R08]"
        )
    if position.is_in_inner_loop():
        yield IN_INNER_LOOP
    if unlooped := position.unlooped():
        names = ", ".join(name.removeprefix("loader.") for name in unlooped)
        yield (
            f"save() in the body of epochs() says that the epoch is finished, and {names} has not been "
            "looped over in it. If it is due in this epoch, call save() in or after its loop. [R04]"
        )
