"""The random generators of a training, and the states in which a resume restores them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any

from ..boundary import Boundary
from ..errors import warn
from ..loaders.generators import rng
from ..loaders.source import LoaderGenerators
from . import drawing

Hook = Callable[[], None]
Hold = Callable[[], Hook]
"""Remembers some state, and returns a call that restores it."""
States = Mapping[str, Any]


class HeldGenerators:
    """The random generators of a training, as they are and as they are held for where its loops continue."""

    def __init__(self, generators: Mapping[str, rng.Generator]) -> None:
        self._generators = generators
        self._loaders: dict[str, LoaderGenerators] = {}
        self.has_optimizer = False
        """Whether optimizers report their steps: until the first of these, nothing is trained."""
        self.body_start: States | None = None
        """The generators at the start of the body that is running."""
        self.is_put_back_due = False
        """Whether `put_back` may have anything to do."""
        self._hold_settings: Hold | None = None
        """Remembers the small parts."""
        self._hold_gradients: Hold | None = None
        """Remembers the gradients of a resumed window."""
        self._held: States | None = None
        self._put_gradients_back: Hook | None = None
        self._put_settings_back: Hook | None = None
        self._is_in_first_lines = False
        """Whether the body of a loop by hand has begun again, whose batches have not."""
        self._is_closed = False

    def hold_now(self) -> None:
        """Remember the generators, unless those of a checkpoint are held."""
        if self._held is None:
            self.hold()

    def put_back_but(self, drawn: AbstractSet[drawing.Path]) -> None:
        """Restore the held states, except for these generators, from which an order was drawn."""
        if self._held is not None:
            held, now = drawing.flat(self._held), drawing.flat(self.read())
            self._held = drawing.nested({path: now[path] if path in drawn else held[path] for path in held})
        self.put_back()

    def expect_steps(self) -> None:
        """Note that optimizers report their steps."""
        self.has_optimizer = True

    def watch(self, hold_settings: Hold, hold_gradients: Hold) -> None:
        """Remember the settings and the gradients where a body runs a second time."""
        self._hold_settings, self._hold_gradients = hold_settings, hold_gradients

    def add_loader(self, name: str, generators: LoaderGenerators) -> None:
        """Add the generators of a loader."""
        self._loaders[name] = generators

    def read(self) -> dict[str, Any]:
        """Return the states of all generators."""
        return {
            **self.read_draws(),
            "loaders": {name: loader.read() for name, loader in self._loaders.items()},
        }

    def read_draws(self) -> dict[str, Any]:
        """Return the states of the generators that the script's own code draws from."""
        own = {name: rng.read(generator) for name, generator in self._generators.items()}
        return {"global": rng.collect(), "own": own, "loaders": {}}

    def write(self, states: States) -> None:
        """Put all generators into these states."""
        rng.restore(states["global"])
        for name in self._generators.keys() & states["own"].keys():
            rng.write(self._generators[name], states["own"][name])
        for name in self._loaders.keys() & states["loaders"].keys():
            self._loaders[name].write(states["loaders"][name])

    def hold(self) -> None:
        """Remember the generators for the next loop: draws until then do not count."""
        self._held, self._put_gradients_back = None if self._is_closed else self.read(), None
        self.is_put_back_due = True

    def put_back(self) -> None:
        """Restore the held states, and the settings that a body's first lines have changed."""
        if (put_settings_back := self._put_settings_back) is not None:
            self._put_settings_back = None
            put_settings_back()
        if self._held is not None:
            if self._put_gradients_back:
                self._put_gradients_back()
                self._put_gradients_back = None
            self.write(self._held)
            self._held = None
        self._is_in_first_lines = self.is_put_back_due = False

    def is_holding(self) -> bool:
        """Whether they are to be put back, since no body was handed out yet."""
        return self._held is not None

    @contextmanager
    def as_held(self) -> Iterator[None]:
        """Set the generators as they are held, and afterwards restore them."""
        if self._held is None:
            yield
            return
        now = self.read()
        self.write(self._held)
        try:
            yield
            # With other settings than at the checkpoint, a loader may have moved them.
            self._held = self.read()
        finally:
            self.write(now)

    def forget_held(self) -> None:
        """Restore nothing: an epoch begins, and its first body has continued from the restored states."""
        self._held = self._put_settings_back = self._put_gradients_back = None

    def begin_body(self, *, is_second_time: bool) -> None:
        """Begin a body of `epochs()`.

        The first lines of one that is resumed in the middle run for the second time: they draw what they
        drew then, and the loop in the body puts back what they have changed.
        """
        if is_second_time and self.body_start:
            self.write(self.body_start)
            self._put_settings_back = self._hold_settings and self._hold_settings()
            self.is_put_back_due = True
        else:
            self.put_back()
            self.body_start = self.read()

    def forget_body(self) -> None:
        """Forget where the running body began."""
        self.body_start = None

    def close(self) -> None:
        """Restore the generators if a loop by hand had nothing left to do; after this, never again.

        An iterator that the script has kept may end much later, and the generators are another run's then.
        """
        if self._is_in_first_lines:
            self.put_back()
        self.forget_held()
        self._is_closed = True


