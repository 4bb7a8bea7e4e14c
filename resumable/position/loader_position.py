"""Where each loader stands in its epoch, and what a checkpoint has of it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from typing import Any, Protocol

from ..errors import UsageError
from ..loaders.source import Source, WithoutWorkers
from .epoch import settings_diff
from .epoch.epoch_place import EpochPlace, Loaded, Phase, StepCounted, Training
from .epoch.loader_generators import LoaderGenerators, ThroughDraws


class OpenLoop(Protocol):
    """A loop over the batches that has begun."""

    def abandon(self) -> None:
        """Give no more batches: the loader was put elsewhere."""


class LoaderPosition(EpochPlace):
    """Where one loader stands in its epoch, and what a checkpoint has of it."""

    def __init__(self, source: Source, training: Training) -> None:
        super().__init__(training)
        self.source = source
        self.generators = LoaderGenerators(source)
        self.draws = ThroughDraws(training.streams)
        self.lap = 0
        """Counts how often the loader was put elsewhere: a loop of an earlier lap is dead."""
        self.is_claimed = False
        """Whether `batches()` was called with this iterable, and the loop has not begun."""
        self.lock = threading.RLock()
        self._moving = threading.Lock()
        self._loop: weakref.ref[OpenLoop] | None = None
        self._has_marks = self._has_failed = False
        """Whether the source is asked for a mark with each batch, and whether one could not be loaded."""
        self._unread: Mapping[str, Any] | None = None
        """Where the source stands after a resume, until a batch is loaded."""

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

    # What a checkpoint has.

    def collect(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        with self.lock:
            is_mid_epoch = self.training.is_mid_epoch()
            under_way = is_mid_epoch and self.is_under_way()
            return {
                "batch": self.reached() if under_way else 0,
                "is_asked_by_hand": self.habits.is_asked_by_hand,
                "is_open": (self.is_open or self.is_awaited) and is_mid_epoch,
                "is_over": self.is_over and is_mid_epoch,
                "generators": self.generators.collect(),
                "ahead_draws": [loaded.draws for loaded in self.ahead] if under_way else [],
                "settings": self.source.settings(),
                "source": self._collect_source(under_way),
            }

    def _collect_source(self, under_way: bool) -> dict[str, Any]:
        if not under_way:
            # What was left for good counts as far as it was loaded.
            return self.source.collect(None, [], under_way)
        if self._unread is not None:
            return dict(self._unread)
        return self.source.collect(self._mark, [loaded.mark for loaded in self.ahead], under_way)

    def differences(self, saved: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield the changes that make a position in mid-epoch meaningless."""
        return settings_diff.differences(self.source, saved)

    def resized(self, saved: Mapping[str, Any], then: int, now: int) -> Iterator[str]:
        """Yield that the rest of the epoch cannot be divided among another number of processes."""
        return settings_diff.resized(self.source, saved, then, now)

    def restore(self, saved: Mapping[str, Any], unfit: AbstractSet[str]) -> None:
        """Restore what `collect` returned; `unfit` settings have changed since."""
        self.rewind()
        self.done = saved["batch"]
        self.is_awaited = bool(saved.get("is_open", self.done))
        self.habits.resumed(is_asked_by_hand=saved.get("is_asked_by_hand", False))
        self.draws.restore(saved.get("ahead_draws", []))
        self.phase = Phase.PASSED if saved["is_over"] else Phase.DUE
        self.source.restore(saved["source"], unfit & saved["settings"].keys())
        self.generators.restore(saved["generators"])

    # Where the loops over the batches begin and end.

    def continue_with(self, iterable: Any) -> None:
        """Loop over this iterable from now on: a script may make it again for every epoch."""
        assert isinstance(self.source, WithoutWorkers)
        self.source.replace(iterable)
        self.generators.forget()

    def claim(self) -> None:
        """Note that `batches()` was called with this iterable."""
        self.is_claimed = True

    def may_loop(self) -> bool:
        """Return False where a resume has passed all batches by; raise UsageError where no loop may begin."""
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
        """Note that from here on a batch is asked for before the one in hand is trained."""
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


