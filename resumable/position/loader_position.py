"""Where one loader stands in its epoch, and the loop over what is left of it."""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import cycle, islice
from types import FrameType
from typing import Any, Protocol

from ..errors import Once, UsageError, warn
from ..loaders import rng
from ..loaders.sources import PlainSource, Source
from . import iteration
from .running_sums import RunningSums

Hook = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Hooks:
    """What is called around a loop over batches, and after each body."""

    begin: Hook
    body_ended: Hook
    end: Hook


Through = Callable[[Iterator[Any]], Any]
"""What makes an iterable of the same batches, such as a thread that loads them ahead."""


class Counters(Protocol):
    """What `LoaderPosition` needs of the position as a whole."""

    batch: int
    step: int
    updates: int
    samples: int
    counts_steps: bool
    processes: int
    digest: Callable[[Any], Any] | None
    sums: RunningSums
    once: Once

    def progress(self) -> object:
        """Return what changes with every step and every gradient; None if nobody knows."""

    def hold(self) -> None:
        """Remember the random generators for where the loops go on."""

    def put_back(self) -> None:
        """Put the random generators back as they were held."""

    def reopened(self) -> None:
        """Put them back if all loops over batches that were open are open again."""

    def batches_ended(self, ended: LoaderPosition) -> None:
        """Note that the loop over a loader's batches has ended."""

    def as_held(self) -> AbstractContextManager[None]:
        """Return a context in which the generators stand where the loops go on."""

    def is_saved_body(self) -> bool:
        """Whether `save()` was called in the body that is running."""

    def is_training(self) -> bool:
        """Whether a batch of any loader is in hand."""

    def handed_out(self, batch: int, digest: Any) -> None:
        """Note that a batch is in hand, and its digest if there is a trace."""

    def read_draws(self) -> Any:
        """Return the states of the generators that the script's own code draws from."""

    def write_draws(self, states: Any) -> None:
        """Put them into these states."""

    def is_in_batches(self) -> bool:
        """Whether the end of a batch is a boundary: not in a body of `steps()`, nor of another loader."""

    def next_opened(self) -> int:
        """Return what tells which of several loops has handed out its first batch first."""

    def is_step(self, loader: LoaderPosition) -> bool:
        """Whether the batch in hand of this loader is a step, where no optimizer tells of its steps."""

    def is_mid_epoch(self) -> bool:
        """Whether a checkpoint taken now stands between two batches of an epoch."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A batch that was loaded: how large it is, and where the loader stands with it."""

    size: int
    mark: Any
    digest: Any = None
    """Where there is a trace."""
    draws: Any = None
    """What through= draws from for this batch."""


