"""What follows a durable checkpoint: its copies in a remote, the links to it, and pruning."""

from __future__ import annotations

from ..errors import CannotRead, FormatTooNew
from ..run.manifest import Best, Manifest
from ..run.policy import Keep
from ..training import Training


def tidy_after(training: Training, about: Manifest) -> None:
    """Push the checkpoint, let the links point to it, and prune what is not to be kept."""
    run, keep = training.run, training.options.keep
    # First: what goes wrong below must not keep it from the remote.
    if training.copies:
        training.copies.saved(about.number, about.best)
    try:
        run.point("newest", run.path_of(about.number))
        if about.best:
            run.point("best", run.path_of(about.best.number))
        if keep is not None and run.holds_more_than(keep.newest):
            _prune(training, keep, about.best)
    except (CannotRead, FormatTooNew) as exc:
        # The checkpoint is durable. The best of all is unknown, so all of them stay.
        training.once.warn(f"nothing was pruned: {exc.problem}")


def _prune(training: Training, keep: Keep, best: Best | None) -> None:
    protected = [found.number for found in (best, training.run.best(training.goal)) if found]
    protected += training.copies.pinned() if training.copies else ()
    training.run.prune(keep, protected, training.goal)
