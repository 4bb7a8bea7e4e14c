"""The loops over epochs, steps and batches, which move the counters."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType, GeneratorType
from typing import Any, Generic, TypeVar

from ..boundary import Boundary
from ..errors import warn
from ..variables.script import asking, frames
from . import batch_loop
from .batch_loop import Hooks
from .epoch_place import EpochPlace
from .loader_position import LoaderPosition
from .loader_set import LoaderSet
from .prefetching import Way
from .random_streams import Hook, Streams
from .training_counters import TrainingCounters


class CountedLoops(TrainingCounters):
    """The counters of a training, and the loops that move them."""

    def __init__(self, streams: Streams, loaders: LoaderSet, processes: int) -> None:
        super().__init__(streams, loaders, processes)
        self.restores = 0
        """Counts how often the training was moved elsewhere: the body that runs then does not count."""
        self._resumed_at = Boundary.OUTSIDE
        self._is_in_epochs = self._was_in_epochs = False
        """Whether a body of `epochs()` is running, and whether one was at the checkpoint."""
        self._not_due: set[str] = set()
        """Loaders that an epoch has ended without."""
        self._kept: weakref.WeakSet[GeneratorType[Any, Any, Any]] = weakref.WeakSet()
        """The script's generators that were there as the body began."""
        self._left_for: str | None = None
        """The place at which a resume begins, if `epochs()` or `steps()` was left right after `save()`."""

    def epochs(self, total: int, body_ended: Hook, head: Hook) -> Iterator[int]:
        """Yield the epochs up to `total`."""
        if self._known.is_through():
            # An epoch's body was left after its last batch.
            self._begin_epoch(self.epoch + 1)
        number = self._begin_loop("epochs", total)
        head()
        has_run = False
        while self.epoch < total:
            if has_run:
                head()
            has_run = True
            is_second_time = self._resumed_at in (Boundary.BATCH, Boundary.STEP)
            self.streams.begin_body(is_second_time=is_second_time)
            if any(loader.begins_here for loader in self._known.all):
                # What the first lines draw was drawn at the epoch's beginning.
                self.streams.hold_now()
            restores, outer, self._body = self.restores, self._body, Boundary.EPOCH
            self._work_at_start = self.all_updates
            self._step_at_start, self._has_looped, self._is_in_epochs = self.step, False, True
            self._has_saved_end = False
            self.means.begin(self.epoch)
            if not self.loaders:
                self._stepped = set()
            asked_by = getattr(asking.caller(), "f_code", None)
            self._keep_on(asking.caller())
            try:
                yield self.epoch
            except GeneratorExit:
                is_left = self.is_saved_body() and self.boundary() is Boundary.EPOCH
                if is_left and self.epoch + 1 < total and asking.is_break(asked_by):
                    self._left_for = f"epoch {self.epoch + 1}"
                self._note_left(asking.is_break(asked_by))
                self.streams.leave_loop("epochs", total, number)
                raise
            finally:
                self._body, self._is_in_epochs = outer, False
            if restores == self.restores:
                try:
                    self._end_body(body_ended)
                finally:
                    self._begin_epoch(self.epoch + 1)
        self.streams.end_loop(number, has_run=has_run, resumed_at=self._resumed_at)

    def ends_without_batches(self, may_ask_again: Callable[[], bool]) -> None:
        """Note that the body is over where no batch can be asked for in what is left of it."""
        is_untouched = not (
            self._has_looped or any(at.is_over or at.is_under_way() for at in self._known.all)
        )
        if (
            self._body is Boundary.EPOCH
            and self.loaders
            and is_untouched
            and self.step == self._step_at_start
        ):
            self._has_looped = not may_ask_again()

    def _begin_loop(self, kind: str, total: int) -> int | None:
        """Return the number of an outermost loop that begins; None for one in the body of another."""
        done = {"epochs": self.epoch, "steps": self.step}
        self._left_for, self._has_left_body = None, False
        return None if self._body is not None else self.streams.begin_loop(kind, total, done)

    def _keep_on(self, frame: FrameType | None) -> None:
        """Let what the script iterates over, as a body of `epochs()` begins, go on over the epoch's end."""
        for loader in self._known.all:
            # A loop that an exception has left may be open, too, as long as its traceback is there.
            if loader.is_open and not loader.is_of_body:
                loader.go_on_endlessly()
        # A generator of the script's begins its loop in the body, at the first next().
        seen = frame.f_globals | frames.variables(frame) if frame else {}
        self._kept = weakref.WeakSet(asking.generators_in(seen))

    def _end_body(self, body_ended: Hook) -> None:
        self._put_back_unlooped()
        for loader in self._known.all:
            if loader.is_endless and loader.in_hand is not None:
                loader.take_back()
        self._not_due |= {n for n, at in self.loaders.items() if not (at.is_over or at.is_under_way())}
        for loader in self._known.all:
            loader.habits.warn_of_left_after_save()
        # The next epoch follows, even if batches of this one are left.
        self._has_ended_body = True
        try:
            body_ended()
        finally:
            self._has_ended_body = False

    def _put_back_unlooped(self) -> None:
        # The training resumed in mid-epoch, and the body did not loop over the rest.
        if self._known.is_under_way() or self._resumed_at is Boundary.STEP:
            self.streams.put_back()

    def _note_left(self, is_break: bool) -> None:
        """Note that the body of `epochs()` was left; only the batches know how much of it is done."""
        is_over = is_break and self._known.is_over()
        has_worked = self.all_updates > self._work_at_start or not self.counts_steps
        self._stay()
        is_in_batches = is_break and self._known.is_under_way()
        self._has_left_body = has_worked and not (is_over or is_in_batches)

    def _stay(self) -> None:
        # The next loops continue from here, as after a resume.
        for loader in self._known.all:
            loader.stay()
        is_between = self._known.is_put_off() and self._known.is_over()
        if self._known.is_under_way() or is_between:
            for loader in self._known.of_epochs():
                loader.pass_by()
            self._resumed_at = Boundary.BATCH
            self.streams.hold()

    def _begin_epoch(self, epoch: int, *, is_new_body: bool = True) -> None:
        self._put_back_unlooped()
        for loader in self._known.of_epochs():
            if loader.step_counted is not None:
                loader.step_counted.warn_of_uncounted()
            loader.end_epoch()
        self.epoch, self.batch, self._has_left_body = epoch, 0, False
        self._resumed_at = Boundary.EPOCH
        if is_new_body:
            self.streams.forget_body()
        self.streams.forget_held()

    def steps(self, total: int, body_ended: Hook, head: Hook) -> Iterator[int]:
        """Yield the steps up to `total`: each body is one, whatever the optimizers do in it."""
        number = self._begin_loop("steps", total)
        head()
        has_run = False
        while self.step < total:
            if has_run and self.streams.is_holding():
                head()
            has_run = True
            self.streams.put_back()
            if not self._is_in_epochs:
                self.streams.forget_body()
            restores, outer, self._body = self.restores, self._body, Boundary.STEP
            self._step_in_hand, self._updates_in_hand = self.step, self.updates
            if outer is None:
                self._work_at_start = self.all_updates
            around = [loader for loader in self._known.all if loader.in_hand]
            self.handed.body_begins()
            asked_by = getattr(asking.caller(), "f_code", None)
            try:
                yield self.step
                if restores == self.restores:
                    try:
                        body_ended()
                    finally:
                        # A body whose step was skipped (a gradient scaler does that) is still one body.
                        self.step = self.steps_done()
                        for loader in self._known.all:
                            if loader.in_hand and loader not in around:
                                loader.take_back()
            except GeneratorExit:
                is_last = self.steps_done() >= total
                if self.is_saved_body() and not is_last and asking.is_break(asked_by):
                    self._left_for = f"step {self.steps_done()}"
                self._has_left_body = self.all_updates > self._work_at_start or not self.counts_steps
                self.streams.leave_loop("steps", total, number)
                raise
            except BaseException:
                # A script that catches Preempted may enter the loop again, and make another iterator.
                for loader in self._known.all:
                    if loader.is_open and loader not in around:
                        loader.leave(None)
                self._stay()
                raise
            finally:
                self._body = outer
        self.streams.end_loop(number, has_run=has_run, resumed_at=self._resumed_at)
        self._has_looped = True

    def batches(self, name: str, hooks: Hooks, way: Way) -> Batches[Any]:
        """Return the rest of the epoch's batches."""
        loader = self._known.at(name)
        if (self._body is not Boundary.EPOCH or loader.is_endless) and loader.is_through():
            self._begin_pass(loader)
        if self._body is None:
            has_begun = any(at.is_over or at.is_under_way() for at in self._known.all)
            self.streams.begin_batches_by_hand(is_first=not has_begun)
        return Batches(loader, hooks, way, self._is_kept)

    def _is_kept(self, frame: FrameType) -> bool:
        """Whether this frame is that of a generator which was there as the body of `epochs()` began."""
        return self._is_in_epochs and any(one.gi_frame is frame for one in self._kept)

    def _begin_pass(self, loader: LoaderPosition) -> None:
        """Begin another pass over a loader: without `epochs()`, that of the outermost is the next epoch."""
        if self.is_repeated(loader) or (self._is_in_epochs and self._body is Boundary.STEP):
            loader.rewind()
            return
        if self._is_in_epochs:
            # It is refused as its loop begins.
            return
        for at in self._known.all:
            at.habits.warn_of_left_after_save()
            # After a resume a generator of the script's may not have opened its loop again.
            if at.is_open or at.is_awaited:
                at.go_on_endlessly()
        self._begin_epoch(self.epoch + 1, is_new_body=False)

    def is_in_epochs(self) -> bool:
        """Whether a body of `epochs()` is running, or has just ended."""
        return self._is_in_epochs or self._has_ended_body

    def reopened(self) -> None:
        """Put the generators back if all loops over batches that were open are open again.

        If `epochs()` follows, it does so itself.
        """
        is_before_epochs = self._was_in_epochs and not self._is_in_epochs
        if not is_before_epochs and not self._known.is_awaited():
            self.streams.put_back()

    def is_repeated(self, place: EpochPlace) -> bool:
        """Whether another pass over this loader may follow in the same epoch."""
        return place.is_endless or not (self._is_in_epochs or self._known.is_outermost(place))

    def at(self, name: str) -> LoaderPosition:
        """Return the position of a loader, by its name."""
        return self._known.at(name)

    def find(self, iterable: Any) -> str:
        """Return the name of an iterable that was not given to RunState, and know it from now on."""
        return self._known.find(iterable, is_in_epochs=self._body is Boundary.EPOCH)

    def is_in_inner_loop(self) -> bool:
        """Whether a loop over batches runs in the body of one over those of another loader."""
        return self._known.is_in_inner_loop()

    def warn_of_left_after_save(self) -> None:
        """Warn of a `break` right after `save()`: the checkpoint does not know of it."""
        if self._left_for:
            warn(
                f"the loop was left by a break right after save(): the same command trains on, with "
                f"{self._left_for}. Break at the top of the body, by a variable set before. [R02]"
            )

    def unlooped(self) -> list[str]:
        """Return the loaders that a save in this epoch's body assumes are not due."""
        if self._body is not Boundary.EPOCH or self.boundary() is not Boundary.EPOCH:
            return []
        has_begun = {name: at.is_over or at.is_under_way() for name, at in self.loaders.items()}
        lacking = [name for name, begun in has_begun.items() if not begun and name not in self._not_due]
        return lacking if any(has_begun.values()) else []


