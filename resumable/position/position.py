"""The position of a training: its counters, its place in the data, and its random generators."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from ..boundary import Boundary
from ..errors import UsageError
from ..files.strict_json import typed
from ..loaders import choose_source
from ..loaders.generators import rng, search
from ..loaders.loader_source import LoaderSource
from . import means
from .accelerate import Accelerate
from .counted_loops import CountedLoops
from .loader_position import LoaderPosition
from .loader_set import LoaderSet
from .logged import Logged
from .other_loaders import Outside
from .random_streams import Hold, Streams
from .spikes import Spikes


def check(saved: Any) -> None:
    """Raise ValueError unless `Position.collect` can have returned it, as far as the loops depend on it.

    `Position.restore` comes last in a resume, and refuses nothing.
    """
    found = typed(dict, saved)
    counts = [found[name] for name in ("epoch", "batch", "step", "samples")] + typed(list, found["spikes"])
    if len(counts) != 6 or {*map(type, counts)} != {int} or not 0 <= min(counts) <= max(counts) < 1 << 63:
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
    for value in found.get("logged", {}).values():
        typed(int, value)
    # Checkpoints of earlier versions have none.
    if "means" in found:
        means.check(found["means"])


_NONE = type(None)
_KINDS: dict[str, tuple[type, ...]] = {
    "metrics": (dict,),
    "iterables": (dict,),
    "seed": (int, _NONE),
    "stepped": (list, _NONE),
    "body_start": (dict, _NONE),
}
_NEWER: dict[str, type] = {
    "loop_ends": list,
    "entry": str,
    "loop_draws": str,
    "logged": dict,
    "is_in_epochs": bool,
}
"""The entries that checkpoints of older versions lack."""


class Position(CountedLoops):
    """The position of a training: its counters, its data and its random generators."""

    def __init__(
        self,
        loaders: Mapping[str, Any],
        generators: Mapping[str, rng.Generator] | None = None,
        sample_seeds: bool = False,
        processes: int = 1,
        shows: Callable[[], bool] = lambda: False,
    ) -> None:
        self._generators = generators or {}
        self._shows = shows
        self.seed = torch.initial_seed() if sample_seeds else None
        """The seed of the samples' seeds, if each has its own; the same on every rank."""
        super().__init__(Streams(self._generators), LoaderSet(self._stands), processes)
        for name, loader in loaders.items():
            self.streams.add_loader(name, self._known.give(name, loader).generators)
        self.metrics: dict[str, float] = {}
        """The metrics that the last save was given."""
        self._devices: Callable[[], Collection[str]] = list
        """Returns the devices that this process trains on."""
        given = {n: at.source for n, at in self.loaders.items() if isinstance(at.source, LoaderSource)}
        self.outside = Outside(given, self._generators, shows, self._body_of_script, self._place)
        """The loaders that the script loops over by itself."""
        self.accelerate = Accelerate()
        self.spikes = Spikes()
        self.logged = Logged()

    def _stands(self, name: str, loader: Any) -> LoaderPosition:
        return LoaderPosition(
            choose_source.make(name, loader, self._generators, self._seeds, self._shows), self
        )

    def _seeds(self) -> tuple[int, int] | None:
        return None if self.seed is None else (self.seed, self.epoch)

    def join(self, processes: int) -> None:
        """Count the samples of this many processes."""
        self.processes = processes

    def share_seed(self, seed: int | None) -> None:
        """Make the samples' seeds from what all ranks have."""
        self.seed = seed

    def train_on(self, devices: Callable[[], Collection[str]]) -> None:
        """Record the devices of this process in checkpoints; `devices` returns them."""
        self._devices = devices

    def note_metrics(self, metrics: dict[str, float]) -> None:
        """Keep the metrics that a save was given, and log them."""
        self.metrics = metrics
        self.logged.note_metrics(metrics)

    def watch_optimizers(self, optimizers: Collection[Any], *, are_hooked: bool, counts_steps: bool) -> None:
        """Know the optimizers: whether hooks report steps, and whether those of the first are counted."""
        self.counts_steps = counts_steps
        if are_hooked:
            self.streams.expect_steps()
        self.accelerate.watch(optimizers)

    def watch_parts(
        self,
        gradients: Callable[[], object],
        hold: Hold,
        hold_gradients: Hold,
    ) -> None:
        """Look at the parts where a body may run a second time.

        `hold` and `hold_gradients` remember the settings and the gradients, and return what restores them.
        """
        self.gradients = gradients
        self.streams.watch(hold, hold_gradients)

    def collect(self) -> dict[str, Any]:
        """Return the position for a checkpoint."""
        counters = self.counters()
        gpus = sorted({*self._devices()} - {"cpu"})
        return {
            **counters,
            **({"devices": gpus} if gpus else {}),
            **self.streams.collect(counters["boundary"]),
            "is_in_epochs": self.is_in_epochs(),
            "stepped": None if self._stepped is None else sorted(self._stepped),
            "seed": self.seed,
            "metrics": self.metrics,
            "means": self.means.collect(),
            "spikes": [self.spikes.times, self.spikes.newest],
            "logged": self.logged.collect(),
            "iterables": {name: at.collect() for name, at in self._known.found.items()},
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
        has_gradients = bool(self.gradients and self.gradients())
        self.streams.was_read(self._resumed_at, is_again=is_counter and not has_gradients)

    def was_saved(self) -> None:
        """Note that the script called `save()`."""
        self._saved_in = self.body()
        self._has_saved_end = self._body is Boundary.EPOCH and self.boundary() is Boundary.EPOCH
        if self.is_outside():
            self.streams.was_saved(self.boundary() is Boundary.EPOCH)

    def is_step_without_loop(self) -> bool:
        """Whether the optimizer has made more than one step, and the script has used no loop of ours."""
        return self.updates > 1 and not self.streams.has_used_loops and self.is_outside()

    def _body_of_script(self) -> object:
        """Return a value that changes with every body and every step; None outside the loops."""
        return None if self.is_outside() else self._place()

    def _place(self) -> object:
        return self.body(), self.updates

    def restore(self, saved: Mapping[str, Any], unfit: AbstractSet[str] = frozenset()) -> None:
        """Restore what `collect` returned. Running loops end, and new ones continue from there.

        Iterables that are `unfit` begin again.
        """
        self.epoch, self.batch = saved["epoch"], saved["batch"]
        self.step, self.samples = saved["step"], saved["samples"]
        # The running body of `steps()` is no step: what it has trained is discarded.
        self._step_in_hand = self.step - 1
        self.metrics = dict(saved["metrics"])
        self.means.restore(saved.get("means"))
        self._resumed_at = saved["boundary"]
        self._was_in_epochs = saved.get("is_in_epochs", False)
        self.streams.restore(saved)
        self._has_handed_out = False
        self._stepped = None if saved["stepped"] is None else set(saved["stepped"])
        self.spikes, self._saved_in = Spikes(*saved["spikes"]), None
        self.seed = saved["seed"] if self.seed is not None and saved["seed"] is not None else self.seed
        self._known.restore_found(saved["iterables"], unfit)
        # Checkpoints of older versions do not have it.
        self.outside.restore(saved.get("outside", []))
        self.accelerate.restore(saved.get("accelerate"))
        self.logged.restore(saved.get("logged", {}))
        self.restores += 1

    def begin_at(self, epoch: int, batch: int, step: int, samples: int) -> None:
        """Continue a training that began without this library."""
        if batch:
            self._only_loader().begin_at(batch)
        for loader in self.loaders.values():
            loader.count_from(epoch)
        self.epoch, self.batch, self.step, self.samples = epoch, batch, step, samples
        self.streams.begin_elsewhere()
        self.streams.forget_body()

    def _only_loader(self) -> LoaderPosition:
        if len(self.loaders) == 1:
            return next(iter(self.loaders.values()))
        there = ", ".join(name.removeprefix("loader.") for name in self.loaders) or "none"
        raise UsageError(
            f"begin_at(batch=...) needs one loader; RunState was given: {there}.",
            fix="give RunState that one loader (loader=...), or begin at an epoch: begin_at(epoch=...).",
        )

    def refuse_to_go_back(self) -> None:
        """Raise UsageError if it is unknown which batch is in hand."""
        for loader in self._known.all:
            loader.refuse_to_leave_out()

    def go_back(self, saved: Mapping[str, Any]) -> None:
        """Count steps and samples as `collect` did, and stay where we are in the data.

        What was loaded since is left out, the batch in hand too.
        """
        is_left = any(loader.is_interrupted() for loader in self._known.all)
        self._saved_in = None
        for loader in self._known.all:
            loader.leave_out()
        self.step, self.samples = saved["step"], saved["samples"]
        self.metrics = dict(saved["metrics"])
        self.means.go_back(saved.get("means"))
        self.logged.restore(saved.get("logged", {}))
        # The running body is no step: what it has trained is discarded.
        self._step_in_hand = self.step - 1
        self._stepped = None if saved["stepped"] is None else set(saved["stepped"])
        if is_left:
            # The exception that is being handled has left the loop: the next body continues with the rest.
            self._stay()
            self.restores += 1

    def begin_own_streams(self, seed: str) -> None:
        """Begin streams of their own for all generators of the loaders: those restored are another rank's."""
        self.streams.forget()
        # The sums are another rank's, too.
        self.means.forget()
        for name, loader in self.loaders.items():
            loader.generators.begin_own_streams(f"{seed}/{name}")

    def close(self, *, now: bool = False) -> None:
        """Release what loads in the background; `now`: also what a loop still holds."""
        self.streams.close()
        self.outside.close()
        for loader in self._known.all:
            loader.source.close(now=now)

    def hold(self) -> None:
        """Remember the random generators for the next loop: draws until then do not count."""
        self.streams.hold()

    def show_held(self) -> None:
        """Put the generators where a checkpoint that is taken now has them."""
        self.streams.show_held(is_in_body=self.is_mid_epoch() or self._resumed_at is Boundary.STEP)

    def generators(self) -> list[rng.Generator]:
        """Return the generators that a checkpoint has, beside the global ones."""
        roots = {name: loader.source.root() for name, loader in self.loaders.items()}
        return [*self._generators.values(), *search.find(roots).values()]
