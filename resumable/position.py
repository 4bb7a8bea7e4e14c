"""Where we are in the data, and the loader that goes on from there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from . import rng, sources
from .boundary import Boundary
from .errors import UsageError
from .loader_position import Hook, Hooks, LoaderPosition, Through
from .sealed import typed
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
    for value in found["metrics"].values():
        typed(float, value)


_NONE = type(None)
_KINDS: dict[str, tuple[type, ...]] = {
    "metrics": (dict,),
    "splits": (dict,),
    "iterables": (dict,),
    "seed": (int, _NONE),
    "stepped": (list, _NONE),
    "body_start": (dict, _NONE),
}


class Position:
    """The counters of a training, and the loops that move them."""

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
        self.samples = 0
        self.metrics: dict[str, float] = {}
        """What the last save that was asked for was given."""
        self.splits: Mapping[str, Any] = {}
        """How the run's data were divided, to be kept with them."""
        self._generators = generators or {}
        self.seed = torch.initial_seed() if sample_seeds else None
        """What the samples' seeds are made from, if each has its own; the same on every rank."""
        self.loaders = {name: self._stands(name, loader) for name, loader in loaders.items()}
        self._found: dict[str, LoaderPosition] = {}
        """Iterables that were looped over without having been given, by their names."""
        self._found_before: Mapping[str, Any] = {}
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
        self._opened = 0
        self._step_in_hand = 0
        self._step_at_start = 0
        self._has_looped = False
        self._has_ended_body = False
        """Whether the body of `epochs()` has ended, and the next epoch has not begun."""
        self._stepped: set[str] | None = None
        """The optimizers that have made a step since the last batch was handed out."""
        self.spikes = Spikes()
        self.restores = 0
        self._resumed_at = Boundary.OUTSIDE
        self._held: Mapping[str, Any] | None = None
        self._body_start: Mapping[str, Any] | None = None

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
        if any(loader.is_under_way() for loader in self._all()):
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
        in_epoch = counters["boundary"] is Boundary.BATCH
        return {
            **counters,
            "body_start": self._body_start if in_epoch else None,
            "stepped": None if self._stepped is None else sorted(self._stepped),
            "seed": self.seed,
            "metrics": self.metrics,
            "splits": self.splits,
            "spikes": [self.spikes.count, self.spikes.newest],
            "iterables": {name: at.collect() for name, at in self._found.items()},
        }

    def is_mid_epoch(self) -> bool:
        """Whether a checkpoint taken now stands between two batches of an epoch."""
        return self.boundary() is Boundary.BATCH

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
        in_body = self._body is Boundary.STEP
        return max(self.step, self._step_in_hand + 1) if in_body else self.step

    def body(self) -> Any:
        """Return what tells the body that is running from all others."""
        in_hand = [(number, at.done) for number, at in enumerate(self._all()) if at.in_hand]
        return self.epoch, self._step_in_hand, in_hand

    def count_step(self, optimizer: str, is_first: bool) -> None:
        """Note that an optimizer has made a step; those of the first are counted."""
        for loader in self._all() if is_first else ():
            loader.stepped()
        self.step += is_first
        if self._stepped is not None:
            self._stepped.add(optimizer)

    def is_accumulating(self, optimizer: str) -> bool:
        """Whether an optimizer made no step since a batch was handed out: its gradients are state then."""
        return self._stepped is not None and optimizer not in self._stepped

    def progress(self) -> object:
        """Return what changes with every step and every gradient; None if nobody knows."""
        return (self.step, self.gradients()) if self.gradients and self.counts_steps else None

    def handed_out(self, batch: int, digest: Any) -> None:
        """Note that a batch is in hand, and its digest if there is a trace."""
        self.batch, self._stepped = batch, set()
        self._body_begins()
        if digest:
            self.handed.append(digest)

    def _body_begins(self) -> None:
        if self.body_begins:
            begins, self.body_begins = self.body_begins, None
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
        """Whether the batch in hand is the last one, as far as the loader knows."""
        loader = self.at(name)
        length = loader.length()
        return length is not None and loader.done + 1 >= length

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
        self._resumed_at, self._body_start = saved["boundary"], saved["body_start"]
        self._stepped = None if saved["stepped"] is None else set(saved["stepped"])
        self.spikes = Spikes(*saved["spikes"])
        self.seed = saved["seed"] if self.seed is not None and saved["seed"] is not None else self.seed
        self._found_before = {name: at for name, at in saved["iterables"].items() if name not in unfit}
        for name, at in self._found.items():
            at.rewind()
            if name in self._found_before:
                at.restore(self._found_before[name], set())
        self.restores += 1

    def rewind(self, loaders: Collection[str]) -> None:
        """Let these loaders begin the epoch anew: nobody knows where they stood."""
        for name in self.loaders.keys() & {*loaders}:
            self.loaders[name].rewind()

    def refuse_to_go_back(self) -> None:
        """Raise UsageError where nobody knows which batch is in hand."""
        for loader in self._all():
            loader.refuse_to_leave_out()

    def go_back(self, saved: Mapping[str, Any]) -> None:
        """Count steps and samples as `collect` did, and stay where we are in the data.

        What was loaded since is left out, the batch in hand too.
        """
        is_left = any(loader.is_interrupted() for loader in self._all())
        for loader in self._all():
            loader.leave_out()
        self.step, self.samples = saved["step"], saved["samples"]
        self.metrics = dict(saved["metrics"])
        # The body that is running is no step: it has trained what is gone now.
        self._step_in_hand = self.step - 1
        self._stepped = None if saved["stepped"] is None else set(saved["stepped"])
        if is_left:
            # The loop was left by the exception that is being handled: the next body goes on with the rest.
            self._stay()
            self.restores += 1

    def begin_own_streams(self, seed: str) -> None:
        """Begin streams of their own for all generators of the loaders: those restored are another rank's."""
        self._body_start = None
        for name, loader in self.loaders.items():
            loader.begin_own_streams(f"{seed}/{name}")

    def close(self, *, now: bool = False) -> None:
        """Let go of what loads in the background; end `now` what a loop still holds, too."""
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
        self._held = self._read_generators()

    def put_back(self) -> None:
        """Put the random generators back as they were held."""
        if self._held is not None:
            self._write_generators(self._held)
            self._held = None

    def show_held(self) -> None:
        """Put the generators where a checkpoint that is taken now has them.

        In mid-epoch the first lines of the epoch's body run a second time: what they draw does not count.
        """
        if self._held is not None and self.is_mid_epoch():
            self._write_generators(self._held)

    def _read_generators(self) -> dict[str, Any]:
        return {
            "global": rng.collect(),
            "own": {name: rng.read(generator) for name, generator in self._generators.items()},
            "loaders": {name: loader.read_generators() for name, loader in self.loaders.items()},
        }

    def _write_generators(self, states: Mapping[str, Any]) -> None:
        rng.restore(states["global"])
        for name in self._generators.keys() & states["own"].keys():
            rng.write(self._generators[name], states["own"][name])
        for name in self.loaders.keys() & states["loaders"].keys():
            self.loaders[name].write_generators(states["loaders"][name])

    def epochs(self, total: int, body_ended: Hook) -> Iterator[int]:
        """Yield the epochs up to `total`."""
        if any(loader.is_through() for loader in self._all()):
            # An epoch's body was left after its batches had come to their end.
            self._begin_epoch(self.epoch + 1)
        while self.epoch < total:
            if self._resumed_at is Boundary.BATCH and self._body_start:
                # In mid-epoch the body's first lines run a second time: they draw what they drew
                # then, and batches() puts back after them.
                self._write_generators(self._body_start)
            else:
                self.put_back()
                self._body_start = self._read_generators()
            restores, outer, self._body = self.restores, self._body, Boundary.EPOCH
            self._step_at_start, self._has_looped = self.step, False
            if not self.loaders:
                self._stepped = set()
            try:
                yield self.epoch
            except GeneratorExit:
                self._stay()
                raise
            finally:
                self._body = outer
            if restores == self.restores:
                self._end_body(body_ended)
                self._begin_epoch(self.epoch + 1)
        self.put_back()

    def _end_body(self, body_ended: Hook) -> None:
        self._put_back_unlooped()
        # Whatever is left of the batches, the next epoch is what follows.
        self._has_ended_body = True
        try:
            body_ended()
        finally:
            self._has_ended_body = False

    def _put_back_unlooped(self) -> None:
        if any(loader.is_under_way() for loader in self._all()):
            # In mid-epoch, and the body did not loop again over what was left.
            self.put_back()

    def _stay(self) -> None:
        # Whoever loops again goes on from here, as after a resume.
        for loader in self._all():
            loader.stay()
        if any(loader.is_under_way() for loader in self._all()):
            self._resumed_at = Boundary.BATCH
            self.hold()

    def _begin_epoch(self, epoch: int) -> None:
        self._put_back_unlooped()
        for loader in self._all():
            loader.warn_of_uncounted()
            loader.leave(None)
            loader.rewind()
        self.epoch, self.batch = epoch, 0
        self._resumed_at, self._body_start = Boundary.EPOCH, None
        # A body without batches() has gone on from its start, where everything was put back already.
        self._held = None

    def steps(self, total: int, body_ended: Hook) -> Iterator[int]:
        """Yield the optimizer steps up to `total`."""
        while self.step < total:
            self.put_back()
            restores, outer, self._body = self.restores, self._body, Boundary.STEP
            self._step_in_hand = self.step
            self._body_begins()
            try:
                yield self.step
                if restores == self.restores:
                    try:
                        body_ended()
                    finally:
                        # A body whose step was skipped (a gradient scaler does that) is still one body.
                        self.step = self.steps_done()
            finally:
                self._body = outer
        self.put_back()
        self._has_looped = True

    def at(self, name: str) -> LoaderPosition:
        """Return where a loader stands, by its name."""
        return self.loaders.get(name) or self._found[name]

    def batches(self, name: str, hooks: Hooks, through: Through | None, loads_ahead: bool) -> Batches:
        """Return what is left of the epoch's batches."""
        loader = self.at(name)
        if self._body is not Boundary.EPOCH and loader.is_through():
            # Used without epochs(): the loader beginning anew is the next epoch.
            self._begin_epoch(self.epoch + 1)
        return Batches(loader, hooks, through, loads_ahead)


def _opened(loader: LoaderPosition) -> int:
    return loader.opened


class Batches:
    """The batches that are left of an epoch, to loop over once.

    `len()` is how many, where the loader knows.
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
        return max(0, len(self._loader.source) - self._loader.done)

    def __iter__(self) -> Iterator[Any]:
        is_elsewhere = threading.get_ident() != self._thread
        return self._loader.loop(self._hooks, self._through, self._loads_ahead, is_elsewhere)
