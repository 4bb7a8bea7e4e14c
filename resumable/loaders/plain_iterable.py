"""Reads an iterable that keeps no position: a resume loads its batches again and discards them."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import Any, NamedTuple

from ..errors import StateMismatch, warn
from ..progress import counted
from .generators import draws_between, rng
from .source import Source, size_of
from .workers import hugging_face


class Count(NamedTuple):
    """The place of a plain iterable."""

    batches: int
    before: int
    """Batches that the same iterator gave in epochs before this one."""
    draws: draws_between.States | None = None
    """The generators before the newest batch was asked for: a prefetcher loads the next one then."""
    between: draws_between.Between = MappingProxyType({})
    """The same before earlier batches, where the training had drawn: some load several ahead."""

    def all(self) -> int:
        """Return the batches of all epochs."""
        return self.batches + self.before


class PlainSource(Source):
    """The batches of an iterable, or of a function that returns an iterator, once an epoch."""

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
        self._log: draws_between.Log | None = None
        self._kept: deque[tuple[Count, Any]] = deque()
        """Batches that were on their way to the training at the save."""
        self._started: Started | None = Started()
        """Looks for threads until the first batch is there."""

    def root(self) -> object:
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
        if names and not hugging_face.only_reads_in_threads(self.loader):
            warn(
                f"{self._name} starts threads as it is looped over ({', '.join(names)}): what they draw at "
                "random comes at another moment after a resume. Give what loads ahead to "
                "state.batches(through=...), around a loader without threads. [R25]"
            )
        return batch

    def makes_again(self, path: str) -> bool:
        start = self._saved["start"] if self._saved else None
        # A generator in a module has the same path from everywhere.
        return start is not None and {path, f"loader.{path}"}.isdisjoint(start["generators"])

    def open(self, *, loads_ahead: bool = False) -> Iterator[Any]:
        saved, self._saved = self._saved, None
        if saved is not None and self._is_one_shot() and self._used is self.loader:
            self._stay_at(saved["batches"], saved["before"])
            return self._reading(self.loader)
        if saved is not None and saved["batches"] + saved["before"]:
            return self._go_on(saved)
        if self._is_one_shot() and self._used is self.loader and not self._has_ended:
            self._count = self._count._replace(batches=0, before=self._count.all())
            return self._reading(self.loader)
        self._count = Count(0, 0)
        self._kept.clear()
        # If nothing is drawn, leave devices alone: a write makes cuDNN draw new seeds for its dropout.
        self._start = draws_between.read(self._all(), devices=not isinstance(self.loader, _NEVER_DRAW))
        self._used, self._has_ended = self.loader, False
        batches = self._begin()
        self._log = self._new_log()
        return self._reading(batches)

    def _new_log(self) -> draws_between.Log | None:
        return None if isinstance(self.loader, _NEVER_DRAW) else draws_between.Log(self._all())

    def _go_on(self, saved: Mapping[str, Any]) -> Iterator[Any]:
        live = draws_between.read(self._all(), devices=True)
        self._start = saved["start"]
        draws_between.write(self._all(), saved["start"])
        self._used, self._has_ended = self.loader, False
        batches = self._begin()
        self._skip(batches, saved)
        self._log = self._new_log()
        draws_between.write(self._all(), live)
        return self._reading(batches)

    def _stay_at(self, batches: int, before: int) -> None:
        if batches + before != self._count.all():
            raise StateMismatch(
                f"{self._name} is an iterator, which cannot go back: it has given {self._count.all()} "
                f"batches, and {batches + before} were trained where the run continues.",
                fix="give the function that makes the iterator, without calling it, or an iterable that can "
                "begin again.",
            )
        self._count = self._count._replace(batches=batches, before=before)

    def _skip(self, batches: Iterator[Any], saved: Mapping[str, Any]) -> None:
        trained = saved["batches"] + saved["before"]
        last = trained + saved.get("ahead", 0)
        # Lists and ranges have their items: there is nothing to load.
        if not isinstance(self.loader, _NEVER_DRAW):
            warn(
                f"{self._name} keeps no position, so {trained} batches of it are loaded again and thrown "
                "away. A DataLoader, or anything with state_dict and load_state_dict, continues at once."
            )
        replay = draws_between.Replay(self._all(), saved, last)
        self._kept.clear()
        what = f"skipping what {self._name} gave before"
        for number in counted(last, what, self._shows()):
            replay.before(number)
            is_kept = number >= trained and not isinstance(self.loader, _NEVER_DRAW)
            draws = draws_between.read(self._all(), devices=True) if is_kept else None
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
                f"keeps of its draws for more than {draws_between.MOST} batches (a shuffle buffer) may not "
                "be what it was: let it draw from a generator of its own, or give it a state_dict. [R26]"
            )

    def _reading(self, batches: Iterator[Any]) -> Iterator[Any]:
        while self._kept:
            self._count, batch = self._kept.popleft()
            yield batch
        while True:
            at, draws, drawn = self._count, None, list[draws_between.Name]()
            if self._log:
                draws, drawn = self._log.before()
            try:
                batch = self._next(batches)
            except StopIteration:
                break
            if self._log:
                self._log.note()
            earlier = draws_between.extended(at.between, at.all() + 1, draws, drawn) if draws else at.between
            self._count = Count(at.batches + 1, at.before, draws, earlier)
            yield batch
        self._has_ended = True

    def _all(self) -> dict[str, Any]:
        return {"loader": self.loader, "extra": self._own}

    def size(self, batch: Any) -> int:
        return size_of(batch, None)

    def mark(self) -> Count:
        return self._count

    def collect(self, mark: Count | None, ahead: Sequence[Count], is_under_way: bool) -> dict[str, Any]:
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
        if earlier := draws_between.stored(newest.between, newest.all()):
            found["between"] = earlier
        if self._log and newest is not mark:
            found["ahead"] = newest.all() - mark.all()
        return found

    def in_question(self, setting: str, saved: Mapping[str, Any]) -> tuple[str, str] | None:
        # It invalidates everything only if the loader was none of this kind.
        return None if "before" in saved else ("", "")

    def reads(self, saved: Mapping[str, Any]) -> bool:
        return "before" in saved

    def restore(self, saved: Mapping[str, Any], other: AbstractSet[str]) -> None:
        self._saved = saved if "before" in saved else None

    def rewind(self) -> None:
        if self._saved and self._saved["batches"]:
            self._saved = None


_NEVER_DRAW = (range, list, tuple)


_SERVING = (
    "concurrent.futures.process",
    "multiprocessing",
    "resumable",
    "threading",
    "torch.utils.data",
    "tqdm",
)
"""Packages whose threads run no code of an iterable: they pass on batches, show a bar, or save."""


class Started:
    """Finds the threads that are started within its context, and may run an iterable's code."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._before: set[threading.Thread] = set()

    def __enter__(self) -> None:
        self._before = {*threading.enumerate()}

    def __exit__(self, *_: object) -> None:
        new = [thread for thread in threading.enumerate() if thread not in self._before]
        self._before = set()
        self.names += [thread.name for thread in new if _may_load(thread)]


def _may_load(thread: threading.Thread) -> bool:
    own = type(thread).__module__
    # A pool of threads is one of "processes" that are none.
    if own == "multiprocessing.dummy":
        return True
    module = getattr(getattr(thread, "_target", None), "__module__", None) or own
    return not any(f"{module}.".startswith(f"{package}.") for package in _SERVING)
