"""Follows what loads batches ahead of the training: a `through=`, or another thread that loops over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..errors import UsageError, warn
from .loader_position import LoaderPosition

Through = Callable[[Iterator[Any]], Any]
"""Makes an iterable of the same batches, such as a thread that loads them ahead."""


class Way(NamedTuple):
    """How the batches get from the loader to the training."""

    through: Through | None = None
    loads_ahead: bool = False
    """Whether batches are requested before the training wants them."""
    draws: bool = False
    """Whether `through` is the script's own code, which may draw random numbers."""


class Loading:
    """The loader's batches for `through=`, each noted as it is loaded."""

    def __init__(self, at: LoaderPosition, batches: Iterator[Any]) -> None:
        self._at = at
        self._lap = at.lap
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        # A thread may still request batches long after the training has moved on.
        if self._lap != self._at.lap:
            raise StopIteration
        return self._at.load(self._batches, self._lap)


_BY_STEPS = (
    "there a batch counts when the optimizer steps. If that is not one to one, give the thread to "
    "state.batches(through=...). [R06]"
)


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
                f"the optimizer has made more steps than another thread has loaded batches: {_BY_STEPS}",
                about="steps of another thread",
            )

    def warn_of_uncounted(self) -> None:
        """Warn, at an epoch's end, of batches that no step was made for."""
        count = len(self._at.ahead)
        what = f"{count} batches of the epoch were loaded by another thread, and no step was made for them"
        if not self._has_ended:
            what = "the epoch ended before another thread had come to the end of its batches"
        if count or not self._has_ended:
            warn(f"{what}: {_BY_STEPS}")

    def refuse_to_leave_out(self) -> None:
        """Raise UsageError unless all batches are counted."""
        if self._at.ahead or not self._has_ended:
            raise UsageError(
                "another thread loops over state.batches(), so it is unknown which batch is in hand.",
                fix="give the thread to state.batches(through=...): what comes out of it is in hand.",
            )


class ThreadLoop:
    """One pass over the rest of an epoch, in another thread than the training's."""

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
