"""The counters of a training, and what a boundary between two bodies means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..boundary import Boundary
from ..errors import Once, UsageError
from .epoch_place import EpochPlace
from .loaded_batches import BatchDigests, InHand
from .loader_position import LoaderPosition
from .loader_set import LoaderSet
from .means import Means
from .random_streams import Streams

_STEP = Boundary.STEP
"""Until Python 3.12, looking up a member in its class takes longer than most of what asks for it."""


class End(NamedTuple):
    """The end of a body, at which the loops may save."""

    step: int
    epoch: int
    batches: LoaderPosition | None = None
    """The loader whose batch ends, in a body of `epochs()`."""

    @property
    def is_rest_next(self) -> bool:
        """Whether the rest of the epoch's body comes next, as far as the loader knows."""
        return self.batches is not None and self.batches.is_before_rest()


class TrainingCounters:
    """The counters of a training, advanced by the bodies of its loops."""

    def __init__(self, streams: Streams, loaders: LoaderSet, processes: int) -> None:
        self.streams = streams
        self.processes = processes
        self.epoch = 0
        self.batch = 0
        self.step = 0
        self.updates = 0
        """Steps that the first optimizer has made in this process."""
        self.all_updates = 0
        """Steps that all optimizers have made in this process."""
        self.samples = 0
        self.means = Means()
        """The running means of the current epoch."""
        self.counts_steps = False
        """Whether a hook counts the optimizer's steps here."""
        self.gradients: Callable[[], object] | None = None
        """Returns a value that changes with every gradient that the optimizers have."""
        self.handed = BatchDigests()
        """The digests of the batches for an observer."""
        self.once = Once()
        self._body: Boundary | None = None
        """The kind of the body that is running."""
        self.loops_begun = 0
        """How many loops over batches have begun."""
        self._step_in_hand = self._step_at_start = 0
        self._updates_in_hand = self._work_at_start = 0
        self._has_looped = self._has_saved_end = self._has_left_body = False
        self._has_ended_body = False
        """Whether the body of `epochs()` has ended, and the next epoch has not begun."""
        self._stepped: set[str] | None = None
        """The optimizers that have made a step since the last batch was handed out."""
        self._has_handed_out = False
        """Whether there was a batch since the training was resumed."""
        self._saved_in: Any = None
        """The body in which `save()` was called last."""
        self._known = loaders
        self.loaders = loaders.given
        """The loaders that were given, by name."""

    def boundary(self) -> Boundary:
        """Return the boundary at which a checkpoint taken now would be."""
        if self._has_ended_body:
            return Boundary.EPOCH
        for loader in self._known.all:
            if not loader.is_endless and loader.is_under_way() and not loader.is_beside:
                return Boundary.BATCH
        if self._body is Boundary.STEP:
            return Boundary.STEP
        if self._known.is_over():
            return Boundary.EPOCH
        if self._body is not Boundary.EPOCH:
            return Boundary.OUTSIDE
        if self._has_looped or not self.loaders:
            # The loop was one over steps(), or over data that we do not know.
            return Boundary.EPOCH
        if self.step > self._step_at_start:
            if any(loader.is_endless for loader in self._known.all):
                # A loop of the script's own that calls next() on what it has made before.
                return Boundary.EPOCH
            raise UsageError(
                "the optimizer has made steps in this epoch, but not in a loop over state.batches().",
                fix="loop over state.batches() instead of the loader, or do not give the loader to RunState: "
                "then save() in the body of epochs() means that the epoch is finished.",
            )
        return Boundary.BATCH

    def counters(self) -> dict[str, Any]:
        """Return the counters for a checkpoint: a batch or step in hand counts as done."""
        boundary = self.boundary()
        batch, samples = self.batch, self.samples
        for loader in self._known.all:
            if loader.in_hand:
                batch = batch if loader.is_endless else loader.reached()
                samples += self.processes * loader.in_hand.size
        return {
            "boundary": boundary,
            "epoch": self.epoch + (boundary is Boundary.EPOCH),
            "batch": batch if boundary is Boundary.BATCH else 0,
            "step": self.steps_done(),
            "samples": samples,
        }

    def steps_done(self) -> int:
        """Return the optimizer steps; one in hand counts as done."""
        if self._body is _STEP:
            return self._step_in_hand + 1
        # Plain loops, here and below: a generator would take longer than all that it does, at every batch.
        for at in self._known.all:
            if at.in_hand is not None and at.in_hand.is_step:
                return self.step + 1
        return self.step

    def epochs_done(self) -> int:
        """Return the epochs done; where `epochs()` runs, the one in hand does not count."""
        if self._body is None and not self._has_ended_body and self.boundary() is Boundary.EPOCH:
            return self.epoch + 1
        return self.epoch

    def stands_at(self) -> tuple[int, int, int]:
        """Return epoch, batch and step, for messages."""
        return self.epoch, self.batch, self.step

    def is_training(self) -> bool:
        """Whether a batch of any loader is in hand."""
        return self._known.is_training()

    def is_outside(self) -> bool:
        """Whether no loop of ours is running."""
        return self._body is None and not self._known.is_training()

    def is_left_early(self) -> bool:
        """Whether a loop was left in the middle, so that a save would count what is left of it as done."""
        return self._has_left_body or any(at.was_left() for at in self._known.of_epochs())

    def work(self) -> tuple[int, int, int]:
        """Return numbers that grow with what is trained."""
        if self.counts_steps:
            return self.all_updates, 0, 0
        counters = self.counters()
        return self.all_updates, counters["step"], counters["samples"]

    def has_trained_in_hand(self) -> bool:
        """Whether what is in hand was trained, so that it may count as done."""
        begun = [at.in_hand.updates for at in self._known.all if at.in_hand]
        if self._body is Boundary.STEP:
            begun.append(self._updates_in_hand)
        return bool(begun) and self.counts_steps and self.updates > max(begun)

    def pass_begins(self) -> None:
        """Note that a pass over a loader begins: outside of any other loop it has means of its own."""
        if self.is_outside():
            self.means.begin(self.epoch)

    def is_mid_epoch(self) -> bool:
        """Whether a checkpoint taken now stands between two batches of an epoch."""
        return self.boundary() is Boundary.BATCH

    def has_one_loader(self) -> bool:
        """Whether there is one loader, given or looped over."""
        return len(self._known.all) == 1

    def is_in_batches(self) -> bool:
        """Whether the end of a batch is a boundary: not in a body of `steps()`, nor of another loader."""
        return self._body is not Boundary.STEP and not self._known.is_training()

    def body(self) -> Any:
        """Return a value that is different in every body."""
        in_hand = [(number, at.done) for number, at in enumerate(self._known.all) if at.in_hand]
        return self.epoch, self._step_in_hand, in_hand

    def is_saved_body(self) -> bool:
        """Whether `save()` was called in the running body."""
        return bool(self._saved_in == self.body())

    def _is_step(self, loader: EpochPlace) -> bool:
        """Whether the batch in hand of this loader is a step, where no optimizer reports its steps.

        The batch of an inner loop, or of a loop in a body of `steps()`, is not a step.
        """
        return not self.counts_steps and self._body is not _STEP and self._known.is_outermost(loader)

    def progress(self) -> object:
        """Return a value that changes with every step and every gradient; None if that is unknown."""
        return (self.updates, self.gradients()) if self.gradients and self.counts_steps else None

    def count_step(self, optimizer: str, is_first: bool) -> None:
        """Note that an optimizer has made a step; those of the first are counted."""
        self.streams.note_training(in_loop=False)
        if self._has_saved_end:
            self._warn_of_saved_end()
        if not self._known.is_training():
            if self._body is None:
                self.streams.put_back_late()
            for loader in self._known.all:
                loader.habits.warn_of_late_step()
        self.all_updates += 1
        if is_first:
            for loader in self._known.all:
                loader.stepped()
            self.updates += 1
            # A body of steps() is one step, however many the optimizer makes in it.
            self.step = self.step + 1 if self._body is not _STEP else self._step_in_hand + 1
        self.note_step(optimizer)

    def note_step(self, optimizer: str) -> None:
        """Note that an optimizer has made a step in this body: its gradients are used."""
        if self._stepped is not None:
            self._stepped.add(optimizer)

    def _warn_of_saved_end(self) -> None:
        if self._has_saved_end and self._body is Boundary.EPOCH:
            self._has_saved_end = False
            self.once.warn(
                "save() in the body of epochs() says that the epoch is finished, and the training continues "
                "in it: a resume from that checkpoint begins the next epoch, and leaves out the rest of this "
                "one. Call save() at the end of the body, or loop over the data with state.batches(). [R04]",
                about="what is lost",
            )

    def note_captured(self, is_first: bool) -> None:
        """Note that an optimizer's steps call no hook: if they are what is counted, each batch is a step."""
        if is_first and self.counts_steps:
            self.counts_steps = False
            for loader in self._known.all:
                loader.count_as_step(is_step=self._is_step(loader))

    def next_opened(self) -> int:
        """Return the next number in the order in which loops have handed out their first batch."""
        return 1 + max(at.opened for at in self._known.all)

    def handed_out(self, place: EpochPlace, digest: Any) -> bool:
        """Note that a batch is in hand, with its digest; return whether it counts as a step."""
        if not place.is_endless:
            self.batch = place.done
        self._stepped = set()
        if not self._has_handed_out:
            self._has_handed_out = True
            self.streams.note_training(in_loop=True)
        if self._has_saved_end:
            self._warn_of_saved_end()
        if self.handed.first_body:
            self.handed.body_begins()
        if digest:
            self.handed.add(digest)
        return not self.counts_steps and self._is_step(place)

    def count_batch(self, place: EpochPlace, hand: InHand) -> None:
        """Count a batch of a loader that is done."""
        if not place.is_endless:
            self.batch = place.done
        self.samples += hand.size * self.processes
        self.step += hand.is_step
        if len(self._known.all) > 1:
            # What was asked for in its body ends with it.
            for other in self._known.all:
                if other.in_hand is not None and other.rank() > place.rank():
                    other.take_back()

    def batch_ends(self, at: LoaderPosition) -> tuple[int, int, LoaderPosition | None] | None:
        """Return the values of `End` at the end of a loader's batch; None if that is no boundary.

        It is no boundary in an accumulation window, in a body of `steps()`, of an endless loader, or if the
        loop over another loader, around this one, has its next batch in hand already.
        """
        if self._body is _STEP or (self.counts_steps and not self._stepped) or at.is_endless:
            return None
        if len(self._known.all) > 1 and not self._known.is_outermost(at):
            return None
        step = self.step if self.counts_steps else self.steps_done()
        return (step, self.epoch, at) if self._body else (step, self.epochs_done(), None)

    def batches_ended(self, ended: EpochPlace) -> None:
        """Note that the loop over a loader's batches has ended.

        A loader that was asked in its bodies has ended with it, if it is not asked again. Without
        `epochs()`, the next body begins here.
        """
        for loader in self._known.all:
            # After a resume a generator of the script's may not have opened its loop again.
            if loader.is_open or (loader.is_awaited and loader.opened):
                loader.other_ended(ended)
        if self._body is None and self._known.is_outermost(ended):
            self.streams.end_batches_by_hand()