ENTRIES = ("loop", "read", "load", "start")
"""Where a resume puts the generators back: as a loop begins, at the first read of a counter, in the load.

Until then the script draws what it drew at the first start. "start": nothing had been trained, so the script
draws all of it again.
"""


class Streams(HeldGenerators):
    """The random generators of a training, and their states for a resume."""

    def __init__(self, generators: Mapping[str, rng.Generator]) -> None:
        super().__init__(generators)
        self.has_trained = False
        """Whether a batch was handed out, or a step made, in this process or before."""
        self.has_used_loops = False
        self._entry = "start"
        self.elsewhere: drawing.Elsewhere | None = None
        """The generators as the script has loaded them from the checkpoint of another training."""
        self._at_load: States | None = None
        """The generators as a run began, until its first loop does."""
        self._drawn_from: States | None = None
        """The same, if the script drew random numbers from there before the loop."""
        self._loop_draws = ""
        """A digest of the generators as a loop by hand over batches began."""
        self._has_ended_by_hand = False
        """Whether that loop has ended, and the script has not read a counter since."""
        self._is_read = False
        """Whether the script reads the counters before it trains: a loop of its own begins there."""
        self._first_read: States | None = None
        self._has_drawn_between_reads = False
        self._first_save: States | None = None
        self._loops_begun = 0
        self._loop_ends: list[States | None] = []
        """The generators at the end of each outermost loop; None: the next one began with the same."""
        self._left: tuple[str, int, int] | None = None
        """The loop that was left before its end: its kind, its total, and its number."""

    def collect(self, boundary: Boundary) -> dict[str, Any]:
        """Return the streams' state for a checkpoint."""
        is_in_body = boundary in (Boundary.BATCH, Boundary.STEP)
        if self.entry() == "start":
            self._note_draws_before(self.read())
        return {
            "body_start": self.body_start if is_in_body else None,
            "entry": self.entry(),
            "drawn_from": self._drawn_from,
            "loop_ends": self._loop_ends,
            "loop_draws": self._loop_draws if is_in_body else "",
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore what `collect` returned; checkpoints of older versions lack most of it."""
        self.body_start = saved["body_start"]
        self._entry = saved.get("entry", "load" if saved["boundary"] is Boundary.OUTSIDE else "loop")
        self._is_read |= self._entry == "read"
        self._drawn_from = saved.get("drawn_from") or self._drawn_from
        self._loop_ends = [*saved.get("loop_ends", ())]
        self._loop_draws = saved.get("loop_draws", "")
        self._put_settings_back = None

    def entry(self) -> str:
        """Return which of the `ENTRIES` a checkpoint taken now has."""
        if self._loops_begun:
            return "loop"
        if not self.has_trained and self.elsewhere:
            return "loop"
        if not self.has_trained:
            return "start" if self.has_optimizer else "load"
        return "read" if self._is_read else "loop" if self.has_used_loops else "load"

    def forget(self) -> None:
        """Forget where bodies and the script began: that is another rank's."""
        self.body_start = self._drawn_from = None

    def begin_elsewhere(self) -> None:
        """Note that the generators are those of a training that began without this library."""
        self.elsewhere = drawing.Elsewhere(self._at_load or self._drawn_from, self.read())

    def of_elsewhere(self, *, is_first_epoch: bool) -> dict[str, set[drawing.Path]]:
        """Return what is wrong with drawing an order from generators as they are now."""
        return self.elsewhere.faults(self.body_start, self.read(), is_first_epoch) if self.elsewhere else {}

    def note_training(self, *, in_loop: bool) -> None:
        """Note that the training has begun: a batch was handed out in a loop, or a step was made."""
        self.has_trained = True
        self.has_used_loops |= in_loop

    # At the load, and between it and the loop.

    def begin(self) -> None:
        """Note that a run begins."""
        self._at_load = self.read()

    def go_on(self, before: States) -> None:
        """Hold the generators for the next loop; `before`: as they were before the load."""
        if self._entry == "start":
            if self._drawn_from:
                self.write(self._drawn_from)
            self.begin()
            return
        self.hold()
        self._put_gradients_back = self._hold_gradients and self._hold_gradients()
        if self._entry != "load":
            self.write(self._drawn_from or before)

    def _note_draws_before(self, now: States) -> None:
        if self._at_load is not None and not rng.is_same(self._at_load, now):
            self._drawn_from, self._at_load = self._at_load, None

    def was_read(self, resumed_at: Boundary, *, is_again: bool) -> None:
        """Note that the script reads a counter before it trains: a loop of its own may begin here.

        `is_again`: whether, if it is not the first read, draws since that matter.
        """
        if self._held is not None and self._entry == "read":
            if resumed_at is not Boundary.BATCH:
                self.put_back()
            elif self.body_start:
                # In mid-epoch the body's first lines run again; batches() puts back after them.
                self.write(self.body_start)
                self._is_in_first_lines = self.is_put_back_due = True
        if self._held is None:
            now = self.read()
            self._note_draws_before(now)
            if self._first_read is None:
                self._first_read = self.body_start = now
            self._has_drawn_between_reads |= is_again and not rng.is_same(self._first_read, now)
        self._is_read = True

    def was_saved(self, is_epoch_done: bool) -> None:
        """Note that `save()` was called outside the loops."""
        if not self.has_trained and not self._loops_begun and self._held is None:
            now = self.read()
            # Two saves, or draws between a read and a save, are a loop of the script's own.
            self.has_trained = self._first_save is not None
            self.has_trained |= self._first_read is not None and not rng.is_same(self._first_read, now)
            self._first_save = now
        if is_epoch_done:
            # The next body of a loop of the script's own begins after it.
            self.body_start = self.read()

    def was_read_again(self) -> None:
        """Note that the script reads a counter after it has trained: the next body may begin here."""
        if self._has_ended_by_hand and self._is_read:
            self.body_start, self._has_ended_by_hand = self.read(), False

    def begin_batches_by_hand(self, *, is_first: bool) -> None:
        """Note that a loop over batches begins, outside of `epochs()`; `is_first`: the first in its body.

        Where the body begins is not seen: in one that is resumed, the first lines may draw other numbers.
        """
        if not is_first and not self._is_in_first_lines:
            return
        now = self.read()
        drawn, then, self._loop_draws = rng.digest(now), self._loop_draws, rng.digest(now)
        if self._is_in_first_lines and then not in ("", drawn) and not rng.is_same(self.body_start, now):
            warn(
                "the lines before the loop over batches have drawn other random numbers than in the training "
                "that was stopped. Loop over state.epochs(), which knows where its body begins. [R08]"
            )

    def end_batches_by_hand(self) -> None:
        """Note that a loop over batches has ended, outside of `epochs()`: the next body begins here."""
        self.body_start, self._has_ended_by_hand = self.read(), True

    def has_late_read(self) -> bool:
        """Whether a loop of the script's own begins with a read, and draws came between that and another."""
        return self._has_drawn_between_reads and self.has_trained and self.entry() == "read"

    def has_unseen_loop(self) -> bool:
        """Whether a loop of the script's own reads no counter, and random numbers were drawn since the load.

        Where it begins is not seen then: a resume puts the generators back in the load.
        """
        is_unseen = self.has_optimizer and self.has_trained and self.entry() == "load"
        return is_unseen and self._at_load is not None and not rng.is_same(self._at_load, self.read())

    # In the loops.

    def put_back_late(self) -> None:
        """Restore the generators late: the training continues without a loop of RunState."""
        held, self._held, self._put_gradients_back = self._held, None, None
        if held is not None and self._entry != "load" and not rng.is_same(held, self.read()):
            self.write(held)
            warn(
                "the optimizer made a step after a resume, and no loop of RunState has begun: the random "
                "generators were put back only now. Loop over state.epochs(), state.steps() or "
                "state.batches(), or read state.step (or state.epoch) in the head of your own loop. [R08]"
            )

    def show_held(self, *, is_in_body: bool) -> None:
        """Set the generators as a checkpoint taken now has them: draws before the loop do not count.

        Nor do those of a body's first lines, which run a second time.
        """
        if self._held is not None and (is_in_body or self._entry != "load"):
            self.write(self._held)

    def begin_loop(self, kind: str, total: int, done: Mapping[str, int]) -> int:
        """Note that an outermost loop begins, and return its number; `done`: the epochs and steps."""
        self.has_used_loops = True
        left, self._left = self._left, None
        if left and left[:2] == (kind, total):
            # An exception was caught around the loop, which is entered again.
            return left[2]
        if self._held is None:
            self._note_draws_since()
            if left and done[left[0]] < left[1] and done[kind] < total:
                warn(
                    f"the loop over state.{left[0]}({left[1]}) was left before its end, and one over "
                    f"state.{kind}({total}) begins: a resume in the second one would enter the first one "
                    "again. Say in a variable which of them is due, and skip the others. [R05]"
                )
        self._loops_begun += 1
        return self._loops_begun - 1

    def _note_draws_since(self) -> None:
        now = self.read()
        self._note_draws_before(now)
        self._at_load = None
        is_saved = self._first_save is not None and not self.has_optimizer
        if is_saved and (self._drawn_from or not rng.is_same(self._first_save, now)):
            warn(
                "random numbers were drawn between RunState.load and the first loop, and save() was called "
                "there: a resume from that checkpoint draws different numbers. Call save() in the loop, or "
                "draw before RunState.load. [R08]"
            )
        self._first_save = None
        if self._loop_ends and len(self._loop_ends) == self._loops_begun and self._loop_ends[-1]:
            self._loop_ends[-1] = None if rng.is_same(self._loop_ends[-1], now) else self._loop_ends[-1]

    def leave_loop(self, kind: str, total: int, number: int | None) -> None:
        """Note that a loop was left early."""
        self._left = None if number is None else (kind, total, number)

    def end_loop(self, number: int | None, *, has_run: bool, resumed_at: Boundary) -> None:
        """Note that a loop has ended; `has_run`: whether it had anything left to do."""
        if number is None:
            self.put_back()
            return
        if self._held is not None and not has_run and number < len(self._loop_ends):
            # It had ended before the checkpoint: what follows draws what it drew then.
            if end := self._loop_ends[number]:
                self.write(end)
            if resumed_at is Boundary.OUTSIDE and number == len(self._loop_ends) - 1:
                self._held = None
            return
        self.put_back()
        lacking = number - len(self._loop_ends)
        self._loop_ends[number:] = [*[None] * lacking, self.read()]
