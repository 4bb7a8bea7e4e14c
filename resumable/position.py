"""Where we are in the data, and the loader that goes on from there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

from . import disk, rng
from .boundary import Boundary
from .errors import StateMismatch, Unsupported, UsageError

Hook = Callable[[], None]


class Position:
    """The counters of a training, and the loops that move them."""

    def __init__(
        self, loaders: Mapping[str, DataLoader[Any]], generators: Mapping[str, rng.Generator] | None = None
    ) -> None:
        self.epoch = 0
        self.batch = 0
        self.step = 0
        self.samples = 0
        self.loaders = {name: LoaderPosition(loader, self) for name, loader in loaders.items()}
        self.counts_steps = False
        """Whether a hook counts the optimizer's steps here."""
        self._body: Boundary | None = None
        self._step_in_hand = 0
        self._step_at_start = 0
        self._has_looped = False
        self._stepped: set[str] | None = None
        """The optimizers that have made a step since the last batch was handed out."""
        self.restores = 0
        self._resumed_at = Boundary.OUTSIDE
        self._generators = generators or {}
        self._held: Mapping[str, Any] | None = None
        self._body_start: Mapping[str, Any] | None = None

    def boundary(self) -> Boundary:
        """Return where a checkpoint taken now stands."""
        if any(loader.is_under_way() for loader in self.loaders.values()):
            return Boundary.BATCH
        if self._body is Boundary.STEP:
            return Boundary.STEP
        if any(loader.is_over for loader in self.loaders.values()):
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
        stepped = None if self._stepped is None else sorted(self._stepped)
        return {**counters, "body_start": self._body_start if in_epoch else None, "stepped": stepped}

    def counters(self) -> dict[str, Any]:
        """Return the counters as a resume is to find them: what is in hand counts as done."""
        boundary = self.boundary()
        in_hand = [loader for loader in self.loaders.values() if loader.in_hand]
        batches = [loader.done + loader.in_hand for loader in in_hand] or [self.batch]
        return {
            "boundary": boundary,
            "epoch": self.epoch + (boundary is Boundary.EPOCH),
            "batch": batches[-1] if boundary is Boundary.BATCH else 0,
            "step": self._steps_done(),
            "samples": self.samples + sum(loader.size_in_hand for loader in in_hand),
        }

    def _steps_done(self) -> int:
        in_body = self._body is Boundary.STEP
        return max(self.step, self._step_in_hand + 1) if in_body else self.step

    def body(self) -> Any:
        """Return what tells the body that is running from all others."""
        in_hand = [(name, at.done) for name, at in self.loaders.items() if at.in_hand]
        return self.epoch, self._step_in_hand, in_hand

    def count_step(self, optimizer: str, is_first: bool) -> None:
        """Note that an optimizer has made a step; those of the first are counted."""
        self.step += is_first
        if self._stepped is not None:
            self._stepped.add(optimizer)

    def is_accumulating(self, optimizer: str) -> bool:
        """Whether an optimizer made no step since a batch was handed out: its gradients are state then."""
        return self._stepped is not None and optimizer not in self._stepped

    def handed_out(self, batch: int) -> None:
        """Note that a batch is in hand."""
        self.batch, self._stepped = batch, set()

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Stand where `collect` stood. Loops that are running end, and new ones go on from there."""
        self.epoch, self.batch = saved["epoch"], saved["batch"]
        self.step, self.samples = saved["step"], saved["samples"]
        self._resumed_at, self._body_start = saved["boundary"], saved["body_start"]
        self._stepped = None if saved["stepped"] is None else set(saved["stepped"])
        self.restores += 1

    def hold(self) -> None:
        """Remember the random generators for where the loops go on: draws until then do not count."""
        self._held = self._read_generators()

    def put_back(self) -> None:
        """Put the random generators back as they were held."""
        if self._held is not None:
            self._write_generators(self._held)
            self._held = None

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
        if any(loader.is_through() for loader in self.loaders.values()):
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
                body_ended()
                self._begin_epoch(self.epoch + 1)
        self.put_back()

    def _stay(self) -> None:
        # Whoever loops again goes on from here, as after a resume.
        for loader in self.loaders.values():
            loader.stay()
        if any(loader.is_under_way() for loader in self.loaders.values()):
            self._resumed_at = Boundary.BATCH
            self.hold()

    def _begin_epoch(self, epoch: int) -> None:
        for loader in self.loaders.values():
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
            try:
                yield self.step
            finally:
                done, self._body = self._steps_done(), outer
            if restores == self.restores:
                body_ended()
                # A body whose step was skipped (a gradient scaler does that) is still one body.
                self.step = done
        self.put_back()
        self._has_looped = True

    def batches(self, name: str, body_ended: Hook) -> Batches:
        """Return what is left of the epoch's batches."""
        loader = self.loaders[name]
        if self._body is not Boundary.EPOCH and loader.is_through():
            # Used without epochs(): the loader beginning anew is the next epoch.
            self._begin_epoch(self.epoch + 1)
        return Batches(loader, body_ended)


