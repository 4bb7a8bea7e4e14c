"""Where batches come from, of every kind; each goes on in mid-epoch in its own way."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterDataPipe, MapDataPipe

from ..errors import StateMismatch, UsageError, warn
from . import between, rng, wrappers
from .dataloader import LoaderSource
from .threads import Started
from .torch_iterators import iterates_as_torch_does
from .worker import freeze, is_stateful, thaw


class Source(Protocol):
    """What `LoaderPosition` needs of a loader."""

    loader: Any
    has_cheap_marks: bool
    """Whether a mark can be made with every batch."""

    def __len__(self) -> int:
        """Return the batches of this epoch."""

    def settings(self) -> dict[str, Any]:
        """Return how the script made the loader."""

    def root(self) -> object:
        """Return what the loader's generators hang off."""

    def open(self, *, loads_ahead: bool = False) -> Iterator[Any]:
        """Return the batches that are left of the epoch. In mid-epoch, no generator is moved.

        `loads_ahead`: whether batches are asked for before the training wants them.
        """

    def load_ahead(self) -> None:
        """Note that from now on batches are asked for before the training wants them."""

    def can_load_ahead(self) -> bool:
        """Whether asking for a batch early leaves all that is drawn as it is."""

    def size(self, batch: Any) -> int:
        """Return the samples in the batch that it gave last."""

    def forgive(self) -> int:
        """Count the batches that failed, as the training goes on without them."""

    def mark(self) -> Any:
        """Return where the loader stands with the batch that it gave last."""

    def collect(self, mark: Any, ahead: Sequence[Any], is_under_way: bool) -> dict[str, Any]:
        """Return what goes on after the batch of the mark (None: the last one that was given).

        `ahead` are the marks of batches after it that the training has not had.
        """

    def in_question(self, setting: str, saved: Mapping[str, Any]) -> tuple[str, str] | None:
        """Return what a changed setting puts in question in mid-epoch: itself or everything (""), and why."""

    def effects(self, saved: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
        """Return what a change of a setting does to the bits, and why, where its name alone does not tell."""

    def restore(self, saved: Mapping[str, Any], other: AbstractSet[str]) -> None:
        """Go on from what `collect` returned. Of the settings, the `other` ones have changed since."""

    def begin_own_streams(self) -> None:
        """Go on without the workers that were saved: they are another rank's."""

    def rewind(self) -> None:
        """Stand at the beginning of an epoch."""

    def close(self, *, now: bool) -> None:
        """Let go of what runs in the background; end `now` what a loop still holds, too."""


class StatefulSource:
    """The batches of anything that keeps its own position: it has `state_dict` and `load_state_dict`."""

    has_cheap_marks = False

    def __init__(self, loader: Any, own: Mapping[str, rng.Generator]) -> None:
        self.loader = loader
        self._own = own
        self._saved: Mapping[str, Any] | None = None
        self._is_used = self._is_stuck = False
        self._first: Any = None
        """Its state before it was looped over."""
        self._given = 0

    def __len__(self) -> int:
        return len(self.loader)

    def settings(self) -> dict[str, Any]:
        """Return how the script made the loader."""
        return {"kind": type(self.loader).__name__}

    def root(self) -> object:
        """Return what the loader's generators hang off."""
        names = (
            ("sampler", "batch_sampler", "generator", "dataset")
            if isinstance(self.loader, DataLoader)
            else ()
        )
        return {name: getattr(self.loader, name) for name in names}

    def _all(self) -> dict[str, Any]:
        return {"loader": self.root(), "extra": self._own}

    def open(self, *, loads_ahead: bool = False) -> Iterator[Any]:
        """Return the batches that are left of the epoch. In mid-epoch, no generator is moved."""
        saved, self._saved = self._saved, None
        if not self._is_used and not isinstance(self.loader, DataLoader):
            # (to ask torchdata's for its state is to begin its epoch)
            self._first = _state_of(self.loader)
        self._is_used, self._given = True, 0
        if saved is None or saved["state"] is None:
            if self._is_stuck:
                self._unstick()
            return self._reading(iter(self.loader))
        held = between.read(self._all())
        iterator = self._go_on(saved, held)
        if saved["is_under_way"]:
            between.write(self._all(), held)
        return self._reading(iterator)

    def _go_on(self, saved: Mapping[str, Any], held: Mapping[str, Any]) -> Iterator[Any]:
        if saved["is_under_way"] and saved["given"] == self._length():
            # Some begin anew when they are asked for more after their last batch.
            self._saved = {**saved, "is_under_way": False}
            return iter(())
        self.loader.load_state_dict(saved["state"])
        self._is_stuck = self._first is not None and _state_of(self.loader) != freeze(saved["state"])
        self._given = saved["given"]
        if saved["is_under_way"]:
            return iter(self.loader)
        self._given = 0
        if isinstance(self.loader, DataLoader):
            # Torchdata's takes its state with one iterator, and begins the next epoch with another.
            iter(self.loader)
        elif self._is_stuck:
            self._unstick()
        between.write(self._all(), held)
        return self._next_epoch(iter(self.loader), held)

    def _unstick(self) -> None:
        # Hugging Face's begin where they were put until they are put elsewhere.
        self.loader.load_state_dict(thaw(self._first))
        self._is_stuck = False

    def _next_epoch(self, iterator: Iterator[Any], held: Mapping[str, Any]) -> Iterator[Any]:
        # Some begin anew by themselves when they were at the end of an epoch, some are still at its end.
        is_empty = True
        for batch in iterator:
            is_empty = False
            yield batch
        if is_empty:
            between.write(self._all(), held)
            yield from self.loader

    def _reading(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._given += 1
            yield batch

    def _length(self) -> int | None:
        try:
            return len(self.loader)
        except TypeError:
            return None

    def load_ahead(self) -> None:
        """Do nothing: what it loads is the same."""

    def can_load_ahead(self) -> bool:
        """Return that nobody knows what asking it early does."""
        return False

    def size(self, batch: Any) -> int:
        """Return the samples in a batch."""
        return size_of(batch, getattr(self.loader, "batch_size", None))

    def forgive(self) -> int:
        """Count nothing: what failed is in the loader's own position."""
        return 0

    def mark(self) -> tuple[int, Any]:
        """Return the batches it gave in this epoch, and the loader's own state, frozen."""
        return self._given, freeze(self.loader.state_dict())

    def collect(
        self, mark: tuple[int, Any] | None, ahead: Sequence[Any], is_under_way: bool
    ) -> dict[str, Any]:
        """Return the loader's own state."""
        if self._saved:
            return dict(self._saved)
        if not self._is_used and isinstance(self.loader, DataLoader):
            return {"state": None, "given": 0, "is_under_way": is_under_way}
        given, state = mark or self.mark()
        return {"state": thaw(state), "given": given, "is_under_way": is_under_way}

    def in_question(self, setting: str, saved: Mapping[str, Any]) -> tuple[str, str] | None:
        """Return that another kind of loader cannot go on at all."""
        return "", ""

    def effects(self, saved: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
        """Return that nothing is known of that."""
        return {}

    def restore(self, saved: Mapping[str, Any], other: AbstractSet[str]) -> None:
        """Give the state to the loader when it is looped over next."""
        # (at an epoch's end another kind of loader may take the place of this one)
        self._saved = saved if "state" in saved else None

    def begin_own_streams(self) -> None:
        """Begin as the script made it: the state is another rank's."""
        self._saved = None

    def rewind(self) -> None:
        """Stand at the beginning of an epoch."""
        if self._saved and self._saved["is_under_way"]:
            self._saved = None

    def close(self, *, now: bool) -> None:
        """Do nothing: the loader is the user's."""


@dataclass(frozen=True, slots=True)
class Count:
    """Where a plain iterable stands."""

    batches: int
    before: int
    """Batches that the same iterator gave in epochs before this one."""
    draws: between.States | None = None
    """The generators before the newest batch was asked for: a prefetcher loads the next one then."""
    between: between.Between = field(default_factory=dict)
    """The same before earlier batches, where the training had drawn: some load several ahead."""

    def all(self) -> int:
        """Return the batches of all epochs."""
        return self.batches + self.before


class PlainSource:
    """The batches of an iterable, or of a function that returns an iterator, once an epoch."""

    has_cheap_marks = True

    def __init__(
        self, loader: Any, name: str, own: Mapping[str, rng.Generator], shows: Callable[[], bool]
    ) -> None:
        self.loader = loader
        self._shows = shows
        self._name = name
        self._own = own
        self._saved: Mapping[str, Any] | None = None
        self._used: Any = None
        self._start: dict[str, Any] | None = None
        self._count = Count(0, 0)
        self._has_ended = False
        self._log: between.Log | None = None
        self._kept: deque[tuple[Count, Any]] = deque()
        """Batches that were on their way to the training at the save."""
        self._started: Started | None = Started()
        """Looks for threads until the first batch is there."""

    def __len__(self) -> int:
        return len(self.loader)

    def settings(self) -> dict[str, Any]:
        """Return how the script made the iterable."""
        return {"kind": type(self.loader).__name__}

    def root(self) -> object:
        """Return the iterable: its generators hang off it."""
        return self.loader

    def _is_one_shot(self) -> bool:
        return isinstance(self.loader, Iterator)

    def _begin(self) -> Iterator[Any]:
        with self._started or contextlib.nullcontext():
            made: Iterable[Any] = self.loader if isinstance(self.loader, Iterable) else self.loader()
            return iter(made)

    def _next(self, batches: Iterator[Any]) -> Any:
        if self._started is None:
            return next(batches)
        with self._started:
            batch = next(batches)
        names, self._started = self._started.names, None
        if names:
            warn(
                f"{self._name} starts threads as it is looped over ({', '.join(names)}). Random numbers that "
                "are drawn in them come at another moment after a resume: give what loads ahead to "
                "state.batches(through=...), around a loader without threads. If nothing is drawn there, "
                "nothing is lost."
            )
        return batch

    def makes_again(self, path: str) -> bool:
        """Whether the batches to be loaded again make this generator: when they began it was not there."""
        start = self._saved["start"] if self._saved else None
        # (what hangs in a module has the same path from everywhere)
        return start is not None and {path, f"loader.{path}"}.isdisjoint(start["generators"])

    def open(self, *, loads_ahead: bool = False) -> Iterator[Any]:
        """Return the batches that are left of the epoch. In mid-epoch, no generator is moved."""
        saved, self._saved = self._saved, None
        if saved is not None and self._is_one_shot() and self._used is self.loader:
            self._stay_at(saved["batches"], saved["before"])
            return self._reading(self.loader)
        if saved is not None and saved["batches"] + saved["before"]:
            return self._go_on(saved)
        if self._is_one_shot() and self._used is self.loader and not self._has_ended:
            self._count = replace(self._count, batches=0, before=self._count.all())
            return self._reading(self.loader)
        self._count = Count(0, 0)
        self._kept.clear()
        # (where nothing is drawn, no device is written to: cuDNN would draw new seeds for its dropout)
        self._start = between.read(self._all(), devices=not isinstance(self.loader, _NEVER_DRAW))
        self._used, self._has_ended = self.loader, False
        batches = self._begin()
        self._log = self._new_log()
        return self._reading(batches)

    def _new_log(self) -> between.Log | None:
        return None if isinstance(self.loader, _NEVER_DRAW) else between.Log(self._all())

    def _go_on(self, saved: Mapping[str, Any]) -> Iterator[Any]:
        live = between.read(self._all(), devices=True)
        self._start = saved["start"]
        between.write(self._all(), saved["start"])
        self._used, self._has_ended = self.loader, False
        batches = self._begin()
        self._skip(batches, saved)
        self._log = self._new_log()
        between.write(self._all(), live)
        return self._reading(batches)

    def _stay_at(self, batches: int, before: int) -> None:
        if batches + before != self._count.all():
            raise StateMismatch(
                f"{self._name} is an iterator, which cannot go back: it has given {self._count.all()} "
                f"batches, and {batches + before} were trained where the run goes on.",
                fix="give the function that makes the iterator, without calling it, or an iterable that can "
                "begin again.",
            )
        self._count = replace(self._count, batches=batches, before=before)

    def _skip(self, batches: Iterator[Any], saved: Mapping[str, Any]) -> None:
        from tqdm import tqdm

        trained = saved["batches"] + saved["before"]
        last = trained + saved.get("ahead", 0)
        # (these load nothing: their items are there)
        if not isinstance(self.loader, _NEVER_DRAW):
            warn(
                f"{self._name} keeps no position, so {trained} batches of it are loaded once more and thrown "
                "away. A DataLoader, or anything with state_dict and load_state_dict, goes on at once."
            )
        replay = between.Replay(self._all(), saved, last)
        self._kept.clear()
        what = f"skipping what {self._name} gave before"
        for number in tqdm(range(1, last + 1), desc=what, unit=" batches", disable=not self._shows()):
            replay.before(number)
            is_kept = number >= trained and not isinstance(self.loader, _NEVER_DRAW)
            draws = between.read(self._all(), devices=True) if is_kept else None
            try:
                batch = self._next(batches)
            except StopIteration:
                raise StateMismatch(
                    f"{self._name} has come to its end after {number - 1} batches, and {trained} were "
                    "trained.",
                    fix="give it the data that the run was started with; an iterator that is new in every "
                    "epoch is given as the function that makes it.",
                ) from None
            if number >= trained:
                place = Count(number - saved["before"], saved["before"], draws, replay.between)
                self._kept.append((place, batch))
        self._count, _ = self._kept.popleft()
        self._warn_of_shared_draws(replay.shared())

    def _warn_of_shared_draws(self, names: list[str]) -> None:
        if names:
            warn(
                f"{self._name} and the training draw from the same generators ({', '.join(names)}). What it "
                f"keeps of its draws for more than {between.MOST} batches (a shuffle buffer) may not be what "
                "it was: let it draw from a generator of its own, or give it a state_dict."
            )

    def _reading(self, batches: Iterator[Any]) -> Iterator[Any]:
        while self._kept:
            self._count, batch = self._kept.popleft()
            yield batch
        while True:
            at, draws, drawn = self._count, None, list[between.Name]()
            if self._log:
                draws, drawn = self._log.before()
            try:
                batch = self._next(batches)
            except StopIteration:
                break
            if self._log:
                self._log.note()
            earlier = between.extended(at.between, at.all() + 1, draws, drawn) if draws else at.between
            self._count = Count(at.batches + 1, at.before, draws, earlier)
            yield batch
        self._has_ended = True

    def _all(self) -> dict[str, Any]:
        return {"loader": self.loader, "extra": self._own}

    def load_ahead(self) -> None:
        """Do nothing: what it loads is the same."""

    def can_load_ahead(self) -> bool:
        """Return that nobody knows what asking it early does."""
        return False

    def size(self, batch: Any) -> int:
        """Return the samples in a batch."""
        return size_of(batch, None)

    def forgive(self) -> int:
        """Count nothing: an iterator that has raised is at its end."""
        return 0

    def mark(self) -> Count:
        """Return how many batches it has given."""
        return self._count

    def collect(self, mark: Count | None, ahead: Sequence[Count], is_under_way: bool) -> dict[str, Any]:
        """Return how many batches to leave out."""
        if self._saved is not None:
            return dict(self._saved)
        mark = mark or self._count
        goes_on = self._is_one_shot() and not self._has_ended
        before = mark.before + (0 if is_under_way else mark.batches) if goes_on else 0
        batches = mark.batches if is_under_way else 0
        if not batches and not before:
            return {"batches": 0, "before": 0, "start": None, "draws": None}
        newest = [mark, *ahead, *(count for count, _ in self._kept)][-1]
        found = {"batches": batches, "before": before, "start": self._start, "draws": newest.draws}
        if earlier := between.stored(newest.between, newest.all()):
            found["between"] = earlier
        if self._log and newest is not mark:
            found["ahead"] = newest.all() - mark.all()
        return found

    def in_question(self, setting: str, saved: Mapping[str, Any]) -> tuple[str, str] | None:
        """Return everything, where it was no iterable of any kind."""
        return None if "before" in saved else ("", "")

    def effects(self, saved: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
        """Return that nothing is known of that."""
        return {}

    def restore(self, saved: Mapping[str, Any], other: AbstractSet[str]) -> None:
        """Leave out what was given before when it is looped over next."""
        self._saved = saved if "before" in saved else None

    def begin_own_streams(self) -> None:
        """Do nothing: there are no workers."""

    def rewind(self) -> None:
        """Stand at the beginning of an epoch."""
        if self._saved and self._saved["batches"]:
            self._saved = None

    def close(self, *, now: bool) -> None:
        """Do nothing: the iterable is the user's."""


def _state_of(loader: Any) -> Any:
    # Asked for before the first batch, some have none yet.
    with contextlib.suppress(Exception):
        return freeze(loader.state_dict())
    return None


_NEVER_DRAW = (range, list, tuple)


def size_of(batch: Any, otherwise: int | None) -> int:
    """Return the samples in a batch, as its first tensor has them."""
    while isinstance(batch, (Mapping, list, tuple)) and batch:
        batch = next(iter(batch.values() if isinstance(batch, Mapping) else batch))
    return batch.shape[0] if isinstance(batch, torch.Tensor) and batch.ndim else otherwise or 1


def make(
    name: str,
    loader: Any,
    own: Mapping[str, rng.Generator],
    seeds: Callable[[], tuple[int, int] | None],
    shows: Callable[[], bool],
) -> Source:
    """Return the source for what the user loops over; `shows`: whether it shows how far it has come."""
    if maker := wrappers.maker_of(loader):
        raise UsageError(
            f"{name} is a {type(loader).__name__}, which counts its epochs from 0 in every process, so it "
            "cannot go on in the middle of a training.",
            fix="give RunState the DataLoader that it was made of (with a DistributedSampler where there are "
            f"several processes), and loop over state.batches(device={maker}.device).",
        )
    is_plain = isinstance(loader, DataLoader) and iterates_as_torch_does(loader)
    # (torch seeds and cuts data pipes in ways of their own)
    if is_plain and not isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        return LoaderSource(loader, own, seeds, shows)
    if is_stateful(loader) and isinstance(loader, Iterable):
        return StatefulSource(loader, own)
    if isinstance(loader, Iterable) or (callable(loader) and not isinstance(loader, torch.nn.Module)):
        _refuse_kept_workers(name, loader)
        return PlainSource(loader, name.removeprefix("loader."), own, shows)
    raise UsageError(
        f"{name} is a {type(loader).__name__}, which cannot be looped over.",
        fix="pass a torch DataLoader, another iterable, a function that returns an iterator, or a dict of "
        "named ones.",
    )


def _refuse_kept_workers(name: str, loader: Any) -> None:
    """Raise UsageError for what wraps a DataLoader with persistent workers: it cannot put them back."""
    if any(inner.persistent_workers and inner.num_workers for inner in rng.inside(loader, DataLoader)):
        kind = type(loader).__name__
        raise UsageError(
            f"{name} is a {kind} around a DataLoader with persistent_workers=True: to go on in the middle of "
            "an epoch it would load the epoch again, and the workers' random numbers would be others.",
            fix="give RunState the DataLoader itself, and put the rest around its batches: "
            f"state.batches(through=lambda batches: {kind}(batches, ...)).",
        )
