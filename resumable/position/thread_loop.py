"""The loop of a thread that loads batches ahead of the training, without `through=`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..errors import UsageError, warn
from .batch_loop import Loading, Over, Way
from .loader_position import LoaderPosition

_NOT_ONE_TO_ONE = "Where that is not one to one, give the thread to state.batches(through=...)."


def begin(at: LoaderPosition, way: Way) -> Iterator[Any]:
    """Return the batches that are left, counting one as done when the optimizer steps."""
    if not at.may_loop():
        return Over(at.training.sums)
    at.draws.begin(is_recorded=way.draws)
    counted = CountedBySteps(at)
    return ThreadLoop(at, at.open(loads_ahead=True, step_counted=counted), counted, way)


class CountedBySteps:
    """The batches that another thread loads: one counts when the optimizer steps."""

    def __init__(self, at: LoaderPosition) -> None:
        self._at = at
        self._has_ended = False
        """Whether the thread has come to the end of the batches."""

    def ended(self) -> None:
        """Note that the thread has come to the end of the batches."""
        self._has_ended = True
        if not self._at.ahead:
            self._at.finish()

    def stepped(self) -> None:
        """Count a batch."""
        # Without the lock: the other thread holds it for as long as it waits for a batch.
        if self._at.ahead:
            self._at.hand_out()
            self._at.take_back()
            if self._has_ended and not self._at.ahead:
                self._at.finish()
        else:
            self._at.training.once.warn(
                "the optimizer has made more steps than another thread has loaded batches: there a batch "
                f"counts when the optimizer steps. {_NOT_ONE_TO_ONE}",
                about="steps of another thread",
            )

    def warn_of_uncounted(self) -> None:
        """Warn, at an epoch's end, of batches that no step was made for."""
        if self._at.ahead and self._has_ended:
            warn(
                f"{len(self._at.ahead)} batches of the epoch were loaded by another thread, and the "
                "optimizer made no step for them: there a batch counts when the optimizer steps. "
                f"{_NOT_ONE_TO_ONE}"
            )
        elif not self._has_ended:
            warn(
                "the epoch ended before another thread had come to the end of its batches: a resume in "
                "mid-epoch does not know which of them were trained. Give the thread to "
                "state.batches(through=...)."
            )

    def refuse_to_leave_out(self) -> None:
        """Raise UsageError unless all batches are counted."""
        if self._at.ahead or not self._has_ended:
            raise UsageError(
                "another thread loops over state.batches(), and nobody knows which batch is in hand.",
                fix="give the thread to state.batches(through=...): what comes out of it is in hand.",
            )


class ThreadLoop:
    """One pass over what is left of an epoch, in another thread than the training's."""

    def __init__(self, at: LoaderPosition, batches: Iterator[Any], counted: CountedBySteps, way: Way) -> None:
        self._at = at
        self._lap = at.lap
        self._counted = counted
        self._index = at.done - 1
        loading = Loading(at, batches)
        self._batches = iter(way.through(loading)) if way.through else loading

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with self._at.lock:
            self._at.ask()
            try:
                return next(self._batches)
            except StopIteration:
                if self._lap == self._at.lap:
                    self._counted.ended()
                raise

    def numbered(self, start: int, batch: Any) -> tuple[int, Any]:
        """Return the batch that was just handed out, with its index in the epoch, counted from `start`."""
        self._index += 1
        return start + self._index, batch