class Batches:
    """The batches that are left of an epoch, to loop over once.

    `len()` is how many, where the loader knows.
    """

    def __init__(self, loader: LoaderPosition, body_ended: Hook) -> None:
        self._loader = loader
        self._body_ended = body_ended

    def __len__(self) -> int:
        return max(0, len(self._loader.loader) - self._loader.done)

    def __iter__(self) -> Iterator[Any]:
        return self._loader.iterate(self._body_ended)


class LoaderPosition:
    """Where one loader stands in its epoch."""

    def __init__(self, loader: DataLoader[Any], position: Position) -> None:
        _refuse(loader)
        self.loader = loader
        self._split = _split(loader.dataset)
        self.done = 0
        """Batches of this epoch that were trained."""
        self.in_hand = False
        self.size_in_hand = 0
        self.is_over = False
        """Whether this epoch's batches have come to their end, or were left for good."""
        self._position = position
        self._start: Mapping[str, Any] | None = None
        self._last: str | None = None
        self._to_skip = 0
        self._indices: _Tap | None = None
        self._step_then = 0
        self._over_at_resume = False
        # The exception that was being handled around the loop, once the loop has been left.
        self._left_under: tuple[BaseException | None] | None = None
        self._stays = False
        self._lap = 0

    def settings(self) -> dict[str, Any]:
        """Return how the script made the loader."""
        dataset = self.loader.dataset
        return {
            "batch_size": self.loader.batch_size,
            "drop_last": self.loader.drop_last,
            "num_workers": self.loader.num_workers,
            "sampler": type(self.loader.sampler).__name__,
            "batch_sampler": type(self.loader.batch_sampler).__name__,
            "dataset_length": len(dataset) if hasattr(dataset, "__len__") else None,
            "split": self._split,
        }

    def is_under_way(self) -> bool:
        """Whether the epoch's batches have begun and not ended."""
        self._settle()
        return not self.is_over and (self.in_hand or self.done > 0)

    def _settle(self) -> None:
        # Whether a loop was left by a break shows only later, when no exception is being handled:
        # then the script is through with this epoch's batches.
        if self._left_under and not self._stays and not self.is_interrupted():
            self._left_under, self.is_over = None, True

    def is_through(self) -> bool:
        """Whether looping over the batches again would be another epoch."""
        return not self.is_under_way() and self.is_over and not self._over_at_resume

    def stay(self) -> None:
        """Stay in mid-epoch: the body of epochs() was left too, so the loop was not left for good."""
        if self.in_hand:
            self.leave(None)
        if self._left_under:
            self._stays, self._to_skip = True, self.done
            self._lap += 1

    def is_interrupted(self) -> bool:
        """Whether an exception that left the loop is being handled right now."""
        return self._left_under is not None and sys.exc_info()[1] not in (None, *self._left_under)

    def collect(self) -> dict[str, Any]:
        """Return the position as a resume is to find it."""
        under_way = self.is_under_way()
        if under_way and (problem := self._inexact()):
            raise problem
        return {
            "batch": self.done + self.in_hand if under_way else 0,
            "is_over": self.is_over and self._position.boundary() is Boundary.BATCH,
            "start": self._start if under_way else None,
            "last": self._last_indices() if under_way else None,
            "generators": self.read_generators(),
            "settings": self.settings(),
        }

    def _last_indices(self) -> str | None:
        return self._fingerprint(self._indices.last) if self.in_hand and self._indices else self._last

    def _inexact(self) -> Unsupported | None:
        advice = "save where an epoch ends, after the loop over its batches"
        if isinstance(self.loader.dataset, IterableDataset):
            return Unsupported(
                "the position inside an epoch of an IterableDataset cannot be kept yet.",
                fix=f"{advice}.",
            )
        if type(self.loader).__iter__ is not DataLoader.__iter__:
            return Unsupported(
                f"the position inside an epoch of a {type(self.loader).__name__} cannot be kept yet.",
                fix=f"{advice}, or use a plain DataLoader.",
            )
        if self.loader.num_workers:
            return Unsupported(
                "the position inside an epoch of a DataLoader with workers cannot be kept yet.",
                fix=f"{advice}, or make the loader with num_workers=0.",
            )
        return None

    def differences(self, saved: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield what makes a position in mid-epoch meaningless."""
        now = self.settings()
        changed = [
            f"{key} {then} in the checkpoint, {now[key]} in the code"
            for key, then in saved["settings"].items()
            if then != now[key]
        ]
        if saved["batch"] and changed:
            # The loader as a whole: left as the script made it, it begins the epoch's data anew.
            yield "", f"{'; '.join(changed)}, and the checkpoint is in mid-epoch"
        for path in saved["generators"].keys() ^ self.read_generators().keys():
            yield path, "a random generator in the checkpoint or in the code, but not in both"

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Stand where `collect` stood."""
        self.rewind()
        self.done = self._to_skip = saved["batch"]
        self.is_over = self._over_at_resume = saved["is_over"]
        self._start, self._last = saved["start"], saved["last"]
        self.write_generators(saved["generators"])

    def rewind(self) -> None:
        """Stand at the beginning of an epoch."""
        self.done = self._to_skip = self.size_in_hand = 0
        self.in_hand = self.is_over = self._over_at_resume = False
        self._start = self._last = self._indices = self._left_under = None
        self._stays = False
        self._lap += 1

    def write_generators(self, states: Mapping[str, Any]) -> None:
        """Put the generators that hang off the loader into these states."""
        for path, generator in rng.find(self.loader).items():
            if path in states:
                rng.write(generator, states[path])

    def read_generators(self) -> dict[str, Any]:
        """Return the states of the generators that hang off the loader."""
        return {path: rng.read(found) for path, found in rng.find(self.loader).items()}

    def iterate(self, body_ended: Hook) -> Iterator[Any]:
        """Yield the batches that are left, counting one as done when the next is asked for."""
        if self.is_over or self.in_hand:
            self._refuse_to_repeat()
            return
        lap = self._lap
        outer = sys.exc_info()[1]
        batches = self._open()
        try:
            for batch in batches:
                self._hand_out(batch)
                yield batch
                if lap != self._lap:
                    return
                body_ended()
                self._take_back()
            self.is_over = True
        except BaseException:
            # An iterator that somebody kept may be closed when the next epoch has long begun.
            if lap == self._lap:
                self.leave(outer)
            raise

    def _refuse_to_repeat(self) -> None:
        if not self._over_at_resume:
            raise UsageError(
                "this epoch's batches have been looped over already.",
                fix="loop over state.batches() once in each body of state.epochs(); for another pass "
                "over other data use the loader itself, or give it to RunState under a name of its own.",
            )
        self._over_at_resume = False

    def _open(self) -> Any:
        iterator: Any
        if self._to_skip:
            iterator = self._reopen()
            self._position.put_back()
        else:
            self._position.put_back()
            self._start = {"random": rng.collect(devices=False), "generators": self.read_generators()}
            iterator = iter(self.loader)
        self._left_under, self._stays = None, False
        if self._inexact() is None:
            self._indices = iterator._sampler_iter = _Tap(iterator._sampler_iter)
        return iterator

    def _reopen(self) -> Any:
        """Draw the epoch's order again, from where it was drawn, and leave out what is done, unloaded."""
        assert self._start is not None
        random_now, generators_now = rng.collect(devices=False), self.read_generators()
        rng.restore(self._start["random"])
        self.write_generators(self._start["generators"])
        iterator: Any = iter(self.loader)
        last = None
        for number in range(self._to_skip):
            if (last := next(iterator._sampler_iter, None)) is None:
                raise _other_data(f"it has {number} batches now, and {self._to_skip} were trained")
        if self._last not in (None, self._fingerprint(last)):
            raise _other_data(f"batch {self._to_skip} is of other samples now")
        rng.restore(random_now)
        self.write_generators(generators_now)
        self._to_skip = 0
        return iterator

    def _fingerprint(self, indices: Any) -> str | None:
        # A sampler of the user's own may choose by what was trained meanwhile: it cannot be checked.
        samplers = (self.loader.batch_sampler, self.loader.sampler)
        ours = all(s is None or type(s).__module__.startswith("torch.") for s in samplers)
        return disk.digest(repr(indices).encode()) if ours else None

    def _hand_out(self, batch: Any) -> None:
        self.in_hand, self._step_then = True, self._position.step
        self.size_in_hand = self._indices.size() if self._indices else _size(batch, self.loader)
        self._position.handed_out(self.done)

    def _take_back(self) -> None:
        self.done += 1
        self._last = self._last_indices()
        self._position.batch = self.done
        self._position.samples += self.size_in_hand
        self.in_hand, self.size_in_hand = False, 0

    def leave(self, outer: BaseException | None) -> None:
        """Note that the loop was left in the middle: for good by a break, or by an exception."""
        is_trained = not self._position.counts_steps or self._position.step > self._step_then
        if self.in_hand and is_trained:
            self._take_back()
        self.in_hand, self.size_in_hand = False, 0
        self._left_under = (outer,)


class _Tap:
    """A sampler's iterator that remembers the indices it gave last."""

    def __init__(self, inner: Iterator[Any]) -> None:
        self._inner = inner
        self.last: Any = None

    def __next__(self) -> Any:
        self.last = next(self._inner)
        return self.last

    def size(self) -> int:
        return len(self.last) if isinstance(self.last, (list, tuple)) else 1


def _size(batch: Any, loader: DataLoader[Any]) -> int:
    if loader.batch_sampler is None:
        return 1
    while isinstance(batch, (Mapping, list, tuple)) and batch:
        batch = next(iter(batch.values() if isinstance(batch, Mapping) else batch))
    return batch.shape[0] if isinstance(batch, torch.Tensor) and batch.ndim else loader.batch_size or 1


def _split(dataset: Any) -> str | None:
    # A split that is drawn anew at every start lets the samples to validate on into the training.
    if isinstance(dataset, Subset):
        return disk.digest(repr([int(index) for index in dataset.indices]).encode())[:8]
    return None


def _other_data(problem: str) -> StateMismatch:
    return StateMismatch(
        f"the loader does not give the batches that it gave before: {problem}.",
        fix="give it the dataset, sampler and batch size that the run was started with, or go on from a "
        "checkpoint that was saved where an epoch ended: resume=its number.",
    )


def _refuse(loader: Any) -> None:
    if not isinstance(loader, DataLoader):
        raise UsageError(
            f"loader is a {type(loader).__name__}, not a DataLoader.",
            fix="pass a torch DataLoader, or a dict of named ones; loop over other data without batches().",
        )
    if loader.persistent_workers:
        raise Unsupported(
            "persistent workers keep random generators of their own from epoch to epoch, which cannot be "
            "saved yet.",
            fix="make the loader with persistent_workers=False.",
        )
