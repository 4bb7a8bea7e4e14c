"""The loop over the rest of an epoch's batches, in the training's thread."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from enum import Enum
from types import FrameType
from typing import Any, NamedTuple

from ..errors import UsageError
from ..tracebacks import shorten
from . import habits
from .loader_position import LoaderPosition
from .prefetching import CountedBySteps, Loading, ThreadLoop, Through, Way
from .random_streams import Hook


class Hooks(NamedTuple):
    """Calls before a loop over batches that may have no batch left, at its two ends, and after each body."""

    head: Hook
    begin: Hook
    asked: Callable[[Iterator[Any], FrameType], object]
    """Called as a frame asks for the first batch."""
    body_ended: Hook
    end: Hook


class Stage(Enum):
    """How far a loop is, and when a batch counts."""

    FIRST = "first"
    """No batch was requested yet."""
    SECOND = "second"
    """One batch was requested: the second request shows whether a prefetcher makes it."""
    STRAIGHT = "straight"
    """A batch counts when the next one is requested."""
    ONE_AHEAD = "one ahead"
    """A batch counts when the next but one is requested, by the usual stream prefetcher."""
    ENDED = "ended"
    """No batches are left, or the loop was left."""


_FIRST, _STRAIGHT = Stage.FIRST, Stage.STRAIGHT
"""To look them up in their class at every batch takes longer than the rest of what asks for them."""


def begin(at: LoaderPosition, hooks: Hooks, way: Way, *, is_in_thread: bool) -> Loop | Over | ThreadLoop:
    """Return the batches that are left: one counts as done when the next is requested.

    `is_in_thread`: whether another thread than the training's loops; there a step of the optimizer counts.
    """
    if not at.may_loop():
        if not is_in_thread:
            hooks.head()
        return Over()
    at.draws.begin(is_recorded=way.draws)
    if is_in_thread:
        at.training.pass_begins()
        counted = CountedBySteps(at)
        return ThreadLoop(at, at.open(loads_ahead=True, step_counted=counted), counted, way)
    if at.is_endless:
        return Loop(at, at.open(loads_ahead=way.loads_ahead), hooks, way.through, is_watched=False)
    hooks.head()
    # Before there are workers: they inherit which signals are noted.
    hooks.begin()
    try:
        return Loop(at, at.open(loads_ahead=way.loads_ahead), hooks, way.through)
    except BaseException:
        hooks.end()
        raise


class Loop:
    """One pass over the rest of an epoch."""

    def __init__(
        self,
        at: LoaderPosition,
        batches: Iterator[Any],
        hooks: Hooks,
        through: Through | None,
        *,
        is_watched: bool = True,
    ) -> None:
        self._at = at
        self._lap = at.lap
        self._stage = Stage.FIRST
        self._hooks = hooks
        self._is_watched = self._is_cut = False
        self._outer = sys.exc_info()[1]
        self._is_direct = through is None
        self._asked_first: tuple[object, object] | None = None
        """The call that asked for the first batch, and the training's progress then."""
        self._progress_then = at.training.progress()
        is_boundary = self._is_direct and at.training.is_in_batches()
        self._drawn_then = at.training.streams.read_draws() if is_boundary else None
        self._batches = batches
        self._through: Iterator[Any] | None = None
        at.began(self)
        self._begun_then = at.training.loops_begun
        # Most prefetchers fail where there is no batch.
        is_empty = at.done and at.done == at.length()
        if through is not None and (not is_empty or at.prepared):
            self._through = iter(through(Loading(at, batches)))
        self._is_watched = is_watched

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._outer is not None and sys.exc_info()[1] is not self._outer:
            # It is handled no more. Kept, it would keep its frames, and with them this loop and its workers.
            self._outer = None
        at = self._at
        if self._stage is not _STRAIGHT:
            if self._stage is Stage.SECOND:
                self._look_ahead(sys._getframe(1))
            if self._stage is Stage.ONE_AHEAD:
                return self._next_ahead()
            if self._is_cut:
                raise UsageError(
                    "an iterator over state.batches() was asked for a batch in a later epoch than the one in "
                    "which it was made, or after another one was made.",
                    fix="make it before the loop over state.epochs(), and keep it in a variable: then it "
                    "goes on from epoch to epoch. Or make a new one in the body of each epoch.",
                )
            if self._stage is Stage.ENDED:
                raise StopIteration
        if at.in_hand is not None:
            try:
                self._hooks.body_ended()
            except BaseException as error:
                # A loop that continues after it must not be handed this batch a second time.
                at.take_back()
                at.leave(self._outer)
                if shorten(error):
                    raise error  # RESUMABLE_FULL_TRACEBACK=1 shows where
                raise
        if self._stage is _FIRST:
            self._ask_first(sys._getframe(1))
        at.ask()
        try:
            if self._through is None:
                batch, digest = at.load_in_hand(self._batches, self._lap)
            else:
                batch = self._come_through()
        except StopIteration:
            self._end()
            raise
        except BaseException as error:
            at.leave(self._outer)
            if shorten(error):
                raise error  # RESUMABLE_FULL_TRACEBACK=1 shows where
            raise
        if self._through is None:
            at.begin_body(digest)
        else:
            at.hand_out()
        return batch

    def _ask_first(self, asked_by: FrameType) -> None:
        at, training = self._at, self._at.training
        training.pass_begins()
        if self._is_direct:
            self._asked_first = _call(asked_by), training.progress()
        self._stage = Stage.SECOND if self._is_direct else Stage.STRAIGHT
        at.habits.look_at_holders(self)
        self._hooks.asked(self, asked_by)
        at.habits.asked(asked_by, is_direct=self._is_direct)
        drawn, self._drawn_then = self._drawn_then, None
        # The loader of another loop may have drawn its seed.
        is_alone = self._begun_then == training.loops_begun
        is_boundary = is_alone and training.is_in_batches() and not at.is_endless
        if drawn and at.habits.is_asked_by_hand and is_boundary:
            habits.warn_of_draws_before_next(drawn, training.streams.read_draws())

    def _look_ahead(self, asked_by: FrameType) -> None:
        """Check whether another call makes the second request, and nothing was trained on the first batch.

        That is the usual stream prefetcher, an object that is always one batch ahead.
        """
        assert self._asked_first
        (first, then), self._asked_first = self._asked_first, None
        progress = self._at.training.progress()
        self._stage = Stage.STRAIGHT
        if progress is None or progress != then:
            return
        if first == _call(asked_by):
            habits.warn_of_generator(asked_by)
        else:
            self._stage = Stage.ONE_AHEAD
            self._at.ask_ahead()

    def _next_ahead(self) -> Any:
        at = self._at
        if at.ahead:
            self._hooks.body_ended()
            if at.in_hand is not None:
                at.take_back()
            at.hand_out()
        try:
            return at.load(self._batches, self._lap)
        except StopIteration:
            self._stage = Stage.ENDED
            at.expect_no_more()
            raise

    def _come_through(self) -> Any:
        assert self._through is not None
        try:
            batch = next(self._through)
        except StopIteration:
            self._at.draws.catch_up()
            if kept := len(self._at.ahead):
                self._end()
                raise UsageError(
                    f"through= has kept {kept} of the batches that it was given.",
                    fix="let it give each batch that it gets once, in the same order.",
                ) from None
            raise
        self._at.draws.catch_up()
        if not self._at.ahead:
            raise UsageError(
                "through= has made more batches than it was given.",
                fix="let it give each batch that it gets once, in the same order.",
            )
        return batch

    def _end(self) -> None:
        at, then = self._at, self._progress_then
        self._stage = Stage.ENDED
        is_untrained = at.done > 1 and then is not None and then == at.training.progress()
        at.habits.ended(is_untrained=is_untrained)
        at.end()
        self.unwatch()

    def numbered(self, start: int, batch: Any) -> tuple[int, Any]:
        """Return the batch that was just handed out, with its index in the epoch, counted from `start`."""
        at = self._at
        return start + at.done + (len(at.ahead) if self._stage is Stage.ONE_AHEAD else 0), batch

    def close(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Leave the loop."""
        if is_finalizing():
            # It means nothing then, and names of this module may be gone.
            return
        if self._stage is not Stage.ENDED and self._lap == self._at.lap:
            stage, self._stage = self._stage, Stage.ENDED
            self._at.close(self._outer, has_asked=stage is not Stage.FIRST)
        self.unwatch()

    def abandon(self) -> None:
        """Give no more batches: the loader was moved elsewhere."""
        self._stage = Stage.ENDED
        self.unwatch()

    def cut(self) -> None:
        """Raise UsageError if another batch is asked for."""
        self._is_cut = self._stage is not Stage.ENDED

    def unwatch(self) -> None:
        """Stop watching for signals; a second call does nothing."""
        if self._is_watched:
            self._is_watched = False
            self._hooks.end()

    def __del__(self) -> None:
        # A loop that is left drops its iterator.
        self.close()


def _call(asked_by: FrameType) -> object:
    """Return a value that identifies a call; the frame itself would keep the loop and its workers alive."""
    return id(asked_by), asked_by.f_code, asked_by.f_back and asked_by.f_back.f_code


class Over:
    """No batches: the epoch's were over when the training was resumed."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        raise StopIteration

    def numbered(self, start: int, batch: Any) -> tuple[int, Any]:
        """Return a batch with its index; never called."""
        return start, batch