class LoaderPosition:
    """Where one loader stands in its epoch."""

    def __init__(self, source: Source, counters: Counters) -> None:
        self.source = source
        self.done = 0
        """Batches of this epoch that were trained."""
        self.in_hand = False
        self.size_in_hand = 0
        self.is_step = False
        """Whether the batch in hand counts as a step when it is done."""
        self.is_over = False
        """Whether this epoch's batches have come to their end, or were left for good."""
        self.ended_at: int | None = None
        """How many batches the last epoch had that came to its end."""
        self.lap = 0
        """How often the loader has been put somewhere else: a loop of an earlier lap is dead."""
        self.opened = 0
        """Which loop this is, of all loaders, in the order of their first batches; 0 before that."""
        self.lock = threading.RLock()
        self._moving = threading.Lock()
        self.ahead: deque[Loaded] = deque()
        """What was loaded and has not been handed to the training."""
        self.counts_by_steps = False
        """Whether another thread loops over the batches: one counts when the optimizer steps."""
        self.ends_with_step = False
        """Whether the training has the last batch, and nobody will ask for another."""
        self.keeps_draws = False
        """Whether code of the script's, given as through=, may draw for a batch that is ahead."""
        self._ahead_draws: deque[Any] = deque()
        self._live: Any = None
        self._draws_in_hand: Any = None
        self._thread = 0
        self._counters = counters
        self._mark: Any = None
        self._unread: Mapping[str, Any] | None = None
        """Where the source stands after a resume, until a batch is loaded."""
        self._late: dict[str, Any] = {}
        """The generators that the source makes again as it is opened."""
        self._mark_before: Any = None
        self._updates_then = 0
        self._over_at_resume = False
        self.is_awaited = False
        """Whether its loop was open where the training goes on, and is to be opened again."""
        self.is_beside = False
        """Whether the loop in which it was asked has ended, and it was not asked since."""
        self._is_looked_at = False
        self.is_asked_by_hand = False
        """Whether the script calls next() itself, and does not loop with for."""
        self.asked_at: object = None
        """Where in the script the loop stands."""
        self._is_left_after_save = self._has_ended_untrained = False
        # The exception that was being handled around the loop, once the loop has been left.
        self._left_under: tuple[BaseException | None] | None = None
        self._stays = self._has_ended = self.is_claimed = self.is_open = False
        self._loop: weakref.ref[_Loop] | None = None
        # Whether the batch that was in hand when the loop was left is the first that is ahead.
        self._is_put_off = False

    @property
    def sums(self) -> RunningSums:
        """The variables of the script that a resumed epoch sums up in."""
        return self._counters.sums

    def is_under_way(self) -> bool:
        """Whether the epoch's batches have begun and not ended."""
        self._settle()
        return not self.is_over and (self.in_hand or self.done > 0)

    def _settle(self) -> None:
        # Whether a loop was left by a break shows only later, when no exception is being handled:
        # then the script is through with this epoch's batches.
        if self._left_under and not self._stays and not self.is_interrupted():
            self._left_under, self.is_over = None, True

    def length(self) -> int | None:
        """Return how many batches an epoch has, if the loader knows."""
        try:
            return len(self.source)
        except TypeError:
            return None

    def is_through(self) -> bool:
        """Whether looping over the batches again would be another epoch."""
        return not self.is_under_way() and self.is_over and not self._over_at_resume

    def stay(self) -> None:
        """Stay in mid-epoch: the body of epochs() was left too, so the loop was not left for good."""
        if self.in_hand:
            self.leave(None)
        if self._left_under:
            with self.lock:
                # The loop that goes on opens the loader where it stands now.
                saved, left_under = self._collect_source(True), self._left_under
                draws = [loaded.draws for loaded in self.ahead]
                self._go_elsewhere()
                self._ahead_draws.extend(draws)
                self._stays, self._left_under = True, left_under
                self.source.restore(saved, set())

    def pass_by(self) -> None:
        """Let whoever loops again in this epoch find no batch, if there is none left."""
        self._over_at_resume |= self.is_over
        self.is_awaited = self.is_under_way()

    def is_interrupted(self) -> bool:
        """Whether an exception that left the loop is being handled right now."""
        return self._left_under is not None and sys.exc_info()[1] not in (None, *self._left_under)

    def collect(self) -> dict[str, Any]:
        """Return the position as a resume is to find it."""
        with self.lock:
            under_way = self.is_under_way() and self._counters.is_mid_epoch()
            return {
                "batch": self.done + self.in_hand if under_way else 0,
                "is_asked_by_hand": self.is_asked_by_hand,
                "is_open": (self.is_open or self.is_awaited) and self._counters.is_mid_epoch(),
                "is_over": self.is_over and self._counters.is_mid_epoch(),
                "generators": {**self._late, **self.read_generators()},
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
        """Yield what makes a position in mid-epoch meaningless."""
        now = self.source.settings()
        for key, then in saved["settings"].items():
            if not saved["batch"] or then == now.get(key):
                continue
            if question := self.source.in_question(key, saved["source"]):
                name, why = question
                text = f"{then} in the checkpoint, {now.get(key)} in the code, in mid-epoch"
                text = f"{text}: {why}" if why else text
                yield name, text if name else f"{key} {text}"
        root = self.source.root()
        is_other_sampler = saved["settings"].get("sampler") != now.get("sampler")
        for path in saved["generators"].keys() ^ rng.find(root).keys():
            if is_other_sampler and (path == "generator" or path.startswith("sampler.")):
                continue
            # Many datasets make theirs at the first sample. Old checkpoints have none that modules have.
            is_in_doubt = path in saved["generators"] or not rng.is_in_module(path)
            if is_in_doubt and (path not in saved["generators"] or not rng.is_free(root, path)):
                yield path, "a random generator in the checkpoint or in the code, but not in both"

    def resized(self, saved: Mapping[str, Any], then: int, now: int) -> Iterator[str]:
        """Yield that the rest of the epoch cannot be divided among another number of processes."""
        shards = [settings.get("shards", 1) for settings in (saved["settings"], self.source.settings())]
        for count, processes in zip(shards, (then, now), strict=True):
            if saved["batch"] and processes > 1 and count == 1:
                yield (
                    f"in mid-epoch, with {then} processes in the checkpoint and {now} in the code: each of "
                    f"{processes} loads all of the data for itself (no DistributedSampler)"
                )
                return

    def restore(self, saved: Mapping[str, Any], unfit: AbstractSet[str]) -> None:
        """Stand where `collect` stood; `unfit` settings have changed since."""
        self.rewind()
        self.done = saved["batch"]
        self.is_awaited = bool(saved.get("is_open", self.done))
        self.is_asked_by_hand = saved.get("is_asked_by_hand", False)
        self._ahead_draws.extend(saved.get("ahead_draws", []))
        self.is_over = self._over_at_resume = saved["is_over"]
        self.source.restore(saved["source"], unfit & saved["settings"].keys())
        self.write_generators(saved["generators"])
        self._late = {path: state for path, state in saved["generators"].items() if self._is_late(path)}

    def warn_of_uncounted(self) -> None:
        """Warn, at an epoch's end, of batches that another thread loaded and that no step was made for."""
        if self.ahead and self._has_ended and self.counts_by_steps:
            warn(
                f"{len(self.ahead)} batches of the epoch were loaded by another thread, and the optimizer "
                f"made no step for them: there a batch counts when the optimizer steps. {_NOT_ONE_TO_ONE}"
            )
        elif self.counts_by_steps and not self._has_ended:
            warn(
                "the epoch ended before another thread had come to the end of its batches: a resume in "
                "mid-epoch does not know which of them were trained. Give the thread to "
                "state.batches(through=...)."
            )

    def warn_of_left_after_save(self) -> None:
        """Warn of a break behind `save()` in the same body: a resume does not know of the break."""
        if self._is_left_after_save:
            self._is_left_after_save = False
            warn(
                "the loop over batches was left right after save() in the same body: a resume from that "
                "checkpoint goes on with the next batch. Call save() after the loop instead, or leave the "
                "loop at the top of a body."
            )

    def warn_of_counted_by_hand(self, once: Once) -> None:
        """Warn of an epoch of which next() took only some batches: the script counts them by itself."""
        if self.is_asked_by_hand and self.is_open and not self.is_over:
            once.warn(
                f"next() took {self.done + self.in_hand} of the epoch's batches. If the script counts them "
                "by itself, that count begins again after a resume in mid-epoch, and the epoch gets more "
                "batches: count by state.batch.",
                about="batches by hand",
            )

    def warn_of_late_step(self) -> None:
        """Warn of a step after all batches were asked for, and nothing was trained on any of them."""
        if self._has_ended_untrained and not self._counters.is_training():
            self._has_ended_untrained = False
            warn(
                "all batches of the epoch were asked for before the first of them was trained (by list(), "
                "say): a checkpoint would count them all as done. Loop over state.batches() itself."
            )

    def look_at_holders(self, loop: Iterator[Any]) -> None:
        """Warn, once, of what counts the batches of a loop by itself: after a resume it begins anew."""
        if self._is_looked_at:
            return
        self._is_looked_at = True
        found = iteration.holders(loop)
        if cut_by := [kind.__name__ for kind in (islice, zip) if kind in found]:
            warn(
                f"the loop over batches is cut by {cut_by[0]}(), which counts from 0 again after a resume in "
                "mid-epoch: that epoch gets more batches. Leave the loop by state.batch instead: "
                "if state.batch >= n: break"
            )
        if cycle in found:
            warn(
                "after a resume, itertools.cycle() repeats only the batches that were loaded since. Give "
                " RunState an iterable that begins again by itself."
            )

    def warn_of_numbers(self, loop: Iterator[Any], asked_by: FrameType) -> None:
        """Warn of an `enumerate` that counts from 0 again where the epoch goes on."""
        wrong = [n for n in iteration.numbers(loop, asked_by) if n not in (self.done, self.done + 1)]
        if wrong:
            warn(
                f"enumerate() counts from {wrong[0]} in an epoch that goes on with batch {self.done}: write "
                "state.enumerate() instead of enumerate(state.batches()). If its number is only shown, "
                "nothing is lost."
            )

    def draws_before_next(self) -> Any:
        """Return where the generators stand as the loop begins; None where batches are no boundaries."""
        return self._counters.read_draws() if self._counters.is_in_batches() else None

    def warn_of_draws_before_next(self, drawn_then: Any) -> None:
        """Warn of draws between the beginning of a loop and its first batch: next() is called by hand."""
        is_boundary = self.is_asked_by_hand and drawn_then and self._counters.is_in_batches()
        if is_boundary and not rng.is_same(drawn_then, self._counters.read_draws()):
            warn(
                "random numbers are drawn before next() is called on the iterator of state.batches(): a save "
                "in the body is exact, but where the loop saves by itself (every=, a signal) it does so in "
                "next(), and a resume draws them again. Draw them after next(), or loop with for."
            )

    def rewind(self) -> None:
        """Stand at the beginning of an epoch."""
        self._go_elsewhere()
        self.done = 0
        self.is_over = self._over_at_resume = self._stays = self._is_put_off = self.is_awaited = False
        self.is_beside = False
        self._is_left_after_save = self._has_ended_untrained = False
        self.source.rewind()

    def _go_elsewhere(self) -> None:
        if loop := self._loop and self._loop():
            # The script may keep it for long, and signals would be noted for a loop that is dead.
            loop.unwatch()
        self.size_in_hand, self.is_step = 0, False
        self.in_hand = self.counts_by_steps = self.ends_with_step = self.is_claimed = False
        self.is_open = False
        self._left_under = self._mark = self._mark_before = self._live = self._unread = None
        self._ahead_draws.clear()
        with self._moving:
            self.ahead.clear()
            self.lap += 1

    def write_generators(self, states: Mapping[str, Any]) -> None:
        """Put the generators that hang off the loader into these states."""
        root = self.source.root()
        found = rng.find(root)
        for path, state in states.items():
            if generator := found.get(path) or (not self._is_late(path) and rng.plant(root, path, state)):
                rng.write(generator, state)

    def _is_late(self, path: str) -> bool:
        # One that is planted is found by the first batch, which would make it, and draw for that.
        return isinstance(self.source, PlainSource) and self.source.makes_again(path)

    def begin_own_streams(self, seed: str) -> None:
        """Begin streams of their own for the generators that hang off the loader."""
        self.source.begin_own_streams()
        for path, generator in rng.find(self.source.root()).items():
            rng.begin_own(generator, f"{seed}/{path}")

    def read_generators(self) -> dict[str, Any]:
        """Return the states of the generators that hang off the loader."""
        return {path: rng.read(found) for path, found in rng.find(self.source.root()).items()}

    def loop(
        self, hooks: Hooks, through: Through | None, loads_ahead: bool, is_elsewhere: bool
    ) -> Iterator[Any]:
        """Return the batches that are left, counting one as done when the next is asked for.

        Elsewhere is another thread than the training's: there one counts when the optimizer steps.
        """
        if self.is_over or self.in_hand:
            self._refuse_to_repeat()
            return _Over(self)
        if self.is_open:
            raise UsageError(
                "two loops over this loader's batches would be on the way at once.",
                fix="give RunState a loader of its own for each: loader={'a': ..., 'b': ...}.",
            )
        if self._is_put_off and not self._stays:
            # It was left before a step, and is entered again in the same body: that batch comes again.
            self.stay()
        self._thread = threading.get_ident()
        self.is_open = not is_elsewhere
        self.counts_by_steps = is_elsewhere
        if is_elsewhere:
            return _Elsewhere(self, self._open(True), through)
        # Before there are workers: they are told of it.
        hooks.begin()
        try:
            self.opened = 0
            loop = _Loop(self, self._open(loads_ahead), hooks, through)
            self._loop = weakref.ref(loop)
            return loop
        except BaseException:
            hooks.end()
            raise

    def _refuse_to_repeat(self) -> None:
        if not self._over_at_resume:
            raise UsageError(
                "this epoch's batches have been looped over already.",
                fix="loop over state.batches() once in each body of state.epochs(); for another pass "
                "over other data use the loader itself, or give it to RunState under a name of its own.",
            )
        self._over_at_resume = False

    def _open(self, loads_ahead: bool) -> Iterator[Any]:
        goes_on = bool(self.done) or self.is_awaited
        if loads_ahead or not goes_on:
            self._counters.put_back()
        self._left_under = None
        self._stays = self._has_ended = self.is_claimed = self._is_put_off = False
        self.source.loads_ahead = loads_ahead
        # Until a batch is loaded, it stands where it stood.
        self._unread = self.source.collect(None, [], True) if self.done else None
        with self._counters.as_held() if self.done else nullcontext():
            batches = self.source.open()
            self.write_generators(self._late)
        self._late = {}
        self._mark = self._marked()
        self.is_awaited = False
        if goes_on and loads_ahead:
            # What is drawn until the first batch is handed out was drawn before.
            self._counters.hold()
        elif goes_on and self.is_asked_by_hand:
            # What is drawn before next() is called is drawn for the batch that is asked for.
            self._counters.reopened()
        return batches

    def load(self, batches: Iterator[Any], lap: int) -> Any:
        """Load a batch that nobody has been handed yet."""
        with self.lock:
            self.catch_up()
            self._unread = None
            batch = next(batches)
            digest = self._counters.digest(batch) if self._counters.digest else None
            loaded = Loaded(self.source.size(batch), self._marked(), digest, self._drawn())
            with self._moving:
                # A thread may have waited for it while the training went elsewhere.
                if lap != self.lap:
                    raise StopIteration
                self.ahead.append(loaded)
            return batch

    def _drawn(self) -> Any:
        """Return what through= draws from for the batch that was just loaded.

        For one that was on its way at a save that is what it drew from then, until the next is asked for.
        """
        if not self.keeps_draws or threading.get_ident() != self._thread:
            return None
        if self._ahead_draws and (draws := self._ahead_draws.popleft()) is not None:
            self._live = self._counters.read_draws()
            self._counters.write_draws(draws)
            return draws
        return self._counters.read_draws()

    def catch_up(self) -> None:
        """Put the generators back after a batch that was on its way at a save."""
        if self._live is not None:
            self._counters.write_draws(self._live)
            self._live = None

    def _marked(self) -> Any:
        return self.source.mark() if self.source.has_cheap_marks or self.source.loads_ahead else None

    def before_batch(self) -> None:
        """Note that the loop asks for a batch: if one has failed, the training goes on without it."""
        self._counters.put_back()
        self._left_under, self.is_beside = None, False
        self.done += self.source.forgive()

    def end_after_ahead(self) -> None:
        """Note that the batches have come to their end, but for those that were loaded ahead."""
        self._has_ended = True
        self.is_over = not self.ahead

    def hand_out(self) -> None:
        """Note that the training has the oldest batch that was loaded."""
        loaded = self.ahead.popleft()
        self._mark_before, self._mark = self._mark, loaded.mark
        self.in_hand, self.size_in_hand, self._draws_in_hand = True, loaded.size, loaded.draws
        # (an iterator may be made long before the loop that it is asked in)
        self.opened = self.opened or self._counters.next_opened()
        self._updates_then = self._counters.updates
        self.is_step = self._counters.is_step(self)
        self._counters.handed_out(self.done, loaded.digest)

    def take_back(self) -> None:
        """Note that the training is through with the batch in hand."""
        self.done += 1
        self._counters.batch = self.done
        self._counters.samples += self.size_in_hand * self._counters.processes
        self._counters.step += self.is_step
        self.in_hand, self.size_in_hand, self.is_step = False, 0, False

    def progress(self) -> object:
        """Return what changes with every step and every gradient; None if nobody knows."""
        return self._counters.progress()

    def stepped(self) -> None:
        """Note that the optimizer has made a step."""
        if self.ends_with_step and self.in_hand:
            self.take_back()
            self.is_over = True
        # (without the lock: the other thread has it for as long as it waits for a batch)
        if self.counts_by_steps and self.ahead:
            self.hand_out()
            self.take_back()
            self.is_over = self._has_ended and not self.ahead
        elif self.counts_by_steps:
            self._counters.once.warn(
                "the optimizer has made more steps than another thread has loaded batches: there a batch "
                f"counts when the optimizer steps. {_NOT_ONE_TO_ONE}",
                about="steps of another thread",
            )

    def refuse_to_leave_out(self) -> None:
        """Raise UsageError where nobody knows which batch is in hand."""
        if self.counts_by_steps and (self.ahead or not self._has_ended):
            raise UsageError(
                "another thread loops over state.batches(), and nobody knows which batch is in hand.",
                fix="give the thread to state.batches(through=...): what comes out of it is in hand.",
            )
        if self._is_put_off and self._stays:
            raise UsageError(
                "the loops have been left, with a batch in hand that was not trained.",
                fix="go back in the body of the loop over state.batches(), where the batch is in hand.",
            )

    def leave_out(self) -> None:
        """Let the batch in hand count as done without having been trained."""
        if self._is_put_off and self.ahead:
            self._mark = self.ahead.popleft().mark
            self.done += 1
            self._counters.batch = self.done
        self._is_put_off = False
        # (a break after it is no reason to train it again)
        self.size_in_hand, self.is_step, self._updates_then = 0, False, -1
        if self.in_hand and self.ends_with_step:
            # Nobody will ask for another one.
            self.take_back()
            self.is_over = True

    def end(self, progress_then: object) -> None:
        """Note that the batches have come to their end, and what `progress` was before the first."""
        self._has_ended_untrained = self.done > 1 and progress_then is not None
        self._has_ended_untrained &= progress_then == self.progress()
        self._counters.batches_ended(self)

    def left(self, *, has_asked: bool) -> None:
        """Note that the loop was left before its end, or before its first batch."""
        if not has_asked:
            self._counters.put_back()
        self._counters.batches_ended(self)

    def leave(self, outer: BaseException | None) -> None:
        """Note that the loop was left in the middle: for good by a break, or by an exception."""
        if self.in_hand and self._counters.is_saved_body() and self.done + 1 != self.length():
            self._is_left_after_save = True
        is_trained = not self._counters.counts_steps or self._counters.updates > self._updates_then
        if self.in_hand and (is_trained or self._mark is None):
            self.take_back()
        elif self.in_hand:
            left = Loaded(self.size_in_hand, self._mark, draws=self._draws_in_hand)
            self.ahead.appendleft(left)
            self._mark = self._mark_before
            self._is_put_off = True
        self.in_hand, self.size_in_hand = False, 0
        self._left_under = (outer,)


class _Loop:
    """One pass over what is left of an epoch, as the training sees it."""

    def __init__(
        self, at: LoaderPosition, batches: Iterator[Any], hooks: Hooks, through: Through | None
    ) -> None:
        self._at = at
        self._lap = at.lap
        self._hooks = hooks
        self._is_watched = True
        self._outer = sys.exc_info()[1]
        self._is_over = self._is_one_ahead = False
        self._asked_first: tuple[object, object] | None = None
        self._progress_then = at.progress()
        self._drawn_then = None if through else at.draws_before_next()
        self._has_asked = False
        loading = _Loading(at, batches)
        # (most prefetchers fail where there is nothing to give)
        is_at_end = at.done and at.done == at.length()
        self._batches = iter(through(loading)) if through and not is_at_end else loading
        self._can_be_ahead = through is None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        at = self._at
        if self._is_one_ahead or (self._can_be_ahead and self._looks_ahead(sys._getframe(1))):
            return self._next_ahead()
        if at.in_hand and self._lap == at.lap and not self._is_over:
            try:
                self._hooks.body_ended()
            except BaseException:
                # Whoever loops on after it must not be handed this batch a second time.
                at.take_back()
                at.leave(self._outer)
                raise
            at.take_back()
        if self._lap != at.lap or self._is_over:
            self.unwatch()
            raise StopIteration
        if not self._has_asked:
            self._has_asked = True
            at.look_at_holders(self)
            asked_by = sys._getframe(1)
            at.sums.begin(asked_by, is_over=False)
            if at.done:
                at.warn_of_numbers(self, asked_by)
            at.is_asked_by_hand = self._can_be_ahead and iteration.is_call(asked_by)
            at.asked_at = asked_by.f_code, asked_by.f_lasti
            at.warn_of_draws_before_next(self._drawn_then)
            self._drawn_then = None
        elif at.sums.is_looking:
            at.sums.go_on(sys._getframe(1))
        at.before_batch()
        try:
            batch = next(self._batches)
            at.catch_up()
        except StopIteration:
            at.catch_up()
            self._is_over = at.is_over = True
            at.sums.end()
            at.is_open, at.ended_at = False, at.done
            at.end(self._progress_then)
            self.unwatch()
            if at.ahead:
                raise UsageError(
                    f"through= has kept {len(at.ahead)} of the batches that it was given.",
                    fix="let it give each batch that it gets once, in the same order.",
                ) from None
            raise
        except BaseException:
            at.leave(self._outer)
            raise
        if not at.ahead:
            raise UsageError(
                "through= has made more batches than it was given.",
                fix="let it give each batch that it gets once, in the same order.",
            )
        at.hand_out()
        return batch

    def _looks_ahead(self, asked_by: FrameType) -> bool:
        """Whether the second batch is asked for elsewhere than the first, and nothing was done in between.

        That is the usual stream prefetcher, an object that is always one batch ahead.
        """
        progress = self._at.progress()
        # What tells the calls apart, and not the frame: that would keep the loop, and its workers, alive.
        call = id(asked_by), asked_by.f_code, asked_by.f_back and asked_by.f_back.f_code
        if self._asked_first is None:
            self._asked_first = call, progress
            return False
        (first, then), self._can_be_ahead, self._asked_first = self._asked_first, False, None
        is_untrained = progress is not None and progress == then
        self._is_one_ahead = first != call and is_untrained
        if first == call and is_untrained:
            _warn_of_generator(asked_by)
        return self._is_one_ahead

    def _next_ahead(self) -> Any:
        at = self._at
        if self._lap != at.lap or self._is_over:
            self.unwatch()
            raise StopIteration
        if not at.source.loads_ahead:
            at.source.loads_ahead = True
        elif at.ahead:
            self._hooks.body_ended()
            at.take_back()
            at.hand_out()
        try:
            return next(self._batches)
        except StopIteration:
            self._is_over = at.ends_with_step = True
            raise

    def numbered(self, start: int, batch: Any) -> tuple[int, Any]:
        """Return the batch that was just handed out, with its index in the epoch, counted from `start`."""
        at = self._at
        return start + at.done + (len(at.ahead) if self._is_one_ahead else 0), batch

    def close(self) -> None:
        """Leave the loop."""
        if self._lap == self._at.lap and not self._is_over:
            self._is_over, self._at.is_open = True, False
            self._at.leave(self._outer)
            self._at.left(has_asked=self._has_asked)
        self.unwatch()

    def unwatch(self) -> None:
        """Let nobody wait for this loop's end any more; a second time changes nothing."""
        if self._is_watched:
            self._is_watched = False
            self._hooks.end()

    def __del__(self) -> None:
        # A loop that is left drops its iterator; at the interpreter's end there is nobody to tell.
        if not sys.is_finalizing():
            self.close()


def _warn_of_generator(asked_by: FrameType) -> None:
    """Warn of a generator that has asked for two batches, and nothing was trained on the first."""
    code, module = asked_by.f_code, str(asked_by.f_globals.get("__name__"))
    is_harmless = module.partition(".")[0] in ("tqdm", "rich") or code.co_name == "<genexpr>"
    if code.co_flags & inspect.CO_GENERATOR and not is_harmless:
        warn(
            f"{code.co_name}() has asked for two batches, and nothing was trained on the first. If it looks "
            "one batch ahead, a resume leaves a batch out: hand it to "
            f"state.batches(through={code.co_name}). If the script only skips the first one, nothing is lost."
        )


_NOT_ONE_TO_ONE = "Where that is not one to one, give the thread to state.batches(through=...)."


class _Over:
    """No batches: the epoch's were over when the training was resumed."""

    def __init__(self, at: LoaderPosition) -> None:
        self._at = at

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._at.sums.begin(sys._getframe(1), is_over=True)
        raise StopIteration

    def numbered(self, start: int, batch: Any) -> tuple[int, Any]:
        """Return a batch with its index; never called."""
        return start, batch


class _Loading:
    """The loader's batches, each noted as it is loaded."""

    def __init__(self, at: LoaderPosition, batches: Iterator[Any]) -> None:
        self._at = at
        self._lap = at.lap
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        # A thread may still ask for more when the training has long gone elsewhere.
        if self._lap != self._at.lap:
            raise StopIteration
        return self._at.load(self._batches, self._lap)


class _Elsewhere:
    """The same for a thread that nobody knows of: the training gets its batches later."""

    def __init__(self, at: LoaderPosition, batches: Iterator[Any], through: Through | None) -> None:
        self._at = at
        self._lap = at.lap
        self._index = at.done - 1
        loading = _Loading(at, batches)
        self._batches = iter(through(loading)) if through else loading

    def __iter__(self) -> Iterator[Any]:
        return self

    def numbered(self, start: int, batch: Any) -> tuple[int, Any]:
        """Return the batch that was just handed out, with its index in the epoch, counted from `start`."""
        self._index += 1
        return start + self._index, batch

    def __next__(self) -> Any:
        with self._at.lock:
            self._at.before_batch()
            try:
                return next(self._batches)
            except StopIteration:
                if self._lap == self._at.lap:
                    self._at.end_after_ahead()
                raise
