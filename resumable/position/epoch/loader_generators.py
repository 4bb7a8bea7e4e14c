"""The random generators of one loader, and the draws of a `through=` that loads ahead."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from ...loaders.generators import rng, search
from ...loaders.plain_iterable import PlainSource
from ...loaders.source import Source


class LoaderGenerators:
    """The random generators that hang off a loader."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._late: dict[str, Any] = {}
        """The states of those that the source makes again as it is opened."""

    def read(self) -> dict[str, Any]:
        """Return their states."""
        return {path: rng.read(found) for path, found in search.find(self._source.root()).items()}

    def write(self, states: Mapping[str, Any]) -> None:
        """Put them into these states."""
        root = self._source.root()
        found = search.find(root)
        for path, state in states.items():
            if generator := found.get(path) or (not self._is_late(path) and search.plant(root, path, state)):
                rng.write(generator, state)

    def collect(self) -> dict[str, Any]:
        """Return the states that a checkpoint has."""
        return {**self._late, **self.read()}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Put them into the states of a checkpoint; after the source was given its own."""
        states = search.renamed(states, self._source.root())
        self.write(states)
        self._late = {path: state for path, state in states.items() if self._is_late(path)}

    def source_opened(self) -> None:
        """Restore those that the source has made just now."""
        self.write(self._late)
        self._late = {}

    def _is_late(self, path: str) -> bool:
        # The first batch finds one that is planted, would make it, and draw for that.
        return isinstance(self._source, PlainSource) and self._source.makes_again(path)

    def begin_own_streams(self, seed: str) -> None:
        """Begin streams of their own: those of the checkpoint are another rank's."""
        self._source.begin_own_streams()
        for path, generator in search.find(self._source.root()).items():
            rng.seed_one(generator, f"{seed}/{path}")


class Drawing(Protocol):
    """Reads and writes the generators that the script's own code draws from."""

    def read_draws(self) -> Any:
        """Return their states."""

    def write(self, states: Any) -> None:
        """Put them into these states."""


class ThroughDraws:
    """Where the generators stood for each batch that `through=` has loaded ahead, and may draw for."""

    def __init__(self, drawing: Drawing) -> None:
        self._drawing = drawing
        self.is_recorded = False
        """Whether the loop has a `through=`, which may draw."""
        self._thread = 0
        """The thread that began the loop: draws elsewhere come at moments of their own."""
        self._saved: deque[Any] = deque()
        """The states for the batches that were ahead at the save, oldest first."""
        self.live: Any = None
        """The states to return to after a batch that was ahead at the save."""

    def begin(self, *, is_recorded: bool) -> None:
        """Note that a loop begins in this thread."""
        self.is_recorded, self._thread = is_recorded, threading.get_ident()

    def forget(self) -> None:
        """Drop all states: the loader goes elsewhere."""
        self.live = None
        self._saved.clear()

    def restore(self, states: Iterable[Any]) -> None:
        """Use these states for the next batches that are loaded."""
        self._saved.extend(states)

    def of_loaded(self) -> Any:
        """Return the states for the batch that was just loaded.

        One that was ahead at a save draws from the saved states, until the next batch is asked for.
        """
        if threading.get_ident() != self._thread:
            return None
        if self._saved and (draws := self._saved.popleft()) is not None:
            self.live = self._drawing.read_draws()
            self._drawing.write(draws)
            return draws
        return self._drawing.read_draws()

    def catch_up(self) -> None:
        """Restore the generators after a batch that was ahead at a save."""
        if self.live is not None:
            self._drawing.write(self.live)
            self.live = None