B = TypeVar("B")


class Batches(Generic[B]):
    """The rest of an epoch's batches, to loop over once.

    `len()` is how many the whole epoch has, where the loader knows; it stays the same in the loop.
    """

    def __init__(
        self, loader: LoaderPosition, hooks: Hooks, way: Way, is_kept: Callable[[FrameType], bool]
    ) -> None:
        self._loader = loader
        self._hooks = hooks
        self._way = way
        self._is_kept = is_kept
        self._thread = threading.get_ident()

    def __len__(self) -> int:
        return len(self._loader.source)

    def __iter__(self) -> Iterator[B]:
        is_in_thread = threading.get_ident() != self._thread
        self._loader.is_endless |= not is_in_thread and self._is_kept(sys._getframe(1))
        return batch_loop.begin(self._loader, self._hooks, self._way, is_in_thread=is_in_thread)


class Enumerated(Generic[B]):
    """The rest of an epoch's batches, each with its index in the epoch, to loop over once.

    `len()` is that of the batches.
    """

    def __init__(self, batches: Batches[B], start: int) -> None:
        self._batches = batches
        self._start = start

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[int, B]]:
        loop: Any = iter(self._batches)
        # map() is not a frame of its own: the loop still sees who asks, and ends when map() is dropped.
        return map(partial(loop.numbered, self._start), loop)
