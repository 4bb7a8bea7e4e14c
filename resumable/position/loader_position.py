"""Keeps the place of each loader in its epoch: which batches are done, in hand, or loaded ahead."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from typing import Any

from ..errors import UsageError
from ..loaders.source import LoaderGenerators, Source
from .loaded_batches import Counters, InHand, Loaded, OpenLoop, Phase, StepCounted, ThroughDraws
from .script.habits import Habits

_OVER = (Phase.OVER, Phase.PASSED)


class EpochPlace:
    """How far the training has come in one epoch of a loader."""

    def __init__(self, training: Counters) -> None:
        self.training = training
        self.habits = Habits()
        self.phase = Phase.DUE
        self.done = 0
        """Batches of this epoch that were trained."""
        self.in_hand: InHand | None = None
        self.ahead: deque[Loaded] = deque()
        """The batches that were loaded and not handed to the training."""
        self.ended_at: int | None = None
        """The number of batches in the last epoch that came to its end."""
        self.opened = 0
        """The number of its loop, of all loaders, in the order of their first batches; 0 before that."""
        self.is_awaited = False
        """Whether the loop was open at the checkpoint, and has not been opened again yet."""
        self.is_beside = False
        """Whether the loop in which it was asked has ended, and it was not asked since."""
        self.step_counted: StepCounted | None = None
        """Counts the batches by steps, where another thread loops over them."""
        self._mark: Any = None
        """The source's mark after the batch that was handed out last."""
        self._left_under: BaseException | None = None
        """The exception that was being handled around the loop that was left."""
        self._is_put_off = False
        """Whether the batch that was in hand when the loop was left is the first that is ahead."""

    @property
    def is_over(self) -> bool:
        """Whether this epoch has no more batches, or was left for good."""
        return self.phase in _OVER

    def is_under_way(self) -> bool:
        """Whether the epoch's batches have begun and not ended."""
        # A break shows only later, when no exception is being handled.
        if self.phase is Phase.LEFT and not self.is_interrupted():
            self.phase, self._left_under = Phase.OVER, None
        return self.phase not in _OVER and (self.in_hand is not None or self.done > 0)

    def is_through(self) -> bool:
        """Whether looping over the batches again would be another epoch."""
        return not self.is_under_way() and self.phase is Phase.OVER

    def is_interrupted(self) -> bool:
        """Whether an exception that left the loop is being handled right now."""
        is_left = self.phase in (Phase.LEFT, Phase.KEPT)
        return is_left and sys.exc_info()[1] not in (None, self._left_under)

    def is_put_off(self) -> bool:
        """Whether an exception has left the loop before the batch in hand was trained."""
        return self._is_put_off and self.phase is Phase.KEPT

    def reached(self) -> int:
        """Return the batches of this epoch that are done; one in hand counts as done."""
        return self.done + (self.in_hand is not None)

    def pass_by(self) -> None:
        """Make the next loop in this epoch empty if no batch is left."""
        if self.is_over:
            self.phase = Phase.PASSED
        self.is_awaited = self.is_under_way()

    def other_ended(self, opened: int) -> None:
        """Note that another loop has ended; one that was asked in its bodies has ended with it."""
        self.is_beside |= not 0 < self.opened <= opened

    def hand_out(self) -> None:
        """Note that the training has the oldest batch that was loaded."""
        loaded = self.ahead.popleft()
        hand = self.in_hand = InHand(loaded.size, self._mark, loaded.draws, self.training.updates)
        self._mark = loaded.mark
        # An iterator may be made long before the loop that asks it.
        self.opened = self.opened or self.training.next_opened()
        hand.is_step = self.training.handed_out(self, loaded.digest)

    def take_back(self) -> None:
        """Note that the training is through with the batch in hand."""
        hand, self.in_hand = self.in_hand, None
        assert hand
        self.done += 1
        self.training.count_batch(self.done, hand)

    def expect_no_more(self) -> None:
        """Note that the training has the last batch, and does not ask for another."""
        if self.in_hand is not None:
            self.in_hand.is_last = True

    def finish(self) -> None:
        """Note that no batches are left."""
        self.phase = Phase.OVER

    def stepped(self) -> None:
        """Note that the optimizer has made a step."""
        if self.in_hand is not None and self.in_hand.is_last:
            self.take_back()
            self.finish()
        if self.step_counted is not None:
            self.step_counted.stepped()

    def count_as_step(self, *, is_step: bool) -> None:
        """Count the batch in hand as a step, or not."""
        if self.in_hand is not None:
            self.in_hand.is_step = is_step

    def leave(self, outer: BaseException | None) -> None:
        """Note that the loop was left in the middle: for good by a break, or by an exception."""
        if hand := self.in_hand:
            is_trained = not self.training.counts_steps or self.training.updates > hand.updates
            if is_trained or self._mark is None:
                self.take_back()
            else:
                self.ahead.appendleft(Loaded(hand.size, self._mark, draws=hand.draws))
                self._mark, self.in_hand, self._is_put_off = hand.before, None, True
        self._left_under, self.phase = outer, Phase.LEFT

    def refuse_to_leave_out(self) -> None:
        """Raise UsageError where it is unknown which batch is in hand."""
        if self.step_counted is not None:
            self.step_counted.refuse_to_leave_out()
        if self.is_put_off():
            raise UsageError(
                "the loops have been left, with a batch in hand that was not trained.",
                fix="go back in the body of the loop over state.batches(), where the batch is in hand.",
            )

    def leave_out(self) -> None:
        """Let the batch in hand count as done without having been trained."""
        if self._is_put_off and self.ahead:
            self._mark = self.ahead.popleft().mark
            self.done += 1
            self.training.count_batch(self.done, InHand(0, None, None, 0))
        self._is_put_off = False
        if self.in_hand is None:
            return
        self.in_hand.leave_out()
        if self.in_hand.is_last:
            self.take_back()
            self.finish()


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
        self.is_claimed = False
        """Whether `batches()` was called with this iterable, and the loop has not begun."""
        self.lock = threading.RLock()
        self._moving = threading.Lock()
        self._loop: weakref.ref[OpenLoop] | None = None
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
            is_mid_epoch = self.training.is_mid_epoch()
            # The state_dict() of another loader's dataset may have made generators since.
            is_searched = is_searched and self.training.has_one_loader()
            under_way = is_mid_epoch and self.is_under_way()
            return {
                "batch": self.reached() if under_way else 0,
                "is_asked_by_hand": self.habits.is_asked_by_hand,
                "is_open": (self.is_open or self.is_awaited) and is_mid_epoch,
                "is_over": self.is_over and is_mid_epoch,
                "generators": self.generators.collect(is_searched=is_searched),
                "ahead_draws": [loaded.draws for loaded in self.ahead] if under_way else [],
                "settings": self.source.settings(),
                "source": self._collect_source(under_way),
                **({"prepared": self.prepared.collect(is_under_way=under_way)} if self.prepared else {}),
            }

    def _collect_source(self, under_way: bool) -> dict[str, Any]:
        if not under_way:
            # In a loop that was left for good, every batch that was loaded counts.
            return self.source.collect(None, [], under_way)
        if self._unread is not None:
            return dict(self._unread)
        return self.source.collect(self._mark, [loaded.mark for loaded in self.ahead], under_way)

    def restore(self, saved: Mapping[str, Any], unfit: AbstractSet[str]) -> None:
        """Restore what `collect` returned; `unfit` settings have changed since."""
        self.rewind()
        self.done = saved["batch"]
        self.is_awaited = bool(saved.get("is_open", self.done))
        self.habits.resumed(is_asked_by_hand=saved.get("is_asked_by_hand", False))
        self.draws.restore(saved.get("ahead_draws", []))
        self.phase = Phase.PASSED if saved["is_over"] else Phase.DUE
        if self.prepared and "prepared" in saved:
            self.prepared.restore(saved["prepared"])
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

    def open(self, *, loads_ahead: bool, step_counted: StepCounted | None = None) -> Iterator[Any]:
        """Return the rest of the batches, as the source yields them."""
        self.step_counted = step_counted
        continues = bool(self.done) or self.is_awaited
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

    def began(self, loop: OpenLoop) -> None:
        """Note that a loop over the batches has begun."""
        self.opened, self._loop = 0, weakref.ref(loop)

    def ask_ahead(self) -> None:
        """Note that from now on a batch is requested before the one in hand is trained."""
        self._has_marks = True
        self.source.load_ahead()

    def end(self) -> None:
        """Note that the loop has come to the end of the batches."""
        self.finish()
        self._loop, self.ended_at = None, self.done
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
        self.done, self._left_under = 0, None
        self._is_put_off = self.is_awaited = self.is_beside = False
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
        if self.in_hand is not None:
            self.take_back()
        if (streams := self.training.streams).is_put_back_due:
            streams.put_back()
        self.is_beside = False
        if self.phase is Phase.LEFT:
            self.phase, self._left_under = Phase.DUE, None
        if self._has_failed:
            self._has_failed = False
            self.done += self.source.forgive()

    def load(self, batches: Iterator[Any], lap: int) -> Any:
        """Load the next batch, for the training to have it later."""
        with self.lock:
            if self.draws.live is not None:
                self.draws.catch_up()
            self._unread = None
            try:
                batch = next(batches)
            except Exception:
                self._has_failed = True
                raise
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
