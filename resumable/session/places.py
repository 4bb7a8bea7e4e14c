"""What to warn of where the script calls `save()`: a resume cannot continue exactly from there."""

from __future__ import annotations

from ..training import Training


def warn(training: Training) -> None:
    """Warn of a `save()` in the script at a place where a resume cannot continue exactly."""
    warn, position = training.once.warn, training.position
    if any(loader.is_interrupted() for loader in position.loaders.values()):
        warn(
            "saved while handling an exception that left the loop over the batches: that is not a "
            "boundary, and a resume will not be bit for bit what an uninterrupted run does."
        )
    position.was_saved()
    if position.streams.has_late_read():
        warn(
            "random numbers were drawn between reading state.step (or another counter) and the loop that "
            "begins with it: after a resume these draws differ, because the generators are put back at "
            "the first such read. Read the counters in the head of the loop only, or use state.steps()."
        )
    if position.streams.has_unseen_loop():
        warn(
            "this script reads neither state.step (or another counter) nor state.vars, so that RunState "
            "does not see where its loop begins: a resume puts the random generators back in load, and "
            "what is drawn between load and the loop differs. Begin the loop with a counter, as in "
            "range(state.step, total)."
        )
    if position.is_in_inner_loop():
        warn(
            "save() in a loop over batches that runs in the body of another such loop counts the outer "
            "batch as done: a resume continues with the next one, and loses the rest of the inner loop. "
            "Call save() in the outer loop, after the inner one."
        )
    if unlooped := position.unlooped():
        names = ", ".join(name.removeprefix("loader.") for name in unlooped)
        warn(
            f"save() in the body of epochs() says that the epoch is finished, and {names} has not been "
            "looped over in it: a resume begins the next epoch. If it is due in this epoch, call save() "
            "in or after its loop."
        )
