"""Where we are in the data, and the loader that goes on from there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from ..boundary import Boundary
from ..errors import Once, UsageError, warn
from ..files.strict_json import typed
from ..loaders import rng, sources
from ..loaders.dataloader import LoaderSource
from . import iteration, means
from .accumulation import Accelerate
from .first_lines import BeforeLoop, FirstLines
from .loader_position import Hook, Hooks, LoaderPosition, Through
from .means import Means
from .other_loaders import Outside
from .random_streams import Streams
from .running_sums import RunningSums
from .spikes import Spikes


def check(saved: Any) -> None:
    """Raise ValueError unless it is what `Position.collect` returns, as far as the loops depend on it.

    Its restore comes last and refuses nothing.
    """
    found = typed(dict, saved)
    counts = [found[name] for name in ("epoch", "batch", "step", "samples")] + typed(list, found["spikes"])
    if len(counts) != 6 or any(not 0 <= typed(int, count) < 1 << 63 for count in counts):
        raise ValueError(f"{counts!r:.200} are not the counters of a training")
    typed(Boundary, found["boundary"])
    for name, kinds in _KINDS.items():
        if not isinstance(found[name], kinds):
            raise ValueError(f"{found[name]!r:.200} are no {name}")
    for name, kind in _NEWER.items():
        if not isinstance(found.get(name, kind()), kind):
            raise ValueError(f"{found[name]!r:.200} is no {name}")
    for value in found["metrics"].values():
        typed(float, value)
    # (checkpoints of earlier versions have none)
    if "means" in found:
        means.check(found["means"])


_NONE = type(None)
_KINDS: dict[str, tuple[type, ...]] = {
    "metrics": (dict,),
    "splits": (dict,),
    "iterables": (dict,),
    "seed": (int, _NONE),
    "stepped": (list, _NONE),
    "body_start": (dict, _NONE),
}
_NEWER: dict[str, type] = {"loop_ends": list, "entry": str, "loop_draws": str}
"""What checkpoints of older versions lack."""


class Position:
    """The counters of a training, and the loops that move them."""

    _left_for: str | None = None
    """What a resume begins with, if `epochs()` or `steps()` was left right after `save()`."""
    loop_begins: Hook | None = None
    """What is called when the first loop begins."""

    def __init__(
        self,
        loaders: Mapping[str, Any],
        generators: Mapping[str, rng.Generator] | None = None,
        sample_seeds: bool = False,
        processes: int = 1,
        shows: Callable[[], bool] = lambda: False,
    ) -> None:
        self._shows = shows
        self.processes = processes
        self.epoch = 0
        self.batch = 0
        self.step = 0
        self.updates = 0
        """Steps that the first optimizer has made in this process."""
        self.samples = 0
        self.metrics: dict[str, float] = {}
        """What the last save that was asked for was given."""
        self.means = Means()
        """The running means of the epoch in hand."""
        self.splits: Mapping[str, Any] = {}
        """How the run's data were divided, to be kept with them."""
        self.devices: Callable[[], Collection[str]] = list
        """What returns the devices that this process trains on."""
        self._generators = generators or {}
        self.seed = torch.initial_seed() if sample_seeds else None
        """What the samples' seeds are made from, if each has its own; the same on every rank."""
        self.loaders = {name: self._stands(name, loader) for name, loader in loaders.items()}
        self._found: dict[str, LoaderPosition] = {}
        """Iterables that were looped over without having been given, by their names."""
        self._found_before: Mapping[str, Any] = {}
        given = {n: at.source for n, at in self.loaders.items() if isinstance(at.source, LoaderSource)}
        self.outside = Outside(given, self._generators, shows, self._body_of_script, self._place)
        """What the script loops over by itself."""
        self.accelerate = Accelerate()
        self.counts_steps = False
        """Whether a hook counts the optimizer's steps here."""
        self.gradients: Callable[[], object] | None = None
        """What changes with every gradient that the optimizers have."""
        self.digest: Callable[[Any], Any] | None = None
        """What makes digests of the batches, if there is a trace."""
        self.handed: list[Any] = []
        """Those of the batches that were handed out, until the trace has written them down."""
        self.body_begins: Hook | None = None
        """What is called when the first body begins."""
        self._body: Boundary | None = None
        self._opened = self._step_in_hand = self._step_at_start = 0
        self._is_in_epochs = self._has_looped = self._has_saved_end = self._has_ended_body = False
        """Whether the body of `epochs()` has ended, and the next epoch has not begun."""
        self._stepped: set[str] | None = None
        """The optimizers that have made a step since the last batch was handed out."""
        self.spikes, self.once = Spikes(), Once()
        self.first_lines, self.before_loop, self.sums = FirstLines(), BeforeLoop(), RunningSums()
        self.restores = 0
        self._resumed_at, self._has_handed_out = Boundary.OUTSIDE, False
        """Whether there was a batch since the training was resumed."""
        self.streams = Streams(self._generators, self.loaders)
        self._not_due: set[str] = set()
        """Loaders that an epoch has ended without."""
        self._saved_in: Any = None

    def _stands(self, name: str, loader: Any) -> LoaderPosition:
        return LoaderPosition(sources.make(name, loader, self._generators, self._seeds, self._shows), self)

    def _seeds(self) -> tuple[int, int] | None:
        return None if self.seed is None else (self.seed, self.epoch)

    def _all(self) -> list[LoaderPosition]:
        return [*self.loaders.values(), *self._found.values()]

    def boundary(self) -> Boundary:
        """Return where a checkpoint taken now stands."""
        if self._has_ended_body:
            return Boundary.EPOCH
        if any(loader.is_under_way() and not loader.is_beside for loader in self._all()):
            return Boundary.BATCH
        if self._body is Boundary.STEP:
            return Boundary.STEP
        if any(loader.is_over for loader in self._all()):
            return Boundary.EPOCH
        if self._body is not Boundary.EPOCH:
            return Boundary.OUTSIDE
        if self._has_looped or not self.loaders:
            # The loop was one over steps(), or over data that we do not know.
            return Boundary.EPOCH
        if self.step > self._step_at_start:
            raise UsageError(
                "the optimizer has made steps in this epoch, but not in a loop over state.batches().",
                fix="loop over state.batches() instead of the loader, or do not give the loader to RunState: "
                "then save() in the body of epochs() means that the epoch is finished.",
            )
        return Boundary.BATCH

    def collect(self) -> dict[str, Any]:
        """Return where a resume is to go on."""
        counters = self.counters()
        gpus = sorted({*self.devices()} - {"cpu"})
        return {
            **counters,
            **({"devices": gpus} if gpus else {}),
            **self.streams.collect(counters["boundary"]),
            "stepped": None if self._stepped is None else sorted(self._stepped),
            "seed": self.seed,
            "metrics": self.metrics,
            "means": self.means.collect(),
            "splits": self.splits,
            "spikes": [self.spikes.count, self.spikes.newest],
            "iterables": {name: at.collect() for name, at in self._found.items()},
            "outside": self.outside.collect(),
            "accelerate": self.accelerate.collect(),
        }

    def was_read(self, *, is_counter: bool = True) -> None:
        """Note that the script reads a counter, or its variables: a loop of its own may begin here."""
        if not self.is_outside():
            return
        if self.streams.has_trained:
            self.streams.was_read_again()
            return
        self.before_loop.was_read(may_begin_loop=is_counter)
        has_gradients = bool(self.gradients and self.gradients())
        self.streams.was_read(self._resumed_at, is_again=is_counter and not has_gradients)

    def was_saved(self) -> None:
        """Note that the script called `save()`."""
        self._saved_in = self.body()
        self._has_saved_end = self._body is Boundary.EPOCH and self.boundary() is Boundary.EPOCH
        if self.is_outside():
            self.streams.was_saved(self.boundary() is Boundary.EPOCH)

    def is_saved_body(self) -> bool:
        """Whether `save()` was called in the body that is running."""
        return bool(self._saved_in == self.body())

    def is_mid_epoch(self) -> bool:
        """Whether a checkpoint taken now stands between two batches of an epoch."""
        return self.boundary() is Boundary.BATCH

    def is_step_without_loop(self) -> bool:
        """Whether the optimizer has made more than one step, and the script has used no loop of ours."""
        return self.updates > 1 and self.is_outside() and not self.streams.has_used_loops

    def is_training(self) -> bool:
        """Whether a batch of any loader is in hand."""
        return any(loader.in_hand for loader in self._all())

    def is_behind_last_batch(self) -> bool:
        """Whether a resume in mid-epoch found no batch left: the loop over them was empty."""
        is_over = any(loader.is_through() for loader in self._all())
        return self._resumed_at is Boundary.BATCH and not self._has_handed_out and is_over

    def is_outside(self) -> bool:
        """Whether no loop of ours is running."""
        return self._body is None and not any(loader.in_hand for loader in self._all())

    def counters(self) -> dict[str, Any]:
        """Return the counters as a resume is to find them: what is in hand counts as done."""
        boundary = self.boundary()
        in_hand = [loader for loader in self._all() if loader.in_hand]
        batches = [loader.done + loader.in_hand for loader in in_hand] or [self.batch]
        return {
            "boundary": boundary,
            "epoch": self.epoch + (boundary is Boundary.EPOCH),
            "batch": batches[-1] if boundary is Boundary.BATCH else 0,
            "step": self.steps_done(),
            "samples": self.samples + self.processes * sum(loader.size_in_hand for loader in in_hand),
        }

    def steps_done(self) -> int:
        """Return the optimizer steps; one in hand counts as done."""
        in_hand = any(loader.in_hand and loader.is_step for loader in self._all())
        return self._step_in_hand + 1 if self._body is Boundary.STEP else self.step + in_hand

    def epochs_done(self) -> int:
        """Return the epochs done; where `epochs()` runs, the one in hand does not count."""
        if self._body is None and not self._has_ended_body and self.boundary() is Boundary.EPOCH:
            return self.epoch + 1
        return self.epoch

    def is_step(self, loader: LoaderPosition) -> bool:
        """Whether the batch in hand of this loader is a step, where no optimizer tells of its steps.

        That of a loop in another loop over batches, or in a body of `steps()`, is none.
        """
        in_hand = [other for other in self._all() if other.in_hand]
        is_outermost = min(in_hand, key=_opened) is loader
        return not self.counts_steps and self._body is not Boundary.STEP and is_outermost

    def body(self) -> Any:
        """Return what tells the body that is running from all others."""
        in_hand = [(number, at.done) for number, at in enumerate(self._all()) if at.in_hand]
        return self.epoch, self._step_in_hand, in_hand

    def _body_of_script(self) -> object:
        """Return what changes with every body and every step; None outside the loops."""
        return None if self.is_outside() else self._place()

    def _place(self) -> object:
        return self.body(), self.updates

    def count_step(self, optimizer: str, is_first: bool) -> None:
        """Note that an optimizer has made a step; those of the first are counted."""
        self.streams.has_trained = True
        self.before_loop.forget()
        self._warn_of_saved_end()
        if self.is_outside():
            self.streams.put_back_late()
        for loader in self._all():
            loader.warn_of_late_step()
        for loader in self._all() if is_first else ():
            loader.stepped()
        self.updates += is_first
        if is_first:
            # (a body of steps() is one step, however many the optimizer makes in it)
            self.step = self.step + 1 if self._body is not Boundary.STEP else self._step_in_hand + 1
        if self._stepped is not None:
            self._stepped.add(optimizer)

    def _warn_of_saved_end(self) -> None:
        if self._has_saved_end and self._body is Boundary.EPOCH:
            self._has_saved_end = False
            self.once.warn(
                "save() in the body of epochs() says that the epoch is finished, and the training goes on in "
                "it: a resume from that checkpoint begins the next epoch, and leaves out the rest of this "
                "one. Call save() at the end of the body, or loop over the data with state.batches().",
                about="what is lost",
            )

    def note_captured(self, is_first: bool) -> None:
        """Note that an optimizer's steps call no hook: if they are what is counted, each batch is a step."""
        if is_first and self.counts_steps:
            self.counts_steps = False
            for loader in self._all():
                loader.is_step = loader.in_hand and self.is_step(loader)

    def progress(self) -> object:
        """Return what changes with every step and every gradient; None if nobody knows."""
        return (self.updates, self.gradients()) if self.gradients and self.counts_steps else None

    def handed_out(self, batch: int, digest: Any) -> None:
        """Note that a batch is in hand, and its digest if there is a trace."""
        self.batch, self._stepped = batch, set()
        self.streams.has_trained = self.streams.has_used_loops = True
        self._has_handed_out = True
        self._warn_of_saved_end()
        # (where another thread asks for batches, they are in hand only when they are trained)
        if not any(loader.counts_by_steps for loader in self._all()):
            self.first_lines.end()
        self._body_begins()
        if digest:
            self.handed.append(digest)

    def _body_begins(self) -> None:
        if self.body_begins:
            begins, self.body_begins = self.body_begins, None
            begins()

    def _loop_begins(self) -> None:
        if self.loop_begins:
            begins, self.loop_begins = self.loop_begins, None
            begins()

    def next_opened(self) -> int:
        """Return what tells which of several loops has handed out its first batch first."""
        self._opened += 1
        return self._opened

    def is_between(self, name: str) -> bool:
        """Whether the training is between two batches where that of this loader has ended.

        Not in an accumulation window, nor in a body of `steps()`, nor where the loop over another
        loader, around this one, has its next batch in hand already.
        """
        in_hand = [loader for loader in self._all() if loader.in_hand]
        if self._body is Boundary.STEP or min(in_hand, key=_opened) is not self.at(name):
            return False
        return not self.counts_steps or bool(self._stepped)

    def is_rest_next(self, name: str) -> bool:
        """Whether the rest of an epoch's body comes after the batch in hand, as far as the loader knows."""
        loader = self.at(name)
        length = loader.length()
        length = loader.ended_at if length is None else length
        return self._body is Boundary.EPOCH and length is not None and loader.done + 1 >= length

    def stands_at(self) -> tuple[int, int, int]:
        """Return what people find the place by: epoch, batch and step."""
        return self.epoch, self.batch, self.step

    def restore(self, saved: Mapping[str, Any], unfit: AbstractSet[str] = frozenset()) -> None:
        """Stand where `collect` stood. Loops that are running end, and new ones go on from there.

        Iterables that are `unfit` begin anew.
        """
        self.epoch, self.batch = saved["epoch"], saved["batch"]
        self.step, self.samples = saved["step"], saved["samples"]
        # The body of `steps()` that is running is no step: what it has trained is gone now.
        self._step_in_hand = self.step - 1
        self.metrics = dict(saved["metrics"])
        self.means.restore(saved.get("means"))
        self._resumed_at = saved["boundary"]
        if self._resumed_at is Boundary.BATCH:
            self.sums.resumed()
        self.streams.restore(saved)
        self._has_handed_out = False
        self._stepped = None if saved["stepped"] is None else set(saved["stepped"])
        self.spikes, self._saved_in = Spikes(*saved["spikes"]), None
        self.seed = saved["seed"] if self.seed is not None and saved["seed"] is not None else self.seed
        self._found_before = {name: at for name, at in saved["iterables"].items() if name not in unfit}
        for name, at in self._found.items():
            at.rewind()
            if name in self._found_before:
                at.restore(self._found_before[name], set())
        # (checkpoints of older versions do not have it)
        self.outside.restore(saved.get("outside", []))
        self.accelerate.restore(saved.get("accelerate"))
        self.restores += 1

    def begin_at(self, epoch: int, step: int) -> None:
        """Count on from what was trained without this library."""
        self.epoch, self.step = epoch, step

    def refuse_to_go_back(self) -> None:
        """Raise UsageError where nobody knows which batch is in hand."""
        for loader in self._all():
            loader.refuse_to_leave_out()

    def go_back(self, saved: Mapping[str, Any]) -> None:
        """Count steps and samples as `collect` did, and stay where we are in the data.

        What was loaded since is left out, the batch in hand too.
        """
        is_left = any(loader.is_interrupted() for loader in self._all())
        self._saved_in = None
        for loader in self._all():
            loader.leave_out()
        self.step, self.samples = saved["step"], saved["samples"]
        self.metrics = dict(saved["metrics"])
        self.means.go_back(saved.get("means"))
        # The body that is running is no step: it has trained what is gone now.
        self._step_in_hand = self.step - 1
        self._stepped = None if saved["stepped"] is None else set(saved["stepped"])
        if is_left:
            # The loop was left by the exception that is being handled: the next body goes on with the rest.
            self._stay()
            self.restores += 1

    def begin_own_streams(self, seed: str) -> None:
        """Begin streams of their own for all generators of the loaders: those restored are another rank's."""
        self.streams.forget()
        # (the sums are another rank's, too)
        self.means.forget()
        for name, loader in self.loaders.items():
            loader.begin_own_streams(f"{seed}/{name}")

    def warn_of_left_after_save(self) -> None:
        """Warn of a `break` right after `save()`: the checkpoint does not know of it."""
        if self._left_for:
            warn(
                f"the loop was left by a break right after save(): the same command trains on, with "
                f"{self._left_for}. To keep a training that has ended from going on, break at the top of the "
                "body instead: on state.patience(), or on a value in state.vars that was set before save()."
            )

    def close(self, *, now: bool = False) -> None:
        """Let go of what loads in the background; end `now` what a loop still holds, too."""
        self.streams.close()
        self.outside.close()
        for loader in self._all():
            loader.source.close(now=now)

    def find(self, iterable: Any) -> str:
        """Return the name of an iterable that was not given to RunState: here it is known from now on."""
        kind = getattr(iterable, "__name__", type(iterable).__name__)
        name, number = kind, 1
        while name in self._found and not self._can_be(self._found[name], iterable):
            number += 1
            name = f"{kind}-{number}"
        if name in self._found:
            self._found[name].source.loader = iterable
        else:
            self._found[name] = self._stands(name, iterable)
            if name in self._found_before:
                self._found[name].restore(self._found_before[name], set())
        self._found[name].is_claimed = True
        return name

    def _can_be(self, at: LoaderPosition, iterable: Any) -> bool:
        # The same one, or what a script makes anew in every epoch.
        is_over = at.is_over and self._body is Boundary.EPOCH
        return at.source.loader is iterable or not (at.in_hand or at.is_claimed or is_over)

    def hold(self) -> None:
        """Remember the random generators for where the loops go on: draws until then do not count."""
        self.streams.hold()

    def as_held(self) -> AbstractContextManager[None]:
        """Return a context in which the random generators stand where the loops go on."""
        return self.streams.as_held()

    def put_back(self) -> None:
        """Put the random generators back as they were held."""
        self.streams.put_back()

    def show_held(self) -> None:
        """Put the generators where a checkpoint that is taken now has them."""
        self.streams.show_held(is_in_body=self.is_mid_epoch() or self._resumed_at is Boundary.STEP)

    def reopened(self) -> None:
        """Put the generators back if all loops over batches that were open are open again."""
        unseen = self._found_before.keys() - self._found.keys()
        if not any(at.is_awaited for at in self._all()) and not any(
            self._found_before[name].get("is_open") for name in unseen
        ):
            self.streams.put_back()

    def generators(self) -> list[rng.Generator]:
        """Return the generators that a checkpoint has, beside the global ones."""
        roots = {name: loader.source.root() for name, loader in self.loaders.items()}
        return [*self._generators.values(), *rng.find(roots).values()]

    def read_draws(self) -> Any:
        """Return the states of the generators that the script's own code draws from."""
        return {**self.streams.read(), "loaders": {}}

    def write_draws(self, states: Mapping[str, Any]) -> None:
        """Put them into these states."""
        self.streams.write(states)

    def epochs(self, total: int, body_ended: Hook) -> Iterator[int]:
        """Yield the epochs up to `total`."""
        if any(loader.is_through() for loader in self._all()):
            # An epoch's body was left after its batches had come to their end.
            self._begin_epoch(self.epoch + 1)
        number = self._begin_loop("epochs", total)
        has_run = False
        while self.epoch < total:
            has_run = True
            is_second_time = self._resumed_at in (Boundary.BATCH, Boundary.STEP)
            self.streams.begin_body(is_second_time=is_second_time)
            restores, outer, self._body = self.restores, self._body, Boundary.EPOCH
            self._step_at_start, self._has_looped, self._is_in_epochs = self.step, False, True
            self._has_saved_end = False
            self.means.begin(self.epoch)
            if not self.loaders:
                self._stepped = set()
            self.first_lines.begin()
            asked_by = getattr(iteration.caller(), "f_code", None)
            try:
                yield self.epoch
            except GeneratorExit:
                is_last = self.boundary() is not Boundary.EPOCH or self.epoch + 1 == total
                if self.is_saved_body() and not is_last and iteration.is_break(asked_by):
                    self._left_for = f"epoch {self.epoch + 1}"
                self._stay()
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

    def _begin_loop(self, kind: str, total: int) -> int | None:
        """Return the number of an outermost loop that begins; None for one in the body of another."""
        done = {"epochs": self.epoch, "steps": self.step}
        self._left_for = None
        self._loop_begins()
        return None if self._body is not None else self.streams.begin_loop(kind, total, done)

    def _end_body(self, body_ended: Hook) -> None:
        self._put_back_unlooped()
        self._not_due |= {n for n, at in self.loaders.items() if not (at.is_over or at.is_under_way())}
        begun = [loader for loader in self._all() if loader.is_over or loader.is_under_way()]
        for loader in self._all():
            loader.warn_of_left_after_save()
            if begun == [loader]:
                loader.warn_of_counted_by_hand(self.once)
        # Whatever is left of the batches, the next epoch is what follows.
        self._has_ended_body = True
        try:
            body_ended()
        finally:
            self._has_ended_body = False

    def _put_back_unlooped(self) -> None:
        # In mid-epoch, and the body did not loop again over what was left.
        if any(loader.is_under_way() for loader in self._all()) or self._resumed_at is Boundary.STEP:
            self.put_back()

    def _stay(self) -> None:
        # Whoever loops again goes on from here, as after a resume.
        for loader in self._all():
            loader.stay()
        if any(loader.is_under_way() for loader in self._all()):
            for loader in self._all():
                loader.pass_by()
            self._resumed_at = Boundary.BATCH
            self.hold()

    def _begin_epoch(self, epoch: int) -> None:
        self._put_back_unlooped()
        for loader in self._all():
            loader.warn_of_uncounted()
            loader.leave(None)
            loader.rewind()
        self.epoch, self.batch = epoch, 0
        self.sums.forget()
        self._resumed_at, self.streams.body_start = Boundary.EPOCH, None
        self.streams.forget_held()

    def steps(self, total: int, body_ended: Hook) -> Iterator[int]:
        """Yield the steps up to `total`: each body is one, whatever the optimizers do in it."""
        number = self._begin_loop("steps", total)
        has_run = False
        while self.step < total:
            has_run = True
            self.put_back()
            if not self._is_in_epochs:
                self.streams.body_start = None
            restores, outer, self._body = self.restores, self._body, Boundary.STEP
            self._step_in_hand = self.step
            around = [loader for loader in self._all() if loader.in_hand]
            self._body_begins()
            asked_by = getattr(iteration.caller(), "f_code", None)
            try:
                yield self.step
                if restores == self.restores:
                    try:
                        body_ended()
                    finally:
                        # A body whose step was skipped (a gradient scaler does that) is still one body.
                        self.step = self.steps_done()
                        for loader in self._all():
                            if loader.in_hand and loader not in around:
                                loader.take_back()
            except GeneratorExit:
                is_last = self.steps_done() >= total
                if self.is_saved_body() and not is_last and iteration.is_break(asked_by):
                    self._left_for = f"step {self.steps_done()}"
                self.streams.leave_loop("steps", total, number)
                raise
            finally:
                self._body = outer
        self.streams.end_loop(number, has_run=has_run, resumed_at=self._resumed_at)
        self._has_looped = True

    def batches_ended(self, ended: LoaderPosition) -> None:
        """Note that the loop over a loader's batches has ended.

        A loader that was asked in its bodies has ended with it, if it is not asked again. Without
        `epochs()`, the next body begins here.
        """
        for loader in self._all():
            loader.is_beside |= loader.is_open and not 0 < loader.opened <= ended.opened
        if self._body is None:
            self.streams.end_batches_by_hand()
        if self._body is Boundary.EPOCH and not self.is_training():
            self.first_lines.go_on()

    def is_in_batches(self) -> bool:
        """Whether the end of a batch is a boundary: not in a body of `steps()`, nor of another loader."""
        return self._body is not Boundary.STEP and not self.is_training()

    def is_in_inner_loop(self) -> bool:
        """Whether a loop over batches runs in the body of one over those of another loader."""
        in_hand = sorted((loader for loader in self._all() if loader.in_hand), key=_opened)
        outer, inner = in_hand[:1], in_hand[-1:]
        # zip() asks for all of them at one place.
        return len(in_hand) > 1 and not inner[0].is_asked_by_hand and inner[0].asked_at != outer[0].asked_at

    def unlooped(self) -> list[str]:
        """Return the loaders that a save in this epoch's body takes for not due."""
        if self._body is not Boundary.EPOCH or self.boundary() is not Boundary.EPOCH:
            return []
        has_begun = {name: at.is_over or at.is_under_way() for name, at in self.loaders.items()}
        lacking = [name for name, begun in has_begun.items() if not begun and name not in self._not_due]
        return lacking if any(has_begun.values()) else []

    def at(self, name: str) -> LoaderPosition:
        """Return where a loader stands, by its name."""
        return self.loaders.get(name) or self._found[name]

    def batches(self, name: str, hooks: Hooks, through: Through | None, loads_ahead: bool) -> Batches:
        """Return what is left of the epoch's batches."""
        loader = self.at(name)
        if self._body is not Boundary.EPOCH and loader.is_through():
            # Used without epochs(): the loader beginning anew is the next epoch.
            for at in self._all():
                at.warn_of_left_after_save()
            start = self.streams.body_start
            self._begin_epoch(self.epoch + 1)
            self.streams.body_start = start
        if self._body is None:
            self._loop_begins()
            self.means.begin(self.epoch)
            has_begun = any(at.is_over or at.is_under_way() for at in self._all())
            self.streams.begin_batches_by_hand(is_first=not has_begun)
        return Batches(loader, hooks, through, loads_ahead)


def _opened(loader: LoaderPosition) -> int:
    return loader.opened


class Batches:
    """The batches that are left of an epoch, to loop over once.

    `len()` is how many the whole epoch has, where the loader knows; it stays the same in the loop.
    """

    def __init__(
        self, loader: LoaderPosition, hooks: Hooks, through: Through | None, loads_ahead: bool
    ) -> None:
        self._loader = loader
        self._hooks = hooks
        self._through = through
        self._loads_ahead = loads_ahead
        self._thread = threading.get_ident()

    def __len__(self) -> int:
        return len(self._loader.source)

    def __iter__(self) -> Iterator[Any]:
        is_elsewhere = threading.get_ident() != self._thread
        return self._loader.loop(self._hooks, self._through, self._loads_ahead, is_elsewhere)


class Enumerated:
    """The batches that are left of an epoch, each with its index in the epoch, to loop over once.

    `len()` is that of the batches.
    """

    def __init__(self, batches: Batches, start: int) -> None:
        self._batches = batches
        self._start = start

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        loop: Any = iter(self._batches)
        # map() is not a frame of its own: the loop still sees who asks, and ends when map() is dropped.
        return map(partial(loop.numbered, self._start), loop)
