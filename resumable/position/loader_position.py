"""Keeps the place of each loader in its epoch: which batches are done, in hand, or loaded ahead."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from typing import Any

from ..errors import UsageError, warn
from ..loaders.source import LoaderGenerators, Source
from ..loaders.workers.datasets import EpochTooShort
from .drawing import Drawing
from .epoch_place import EpochPlace
from .loaded_batches import Counters, InHand, Loaded, OpenLoop, Phase, StepCounted, ThroughDraws

_LEFT = Phase.LEFT
"""Until Python 3.12, looking up a member in its class takes longer than most of what asks for it."""


class LoaderPosition(EpochPlace):
    """The place of one loader in its epoch, and its state in a checkpoint."""

    def __init__(self, source: Source, training: Counters) -> None:
        super().__init__(training)
        self.source = source
        self.prepared = source.prepared
        self.generators = LoaderGenerators(source)
        self.draws = ThroughDraws(training.streams)
        self.lap = 0
        """Counts how often the loader was moved elsewhere: loops of earlier laps are dead."""
        self.begins_here = False
        """Whether the epoch begins after the batches that are done, which another training has loaded."""
        self.is_claimed = False
        """Whether `batches()` was called with this iterable, and the loop has not begun."""
        self.lock = threading.RLock()
        self._moving = threading.Lock()
        self._loop: weakref.ref[OpenLoop] | None = None
        self.is_of_body = False
        """Whether its loop has begun in a body of `epochs()`."""
        self._has_lost_place = False
        """Whether a checkpoint of an epoch's end lacks the place of an iterator that is open."""
        self._has_marks = self._has_failed = False
        """Whether the source is asked for a mark with each batch, and whether one could not be loaded."""
        self._unread: Mapping[str, Any] | None = None
        """The state of the source after a resume, until a batch is loaded."""

    @property
    def is_open(self) -> bool:
        """Whether a loop over the batches is open."""
        return self._loop is not None

    def length(self) -> int | None:
        """Return the number of batches of an epoch, if the loader knows it."""
        try:
            return len(self.source)
        except TypeError:
            return None

    def is_before_rest(self) -> bool:
        """Whether the batch in hand is the epoch's last, as far as the loader knows."""
        length = self.length()
        length = self.ended_at if length is None else length
        return length is not None and self.done + 1 >= length

    # The state in a checkpoint.

    def collect(self, *, is_searched: bool = False) -> dict[str, Any]:
        """Return the state for a checkpoint; `is_searched`: the generators have just been read."""
        with self.lock:
            is_mid_epoch = self.training.is_mid_epoch() or self.is_endless
            # The state_dict() of another loader's dataset may have made generators since.
            is_searched = is_searched and self.training.has_one_loader()
            under_way = is_mid_epoch and self.is_under_way()
            self._warn_of_lost_place(is_lost=self.is_open and self.is_beside and not is_mid_epoch)
            return {
                "batch": self.reached() if under_way else 0,
                "is_asked_by_hand": self.habits.is_asked_by_hand,
                "is_open": (self.is_open or self.is_awaited) and is_mid_epoch,
                "is_over": self.is_over and is_mid_epoch and not self.training.is_repeated(self),
                "is_endless": self.is_endless,
                "opened": self.opened if is_mid_epoch else 0,
                "begins_here": self.begins_here and is_mid_epoch,
                "generators": self.generators.collect(is_searched=is_searched),
                "ahead_draws": [loaded.draws for loaded in self.ahead] if under_way else [],
                "settings": self.source.settings(),
                "source": self._collect_source(under_way) if is_mid_epoch else self._collect_begun(),
                **({"prepared": self.prepared.collect()} if self.prepared else {}),
            }

    def _collect_begun(self) -> dict[str, Any]:
        """Return the state of the source as an epoch begins."""
        source = self.source
        if self.is_awaited:
            # The rest of the epoch that was resumed was not asked for, or not yet.
            source = copy.copy(source)
            source.rewind()
        return source.collect(None, [], False)

    def _warn_of_lost_place(self, *, is_lost: bool) -> None:
        self._has_lost_place |= is_lost
        if self._has_lost_place and self.is_endless:
            self._has_lost_place = False
            self.training.once.warn(
                "an iterator over state.batches() goes on from epoch to epoch, which did not show before the "
                "first epoch's end: a resume from a checkpoint saved there begins its pass anew. Loop over "
                "state.epochs(), then what was made before it is known to go on. [R09]",
                about="a pass that goes on",
            )

    def _collect_source(self, under_way: bool) -> dict[str, Any]:
        if not under_way or self.begins_here:
            # In a loop that was left for good, every batch that was loaded counts.
            return self.source.collect(None, [], False)
        if self._unread is not None:
            return dict(self._unread)
        return self.source.collect(self._mark, [loaded.mark for loaded in self.ahead], under_way)

    def restore(self, saved: Mapping[str, Any], unfit: AbstractSet[str]) -> None:
        """Restore what `collect` returned; `unfit` settings have changed since."""
        self.rewind()
        self.done = saved["batch"]
        self.is_awaited = bool(saved.get("is_open", self.done))
        # Checkpoints of older versions do not say these.
        self.is_endless, self.opened = saved.get("is_endless", False), saved.get("opened", 0)
        if saved.get("begins_here", False):
            self.begins_here = True
            self.training.streams.begin_elsewhere()
        self.habits.resumed(is_asked_by_hand=saved.get("is_asked_by_hand", False))
        self.draws.restore(saved.get("ahead_draws", []))
        self.phase = Phase.PASSED if saved["is_over"] else Phase.DUE
        if self.prepared and "prepared" in saved:
            self.prepared.restore(saved["prepared"])
        else:
            # The checkpoint may be of a loader that was not prepared, or of an older version.
            self.count_from(self.training.epoch)
        self.source.restore(saved["source"], unfit & saved["settings"].keys())
        self.generators.restore(saved["generators"])

    # Where the loops over the batches begin and end.

    def continue_with(self, iterable: Any) -> None:
        """Loop over this iterable from now on: a script may make it again for every epoch."""
        self.source.replace(iterable)
        self.generators.forget()

    def claim(self) -> None:
        """Note that `batches()` was called with this iterable."""
        self.is_claimed = True

    def may_loop(self) -> bool:
        """Return False if a resume has passed all batches; raise UsageError if no loop may begin."""
        if self.is_open and self.is_endless:
            # The script begins again, as it may with a loader of its own.
            self._cut()
            self.rewind()
        if self.is_over or self.in_hand is not None:
            if self.phase is not Phase.PASSED:
                raise UsageError(
                    "this epoch's batches have been looped over already.",
                    fix="loop over state.batches() once in each body of state.epochs(); for another pass "
                    "over other data use the loader itself, or give it to RunState under a name of its own.",
                )
            self.phase = Phase.OVER
            return False
        if self.is_open:
            raise UsageError(
                "two loops over this loader's batches would be on the way at once.",
                fix="give RunState a loader of its own for each: loader={'a': ..., 'b': ...}.",
            )
        if self._is_put_off and self.phase is not Phase.KEPT:
            # It was left before a step, and is entered again in the same body: that batch comes again.
            self.stay()
        return True

    def goes_on(self) -> bool:
        """Whether the pass that is opened next has begun before."""
        return bool(self.done) or self.is_awaited

    def open(self, *, loads_ahead: bool, step_counted: StepCounted | None = None) -> Iterator[Any]:
        """Return the rest of the batches, as the source yields them."""
        self.step_counted = step_counted
        if self.begins_here:
            return self._open_here(loads_ahead=loads_ahead)
        continues = self.goes_on()
        if loads_ahead or not continues:
            self.training.streams.put_back()
        self.phase, self._left_under = Phase.DUE, None
        self.is_claimed = self._is_put_off = False
        # Until a batch is loaded, its state is the restored one.
        self._unread = self.source.collect(None, [], True) if self.done else None
        with self.training.streams.as_held() if self.done else nullcontext():
            if self.prepared:
                self.prepared.begin(is_new_epoch=not continues)
            batches = self.source.open(loads_ahead=loads_ahead)
            if not self.source.draws_late:
                self.source.drawn()
            self.generators.source_opened()
        self._has_marks = self.source.has_cheap_marks or loads_ahead
        self._mark = self.source.mark() if self._has_marks else None
        self.is_awaited = False
        if continues and loads_ahead:
            # Draws until the first batch is handed out were drawn before.
            self.training.streams.hold()
        elif continues and self.habits.is_asked_by_hand:
            # Draws before next() is called are for the batch that is asked for.
            self.training.reopened()
        return batches

    def begin_at(self, batch: int) -> None:
        """Begin the epoch at this batch: another training has had those before it."""
        if (length := self.length()) is not None and batch > length:
            raise _behind_end(batch, length)
        self.done, self.begins_here = batch, True

    def count_from(self, epoch: int) -> None:
        """Let a loader that counts its epochs by itself begin with this one."""
        if self.prepared:
            self.prepared.restore_epoch(epoch)

    def _open_here(self, *, loads_ahead: bool) -> Iterator[Any]:
        """Return the batches after those that another training has had.

        The order is drawn from generators as they are; all others stay as they were when the body began.
        """
        streams = self.training.streams
        streams.hold_now()
        drawing = Drawing(streams.read)
        left = streams.of_elsewhere(is_first_epoch=not self.training.epoch)
        try:
            if self.prepared:
                self.prepared.begin(is_new_epoch=True)
            batches = self.source.open_at(self.done, drawing, loads_ahead=loads_ahead)
        except EpochTooShort as exc:
            raise _behind_end(self.done, exc.batches) from exc
        own = drawing.of_loaders() if self.source.restores_generators else set()
        streams.put_back_but(drawing.drawn | own)
        self.begins_here = self.is_awaited = self.is_claimed = False
        self.phase, self._left_under = Phase.DUE, None
        self._has_marks = self.source.has_cheap_marks or loads_ahead
        self._mark = self.source.mark() if self._has_marks else None
        for text, paths in left.items():
            if names := sorted(path[-1] for path in paths & drawing.drawn):
                warn(f"the order of this epoch is drawn from generators ({', '.join(names)}) {text} [R08]")
        return batches

    def began(self, loop: OpenLoop) -> None:
        """Note that a loop over the batches has begun."""
        self._loop = weakref.ref(loop)
        self.is_of_body = self.training.is_in_epochs()
        self.training.loops_begun += 1

    def open_loop(self) -> OpenLoop | None:
        """Return the loop over the batches that is open."""
        return self._loop() if self._loop else None

    def go_on_endlessly(self) -> None:
        """Let the loop that is open go on over the ends of epochs: other loops watch for signals."""
        self.is_endless = True
        if loop := self.open_loop():
            loop.unwatch()

    def end_epoch(self) -> None:
        """Leave the loop that is open, and return to the beginning of an epoch."""
        self.leave(None)
        self._cut()
        self.rewind()

    def _cut(self) -> None:
        if loop := self.open_loop():
            loop.cut()

    def ask_ahead(self) -> None:
        """Note that from now on a batch is requested before the one in hand is trained."""
        self._has_marks = True
        self.source.load_ahead()

    def end(self) -> None:
        """Note that the loop has come to the end of the batches."""
        self.finish()
        self._loop, self.ended_at = None, self.done
        # A resume may have left it no batch: it is then opened where it is asked.
        self.opened = self.opened or self.training.next_opened()
        self.training.batches_ended(self)

    def leave(self, outer: BaseException | None) -> None:
        """Note that the loop was left in the middle: for good by a break, or by an exception."""
        is_saved = self.in_hand is not None and self.training.is_saved_body()
        if is_saved and self.done + 1 != self.length():
            self.habits.left_after_save()
        super().leave(outer)

    def close(self, outer: BaseException | None, *, has_asked: bool) -> None:
        """Note that the loop was left, and its iterator dropped, before its end or its first batch."""
        self._loop = None
        self.leave(outer)
        if not has_asked:
            self.training.streams.put_back()
        self.training.batches_ended(self)

    def stay(self) -> None:
        """Stay in mid-epoch: the body of epochs() was left too, so the loop was not left for good."""
        if self.in_hand is not None:
            self.leave(None)
        if self.phase in (Phase.LEFT, Phase.KEPT):
            with self.lock:
                # The next loop opens the loader where it stands now.
                saved, draws = self._collect_source(True), [loaded.draws for loaded in self.ahead]
                self._go_elsewhere(Phase.KEPT)
                self.draws.restore(draws)
                self.source.restore(saved, set())

    def rewind(self) -> None:
        """Return to the beginning of an epoch."""
        self._go_elsewhere(Phase.DUE)
        self.done, self.opened, self._left_under = 0, 0, None
        self._is_put_off = self._was_left = self.is_awaited = self.is_beside = self.begins_here = False
        self.habits.epoch_begins()
        self.source.rewind()

    def _go_elsewhere(self, phase: Phase) -> None:
        if loop := self._loop and self._loop():
            # The script may keep it for long, and signals would be noted for a loop that is dead.
            loop.abandon()
        self.phase, self._loop, self.in_hand, self.step_counted = phase, None, None, None
        self._mark = self._unread = None
        self.is_claimed = False
        self.draws.forget()
        with self._moving:
            self.ahead.clear()
            self.lap += 1

    # The batches, one after the other.

    def ask(self) -> None:
        """Note that the training asks for a batch: the one in hand is done, one that has failed is left."""
        training = self.training
        if (hand := self.in_hand) is not None:
            # As take_back(), without a call.
            self.in_hand = None
            self.done += 1
            training.count_batch(self, hand)
        if training.streams.is_put_back_due:
            training.streams.put_back()
        self.is_beside = False
        if self.phase is _LEFT:
            self.phase, self._left_under = Phase.DUE, None
        if self._has_failed:
            self._has_failed = False
            self.done += self.source.forgive()

    def load_in_hand(self, batches: Iterator[Any], lap: int) -> tuple[Any, Any]:
        """Load the next batch into the training's hand; return it, and its digest if there is a trace."""
        with self.lock:
            if self.draws.live is not None:
                self.draws.catch_up()
            batch = self._next(batches)
            # The dataset's code may have moved the training elsewhere.
            if lap != self.lap:
                raise StopIteration
            source, digest = self.source, self.training.handed.digest
            size, mark = source.size(batch), source.mark() if self._has_marks else None
            found = digest(batch) if digest else None
            self.in_hand = InHand(size, self._mark, None, self.training.updates)
            self._mark = mark
            return batch, found

    def load(self, batches: Iterator[Any], lap: int) -> Any:
        """Load the next batch, for the training to have it later."""
        with self.lock:
            if self.draws.live is not None:
                self.draws.catch_up()
            batch = self._next(batches)
            source, digest = self.source, self.training.handed.digest
            loaded = Loaded(
                source.size(batch),
                source.mark() if self._has_marks else None,
                digest(batch) if digest else None,
                self.draws.of_loaded() if self.draws.is_recorded else None,
            )
            with self._moving:
                # A thread may have waited for it while the training went elsewhere.
                if lap != self.lap:
                    raise StopIteration
                self.ahead.append(loaded)
            return batch

    def _next(self, batches: Iterator[Any]) -> Any:
        self._unread = None
        try:
            return next(batches)
        except Exception:
            self._has_failed = True
            raise


def _behind_end(batch: int, length: int) -> UsageError:
    return UsageError(
        f"begin_at(batch={batch}) is behind the end of the epoch, which has {length} batches.",
        fix="give the loader the dataset and batch size of the training that is continued, or begin at the "
        "next epoch: begin_at(epoch=...).",
    )
