"""Follows what loads batches ahead of the training: a `through=`, or another thread that loops over them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import UsageError, warn
from .random_streams import Streams

if TYPE_CHECKING:
    from .loader_position import LoaderPosition

Through = Callable[[Iterator[Any]], Any]
"""Makes an iterable of the same batches, such as a thread that loads them ahead."""


@dataclass(frozen=True, slots=True)
class Way:
    """How the batches get from the loader to the training."""

    through: Through | None = None
    loads_ahead: bool = False
    """Whether batches are requested before the training wants them."""
    draws: bool = False
    """Whether `through` is the script's own code, which may draw random numbers."""


class ThroughDraws:
    """The states of the generators for each batch that `through=` has loaded ahead, and may draw for."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.is_recorded = False
        """Whether the loop has a `through=`, which may draw."""
        self._thread = 0
        """The thread that began the loop: draws elsewhere come at moments of their own."""
        self._saved: deque[Any] = deque()
        """The states for the batches that were ahead at the save, oldest first."""
        self.live: Any = None
        """The states to return to after a batch that was ahead at the save."""

    def begin(self, *, is_recorded: bool) -> None:
        """Note that a loop begins in this thread."""
        self.is_recorded, self._thread = is_recorded, threading.get_ident()

    def forget(self) -> None:
        """Drop all states: the loader is moved elsewhere."""
        self.live = None
        self._saved.clear()

    def restore(self, states: Iterable[Any]) -> None:
        """Use these states for the next batches that are loaded."""
        self._saved.extend(states)

    def of_loaded(self) -> Any:
        """Return the states for the batch that was just loaded.

        One that was ahead at a save draws from the saved states, until the next batch is asked for.
        """
        if threading.get_ident() != self._thread:
            return None
        if self._saved and (draws := self._saved.popleft()) is not None:
            self.live = self._streams.read_draws()
            self._streams.write(draws)
            return draws
        return self._streams.read_draws()

    def catch_up(self) -> None:
        """Restore the generators after a batch that was ahead at a save."""
        if self.live is not None:
            self._streams.write(self.live)
            self.live = None


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


_NOT_ONE_TO_ONE = "Where that is not one to one, give the thread to state.batches(through=...)."


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
