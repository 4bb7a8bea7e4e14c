"""Iterators that the script itself makes of DataLoaders, outside `state.batches()`."""

from __future__ import annotations

import gc
import multiprocessing
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import util
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader, IterDataPipe, MapDataPipe

from ..errors import CannotStore, Once, UsageError
from ..loaders.generators import rng
from ..loaders.loader_source import LoaderSource
from ..loaders.workers import torch_iterators
from ..loaders.workers.states import Standings
from ..variables.script import frames

Hook = Callable[[], None]

_EARLY = "was iterated before RunState.load"
_OWN_KIND = "has an iterator of its own kind"
_SOURCES = (
    "resumable.position.batch_loop",
    "resumable.position.loader_position",
    "resumable.position.prefetching",
    "resumable.loaders.plain_iterable",
    "resumable.loaders.stateful_loader",
)


@dataclass(slots=True)
class _Entry:
    """A loader with persistent workers that was not given to RunState, and that has begun."""

    settings: Mapping[str, Any]
    saved: Mapping[str, Any] | None = None
    """The states of its workers in the checkpoint, until the loader is iterated again."""
    iterator: weakref.ref[_Kept] | None = None

    def collect(self) -> dict[str, Any] | None:
        """Return the states of the workers; None if the script has dropped the loader."""
        if self.saved is not None:
            return {"settings": self.settings, "source": self.saved}
        kept = self.kept()
        return None if kept is None else {"settings": self.settings, "source": kept.collect()}

    def kept(self) -> _Kept | None:
        """Return the loader's iterator, if it has begun here and the script still has it."""
        return None if self.iterator is None else self.iterator()


