"""The interface of all kinds of loaders, and the random generators that hang off a loader."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch

from .generators import rng, search
from .prepared import Prepared
from .workers.datasets import EpochTooShort
from .workers.drawn import Drawn

_END = object()


class Source(ABC):
    """A loader as `LoaderPosition` uses it; the defaults are those of one that has no workers of its own."""

    loader: Any
    """The loader or iterable of the user."""
    prepared: Prepared | None = None
    """The loader of Accelerate or Fabric around it, if the user gave one."""
    has_cheap_marks = True
    """Whether a mark can be made with every batch."""
    draws_late = False
    """Whether the order is drawn only when a batch is asked for."""
    restores_generators = False
    """Whether the loader's own state has its generators."""

    @cached_property
    def drawn(self) -> Drawn:
        """Called once the order is drawn, and what is done is skipped."""
        return Drawn()

    def is_of(self, loader: Any) -> bool:
        """Whether the user means this one by a loader."""
        return loader is self.loader or (self.prepared is not None and loader is self.prepared.loader)

    def replace(self, loader: Any) -> None:
        """Read from this loader, made like the one before, when it is opened next."""
        self.loader = loader

    def __len__(self) -> int:
        """Return the number of batches in this epoch."""
        return len(self.loader)

    def settings(self) -> dict[str, Any]:
        """Return the settings with which the script made the loader, as far as they are known."""
        return {"kind": type(self.loader).__name__}

    @abstractmethod
    def root(self) -> object:
        """Return the root under which the loader's generators are found."""

    def makes_again(self, path: str) -> bool:
        """Whether opening the loader makes this generator again: it did not exist when the epoch began."""
        return False

    @abstractmethod
    def open(self, *, loads_ahead: bool = False) -> Iterator[Any]:
        """Return the rest of the epoch's batches. In mid-epoch, no generator is moved.

        `loads_ahead`: whether batches are requested before the training wants them.
        """

    def open_at(
        self, batch: int, drawing: AbstractContextManager[None], *, loads_ahead: bool
    ) -> Iterator[Any]:
        """Return the batches of a new epoch from this one on.

        `drawing`: the context in which the order is drawn. Those before it are loaded and thrown away.
        """
        with drawing:
            return self._without(self.open(loads_ahead=loads_ahead), batch)

    def _without(self, batches: Iterator[Any], count: int) -> Iterator[Any]:
        for number in range(count):
            if next(batches, _END) is _END:
                raise EpochTooShort(number)
        return batches

    def load_ahead(self) -> None:  # noqa: B027
        """Note that from now on batches are requested before the training wants them."""

    def can_load_ahead(self) -> bool:
        """Whether requesting a batch early is known to change no random number."""
        return False

    @abstractmethod
    def size(self, batch: Any) -> int:
        """Return the number of samples in the last batch."""

    def forgive(self) -> int:
        """Count the batches that failed, as the training continues without them."""
        # An iterator that has raised is at its end, or keeps its own position.
        return 0

    @abstractmethod
    def mark(self) -> Any:
        """Return the loader's place after its last batch."""

    @abstractmethod
    def collect(self, mark: Any, ahead: Sequence[Any], is_under_way: bool) -> dict[str, Any]:
        """Return the state to continue from after the batch of a mark; None: after the last one.

        `ahead` are the marks of later batches that the training has not had yet.
        """

    def reads(self, saved: Mapping[str, Any]) -> bool:
        """Whether a state of a checkpoint is one of this kind of source."""
        return True

    @abstractmethod
    def in_question(self, setting: str, saved: Mapping[str, Any]) -> tuple[str, str] | None:
        """Return what a changed setting invalidates in mid-epoch: itself or everything (""), and why."""

    def effects(self, saved: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
        """Return how a changed setting changes the results, and why, where its name alone does not say it."""
        return {}

    @abstractmethod
    def restore(self, saved: Mapping[str, Any], other: AbstractSet[str]) -> None:
        """Continue from a state that `collect` returned; the `other` settings have changed since."""

    def begin_own_streams(self) -> None:  # noqa: B027
        """Drop the saved workers: they are another rank's."""

    @abstractmethod
    def rewind(self) -> None:
        """Return to the beginning of an epoch."""

    def close(self, *, now: bool) -> None:  # noqa: B027
        """Release what runs in the background; `now`: also what a loop still holds."""


def size_of(batch: Any, otherwise: int | None) -> int:
    """Return the number of samples in a batch: the length of its first tensor."""
    while isinstance(batch, (Mapping, list, tuple)) and batch:
        batch = next(iter(batch.values() if isinstance(batch, Mapping) else batch))
    return batch.shape[0] if isinstance(batch, torch.Tensor) and batch.ndim else otherwise or 1


class LoaderGenerators:
    """The random generators that hang off a loader."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._found = search.Found(None)
        """Those of the last read."""
        self._late: dict[str, Any] = {}
        """The states of those that the source makes again as it is opened."""

    def read(self, *, is_searched: bool = False) -> dict[str, Any]:
        """Return their states; `is_searched`: no code of the script has run since the last read."""
        root = self._source.root()
        if not is_searched or not self._found.are_in_place(root):
            self._found = search.Found(root)
        return {path: rng.read(one) for path, one in self._found.generators.items()}

    def write(self, states: Mapping[str, Any]) -> None:
        """Put them into these states."""
        root = self._source.root()
        found = self._found.generators
        if not states.keys() <= found.keys() or not self._found.are_in_place(root):
            found = search.find(root)
        for path, state in states.items():
            # Do not plant one that opening makes: the first batch would find it and not draw for its seed.
            is_late = self._source.makes_again(path)
            if generator := found.get(path) or (not is_late and search.plant(root, path, state)):
                rng.write(generator, state)
        if states.keys() - found.keys():
            self._found = search.Found(root)

    def forget(self) -> None:
        """Drop the generators of an iterable that another one replaces."""
        self._found = search.Found(None)

    def collect(self, *, is_searched: bool = False) -> dict[str, Any]:
        """Return their states for a checkpoint."""
        return {**self._late, **self.read(is_searched=is_searched)}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Put them into the states of a checkpoint; call this after the source was given its own."""
        states = search.renamed(states, search.find(self._source.root()))
        self.write(states)
        self._late = {path: state for path, state in states.items() if self._source.makes_again(path)}

    def source_opened(self) -> None:
        """Restore those that the source has made just now."""
        self.write(self._late)
        self._late = {}

    def begin_own_streams(self, seed: str) -> None:
        """Begin streams of their own: those of the checkpoint are another rank's."""
        self._source.begin_own_streams()
        for path, generator in search.find(self._source.root()).items():
            rng.seed_one(generator, f"{seed}/{path}")
