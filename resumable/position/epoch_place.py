"""How far a training has come in one epoch of a loader."""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

from ..errors import UsageError
from .habits import Habits
from .loaded_batches import Counters, InHand, Loaded, Phase, StepCounted

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
        self.is_endless = False
        """Whether its passes go on over the ends of epochs: the script keeps its iterator for longer."""
        self.step_counted: StepCounted | None = None
        """Counts the batches by steps, where another thread loops over them."""
        self._mark: Any = None
        """The source's mark after the batch that was handed out last."""
        self._left_under: BaseException | None = None
        """The exception that was being handled around the loop that was left."""
        self._was_left = False
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

    def was_left(self) -> bool:
        """Whether this epoch's batches were left in the middle, and the epoch does not go on with them."""
        return self._was_left and self.phase is not Phase.KEPT

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

    def rank(self) -> tuple[bool, int]:
        """Return a key that is smaller for the outer of two loops."""
        return self.is_endless, self.opened

    def other_ended(self, ended: EpochPlace) -> None:
        """Note that another loop has ended; one that was asked in its bodies has ended with it."""
        self.is_beside |= not self.opened or self.rank() > ended.rank()

    def hand_out(self) -> None:
        """Note that the training has the oldest batch that was loaded."""
        loaded = self.ahead.popleft()
        self.in_hand = InHand(loaded.size, self._mark, loaded.draws, self.training.updates)
        self._mark = loaded.mark
        self.begin_body(loaded.digest)

    def begin_body(self, digest: Any) -> None:
        """Note that the training works on the batch in hand from now on."""
        training, hand = self.training, self.in_hand
        assert hand
        # An iterator may be made long before the loop that asks it.
        self.opened = self.opened or training.next_opened()
        hand.is_step = training.handed_out(self, digest)

    def take_back(self) -> None:
        """Note that the training is through with the batch in hand."""
        hand, self.in_hand = self.in_hand, None
        assert hand
        self.done += 1
        self.training.count_batch(self, hand)

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
        self._left_under, self.phase, self._was_left = outer, Phase.LEFT, True

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
            self.training.count_batch(self, InHand(0, None, None, 0))
        self._is_put_off = False
        if self.in_hand is None:
            return
        self.in_hand.leave_out()
        if self.in_hand.is_last:
            self.take_back()
            self.finish()