class LoaderSet:
    """The loaders that were given, and the iterables that were looped over without having been given."""

    def __init__(self, make: Callable[[str, Any], LoaderPosition]) -> None:
        """`make`: returns where a new loader stands; it gets a name and the loader."""
        self._make = make
        self.given: dict[str, LoaderPosition] = {}
        self.found: dict[str, LoaderPosition] = {}
        """The iterables, by their names."""
        self.all: list[LoaderPosition] = []
        """Where all of them stand."""
        self._found_before: Mapping[str, Any] = {}
        """Where the iterables of the checkpoint stood."""

    def give(self, name: str, loader: Any) -> LoaderPosition:
        """Add a loader that was given to RunState; return where it stands."""
        return self._add(self.given, name, loader)

    def _add(self, to: dict[str, LoaderPosition], name: str, loader: Any) -> LoaderPosition:
        to[name] = at = self._make(name, loader)
        self.all.append(at)
        return at

    def at(self, name: str) -> LoaderPosition:
        """Return the position of a loader, by its name."""
        return self.given.get(name) or self.found[name]

    def find(self, iterable: Any, *, is_in_epochs: bool) -> str:
        """Return the name of an iterable, and know it from now on."""
        kind = getattr(iterable, "__name__", type(iterable).__name__)
        name, number = kind, 1
        while name in self.found and not _can_be(self.found[name], iterable, is_in_epochs):
            number += 1
            name = f"{kind}-{number}"
        if name in self.found:
            self.found[name].continue_with(iterable)
        else:
            at = self._add(self.found, name, iterable)
            if name in self._found_before:
                at.restore(self._found_before[name], set())
        self.found[name].claim()
        return name

    def restore_found(self, saved: Mapping[str, Any], unfit: AbstractSet[str]) -> None:
        """Restore the positions of the iterables; those that are `unfit` begin again."""
        self._found_before = {name: at for name, at in saved.items() if name not in unfit}
        for name, at in self.found.items():
            at.rewind()
            if name in self._found_before:
                at.restore(self._found_before[name], set())

    def in_hand(self) -> list[LoaderPosition]:
        """Return those that have a batch in hand, the outermost loop first."""
        return sorted((at for at in self.all if at.in_hand is not None), key=lambda at: at.opened)

    def is_training(self) -> bool:
        """Whether a batch of any of them is in hand."""
        return any(at.in_hand is not None for at in self.all)

    def is_under_way(self) -> bool:
        """Whether the batches of any of them have begun and not ended."""
        return any(at.is_under_way() for at in self.all)

    def is_awaited(self) -> bool:
        """Whether a loop that was open where the training continues is to be opened again."""
        unseen = self._found_before.keys() - self.found.keys()
        return any(at.is_awaited for at in self.all) or any(
            self._found_before[name].get("is_open") for name in unseen
        )

    def is_outermost(self, place: EpochPlace) -> bool:
        """Whether no other loop over batches is around this one."""
        return not any(other.in_hand and other.opened < place.opened for other in self.all)

    def is_in_inner_loop(self) -> bool:
        """Whether a loop over batches runs in the body of one over those of another loader."""
        in_hand = [at.habits for at in self.in_hand()]
        # zip() asks for all of them at one place.
        return (
            len(in_hand) > 1
            and not in_hand[-1].is_asked_by_hand
            and in_hand[-1].asked_at != in_hand[0].asked_at
        )


def _can_be(at: LoaderPosition, iterable: Any, is_in_epochs: bool) -> bool:
    # The same one, or one that the script makes again for every epoch.
    is_over = at.is_over and is_in_epochs
    return at.source.loader is iterable or not (at.in_hand or at.is_claimed or is_over)