class Outside:
    """The DataLoaders that the script iterates over by itself.

    A loader with `persistent_workers=True` draws its seed once a process. Its workers' states are saved, and
    restored when it is first iterated after a resume, so no generator moves more often than it did. A loader
    that was given to RunState may be inspected, but not trained from: its place would be unknown.
    """

    def __init__(
        self,
        given: Mapping[str, LoaderSource],
        own: Mapping[str, rng.Generator],
        shows: Callable[[], bool],
        body: Callable[[], object],
        place: Callable[[], object],
    ) -> None:
        self._given = given
        self._own = own
        self._shows = shows
        self._body = body
        """Returns a value that no other body of the loops has; None outside of them."""
        self._place = place
        """Returns a value that changes with every body and every step, also outside of loops."""
        self._plain: list[tuple[weakref.ref[torch_iterators.Watched], object, str]] = []
        """Passes over other loaders: the training's place as they began, and the dataset's name."""
        self._once = Once()
        self._entries: list[_Entry] = []
        self._restored: Sequence[Mapping[str, Any]] | None = None
        """The state in the checkpoint, until a loop continues from there."""
        self._settings: weakref.WeakKeyDictionary[DataLoader[Any], dict[str, Any]]
        self._settings = weakref.WeakKeyDictionary()
        self._children: set[int | None] = set()
        self._has_begun = self._is_hooked = False

    def look(self) -> None:
        """Begin to make the iterators, and look for those that loaders have kept from before."""
        if not self._is_hooked:
            torch_iterators.hook(self)
            self._is_hooked = True
        if self._restored or any(child.daemon for child in multiprocessing.active_children()):
            for loader in _persistent():
                if not any(loader is source.loader for source in self._given.values()):
                    self._adopt(loader)

    def begin(self, loader: DataLoader[Any]) -> Iterator[Any] | None:
        """Return an iterator of a loader; None to leave it to torch."""
        for name, source in self._given.items():
            if source.loader is loader:
                return self._begin_given(name, loader)
        if _is_unknown(loader):
            return None
        if not _persists(loader):
            return self._begin_plain(loader)
        self._settings.setdefault(loader, _settings(loader))
        return self._begin_other(loader)

    def begin_loop(self) -> None:
        """Look again as the first loop begins; what was iterated since a restore does not count."""
        if self._restored is not None:
            self.restore(self._restored)
        elif self._has_begun:
            return
        self.look()
        self._restored, self._has_begun = None, True

    def collect(self) -> list[dict[str, Any]]:
        """Return the states of the workers of all loaders in use, in the order of their first use."""
        self._warn_of_unseen()
        self._warn_of_plain()
        return [saved for entry in self._entries if (saved := entry.collect())]

    def restore(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Let the loaders begin with the saved states of their workers when they are iterated next."""
        self._restored = saved
        self._entries = [_Entry(one["settings"], one["source"]) for one in saved]
        for loader in self._settings:
            if isinstance(torch_iterators.kept(loader), _Kept):
                torch_iterators.forget(loader)

    def close(self) -> None:
        """Stop making iterators."""
        torch_iterators.unhook(self)
        self._settings.clear()

    def _adopt(self, loader: DataLoader[Any]) -> None:
        iterator = torch_iterators.kept(loader)
        if loader in self._settings or _is_unknown(loader):
            return
        if isinstance(iterator, _Kept) and self._restored is None:
            self._entries.append(_Entry(_settings(loader), iterator=weakref.ref(iterator)))
        elif isinstance(iterator, _Kept) or (iterator is not None and self._saved(_settings(loader))):
            torch_iterators.forget(loader)
        elif iterator is not None:
            self._warn_of(loader, _EARLY)
            return
        self._settings[loader] = _settings(loader)

    def _saved(self, settings: Mapping[str, Any]) -> list[_Entry]:
        return [one for one in self._entries if one.saved is not None and one.settings == settings]

    def _begin_other(self, loader: DataLoader[Any], check: Hook = lambda: None) -> _Kept:
        settings = self._settings[loader]
        saved = self._saved(settings)
        self._warn_of_twins(loader, len(saved))
        source = LoaderSource(torch_iterators.copied(loader), self._own, lambda: None, self._shows)
        if saved and saved[0].saved is not None:
            entry = saved[0]
            source.restore(saved[0].saved, set())
            entry.saved = None
        else:
            entry = _Entry(settings)
            self._entries.append(entry)
        kept = _Kept(source, check)
        entry.iterator = weakref.ref(kept)
        return kept

    def _begin_plain(self, loader: DataLoader[Any]) -> Iterator[Any]:
        iterator = torch_iterators.watched(loader)
        if _is_asked_by_us():
            # It is inside of a prefetcher that was given.
            return iterator
        there = [one for one in self._plain if one[0]() is not None]
        self._plain = [*there, (weakref.ref(iterator), self._place(), _named(loader))]
        return iterator

    def _warn_of_plain(self) -> None:
        """Warn of a pass in whose middle the training continues: its place would be unknown."""
        for reference, began, name in self._plain:
            iterator = reference()
            if iterator is not None and iterator.is_under_way() and began != self._place():
                self._once.warn(
                    f"a DataLoader over {name} was not given to RunState, and the training is in the middle "
                    "of a pass over it: a resume from this checkpoint begins the pass again. Make it before "
                    "RunState.load, give it there as loader=, and loop over state.batches(). [R20]"
                )

    def _begin_given(self, name: str, loader: DataLoader[Any]) -> Iterator[Any]:
        began, began_at = self._body(), self._place()

        def check() -> None:
            if (now := self._body()) is not None and now != began:
                self._refuse(name)
            elif now is None and self._place() != began_at:
                self._warn_of_given(name)

        if not _persists(loader):
            return torch_iterators.watched(loader, check)
        self._settings.setdefault(loader, _settings(loader))
        return self._begin_other(loader, check)

    def _warn_of_given(self, name: str) -> None:
        short = repr(name.removeprefix("loader.")) if len(self._given) > 1 else ""
        self._once.warn(
            f"{name} was given to RunState, and the script trains on its batches in a loop of its own: no "
            f"checkpoint knows where the loader stands. Loop over state.batches({short}) instead of the "
            "loader, or do not give it to RunState. [R20]"
        )

    def _refuse(self, name: str) -> None:
        short = repr(name.removeprefix("loader.")) if len(self._given) > 1 else ""
        raise UsageError(
            f"{name} was given to RunState, and this loop takes its batches from the loader itself, not in a "
            "loop over state.batches(): a resume could not know which of them are done.",
            fix=f"write `for ... in state.batches({short}):` instead of `for ... in loader:`, or do not give "
            "the loader to RunState.",
        )

    def _waiting(self, settings: Mapping[str, Any]) -> int:
        given = [id(source.loader) for source in self._given.values()]
        alike = [one for one, other in self._settings.items() if other == settings and id(one) not in given]
        return sum(torch_iterators.kept(one) is None for one in alike)

    def _warn_of_twins(self, loader: DataLoader[Any], saved: int) -> None:
        settings = self._settings[loader]
        if 0 < saved < self._waiting(settings):
            # Loaders that are no longer referenced wait for nothing.
            gc.collect()
        if 0 < saved < (waiting := self._waiting(settings)):
            self._once.warn(
                f"{waiting} DataLoaders over {_named(loader)} with persistent_workers=True look alike, "
                f"and {saved} of them had begun when the checkpoint was saved: the first that is "
                "iterated gets the saved state of the workers. If their order has changed, random numbers "
                "differ: give each a generator=torch.Generator(). [R21]"
            )

    def _warn_of_unseen(self) -> None:
        known = set[int | None]().union(*(source.processes() for source in self._given.values()))
        for entry in self._entries:
            if (kept := entry.kept()) is not None:
                known |= kept.processes()
        children = {child.pid for child in multiprocessing.active_children() if child.daemon} - known
        if not children <= self._children:
            given = [id(source.loader) for source in self._given.values()]
            for loader in _persistent():
                is_known = loader in self._settings or id(loader) in given
                if not is_known and torch_iterators.kept(loader) is not None:
                    self._warn_of(loader, _OWN_KIND if _is_unknown(loader) else _EARLY)
        self._children = children

    def _warn_of(self, loader: DataLoader[Any], why: str) -> None:
        self._once.warn(
            f"a DataLoader over {_named(loader)} with persistent_workers=True {why}: it draws its seed once "
            "in each process, so random numbers differ after a resume. Iterate over a plain DataLoader, and "
            "only after RunState.load, or leave out persistent_workers=True. [R21]"
        )


class _Kept:
    """The iterator of a loader with persistent workers, which knows their states."""

    def __init__(self, source: LoaderSource, check: Hook) -> None:
        self._source = source
        self._check = check
        self._batches = source.open()
        # The workers end when the script drops its loader, but not by a process that was forked.
        # The reference is weak: the source leads to the run, and that to the script's variables.
        self._end = util.Finalize(self, _end, (weakref.ref(source),))

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        # Torch calls this when a loader with persistent workers is iterated again.
        self._batches = self._source.open()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._check()
        return next(self._batches)

    def __len__(self) -> int:
        return len(self._source)

    def __getattr__(self, name: str) -> Any:
        # Scripts end the workers by a private method of the iterator.
        if name.startswith("__") or "_source" not in vars(self):
            raise AttributeError(name)
        return getattr(self._source.workers(), name)

    def processes(self) -> set[int | None]:
        """Return the process ids of the workers."""
        return self._source.processes()

    def collect(self) -> dict[str, Any]:
        """Return the states of the workers."""
        # The script's own sampler and dataset are in no part, so nothing restores them.
        rest: dict[str, Any] = {"dataset": None, "samplers": []}
        try:
            return {**self._source.collect(None, [], False), **rest}
        except CannotStore:
            at = self._source.mark()._replace(workers=Standings({}))
            return {**self._source.collect(at, [], False), **rest, "workers": [None]}


def _end(reference: weakref.ref[LoaderSource]) -> None:
    if (source := reference()) is not None:
        source.close(now=True)


def _is_asked_by_us() -> bool:
    """Whether a loader is iterated for one of our sources, which asks for its next batch."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") not in _SOURCES:
        frame = frame.f_back
    return frame is not None


def _persistent() -> list[DataLoader[Any]]:
    found = frames.instances(*_kinds(DataLoader))
    return [loader for loader in found if _persists(loader) and not torch_iterators.is_copy(loader)]


def _persists(loader: DataLoader[Any]) -> bool:
    # A loader that is just being made has no attributes yet.
    attributes = vars(loader)
    return bool(attributes.get("persistent_workers") and attributes.get("num_workers"))


def _is_unknown(loader: DataLoader[Any]) -> bool:
    return not torch_iterators.iterates_as_torch_does(loader) or isinstance(
        loader.dataset, (IterDataPipe, MapDataPipe)
    )


def _settings(loader: DataLoader[Any]) -> dict[str, Any]:
    settings = LoaderSource(loader, {}, lambda: None, lambda: False).settings()
    return {name: settings[name] for name in settings.keys() - {"num_workers", "sample_seeds"}}


def _named(loader: DataLoader[Any]) -> str:
    return type(loader.dataset).__name__


def _kinds(base: Any) -> set[type]:
    return {base}.union(*(_kinds(one) for one in type.__subclasses__(base)))
