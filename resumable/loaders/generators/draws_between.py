"""Records the draws of a training between the batches of an iterable that keeps no position."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from . import rng, search, worker_rng

MOST = 32
"""How many states are kept of each generator: an iterable may load that many batches ahead."""

States = Mapping[str, Mapping[str, Any]]
"""The states of the global generators ("random", by name), and of the iterable's ("generators", by path)."""

Name = tuple[str, str]
"""One of these generators."""

Between = Mapping[Name, tuple[tuple[int, Any], ...]]
"""The state of a generator before each batch before which the training drew from it, with its number."""


def read(root: object, devices: bool = False) -> dict[str, Any]:
    """Return the states of the global generators and of those that hang off an object."""
    states = {path: rng.read(generator) for path, generator in search.find(root).items()}
    return {"random": rng.collect(devices), "generators": states}


def write(root: object, states: States) -> None:
    """Restore the states that `read` returned, as far as the generators still exist."""
    rng.restore(states["random"])
    found = search.find(root)
    own = search.renamed(states["generators"], found)
    for path in found.keys() & own.keys():
        rng.write(found[path], own[path])


def extended(between: Between, number: int, states: States, drawn: Iterable[Name]) -> Between:
    """Return `between` with the states of the `drawn` generators before one more batch."""
    added = {
        (kind, name): (*between.get((kind, name), ()), (number, states[kind][name]))[-MOST:]
        for kind, name in drawn
    }
    return {**between, **added} if added else between


def stored(between: Between, last: int) -> dict[str, dict[str, Any]]:
    """Return the states before all batches but the last one, for a checkpoint."""
    found: dict[str, dict[str, Any]] = {}
    for (kind, name), states in between.items():
        if earlier := [[number, state] for number, state in states if number < last]:
            found.setdefault(kind, {})[name] = earlier
    return found


def loaded(saved: States) -> Between:
    """Return the states of a checkpoint as `stored` was given them."""
    return {
        (kind, name): tuple((number, state) for number, state in states)
        for kind, by_name in saved.items()
        for name, states in by_name.items()
    }


class Log:
    """Reads the generators around each batch."""

    def __init__(self, root: object) -> None:
        self._own = search.Reader(root)
        self._watch = worker_rng.Watch({})
        self._whole: dict[str, tuple[Any, Any]] = {}
        """Each global generator as it was seen when it was last read, and its state."""
        self._after = self._look()

    def note(self) -> None:
        """Note that a batch was loaded: from here on the training draws."""
        self._after = self._look()

    def before(self) -> tuple[States, list[Name]]:
        """Return the states before a batch, and the generators that the training has drawn from."""
        now, after = self._look(), self._after
        drawn = [
            (kind, name)
            for kind, states in now.items()
            for name, state in states.items()
            if name not in after[kind] or not rng.is_same(after[kind][name], state)
        ]
        states = {name: self._read(name, seen) for name, seen in now["random"].items()}
        return {"random": states, "generators": now["generators"]}, drawn

    def _look(self) -> dict[str, Any]:
        # A prefetcher may draw on the GPU too.
        return {"random": {**self._watch.states(), **rng.read_devices()}, "generators": self._own.read()}

    def _read(self, name: str, seen: Any) -> Any:
        if name not in _GLOBAL:
            return seen
        # Seeing that NumPy's generator has not moved takes a tenth of the time of reading it.
        if name not in self._whole or not rng.is_same(self._whole[name][0], seen):
            self._whole[name] = seen, rng.read(_GLOBAL[name])
        return self._whole[name][1]


_GLOBAL: dict[str, Any] = {
    "python": random.random.__self__,  # type: ignore[attr-defined]
    "numpy": np.random.random.__self__,  # type: ignore[attr-defined]
    "torch": torch.default_generator,
}


class Replay:
    """Restores the draws of the training between batches that are loaded again."""

    def __init__(self, root: object, saved: Mapping[str, Any], last: int) -> None:
        between = saved.get("between", {})
        if "generators" in between:
            generators = search.renamed(between["generators"], search.find(root))
            between = {**between, "generators": generators}
        self.between = loaded(between)
        self._root = root
        self._last = last
        self._states: dict[int, dict[Name, Any]] = {}
        for name, states in self.between.items():
            for number, state in states:
                self._states.setdefault(number, {})[name] = state
        if saved.get("draws") is not None:
            # Checkpoints of earlier versions have only these.
            self._states[last] = _flat(saved["draws"])
        self._began: dict[Name, Any] = {}
        self._moved: set[Name] = set()

    def before(self, number: int) -> None:
        """Restore the generators that the training had drawn from before this batch."""
        if number == 2 and any(len(states) >= MOST - 1 for states in self.between.values()):
            self._began = _flat(read(self._root, devices=True))
        if not (then := self._states.get(number)):
            return
        live = read(self._root, devices=True)
        now = _flat(live)
        drawn = [name for name in then.keys() & now.keys() if not rng.is_same(then[name], now[name])]
        self._look_at_moved(number, now)
        changed: dict[str, dict[str, Any]] = {"random": {**live["random"]}, "generators": {}}
        for kind, path in drawn:
            changed[kind][path] = then[kind, path]
        if number == self._last:
            self.between = extended(self.between, number, changed, drawn)
        if drawn:
            write(self._root, changed)

    def _look_at_moved(self, number: int, now: Mapping[Name, Any]) -> None:
        # Until its first state is restored, only the iterable's draws move a generator.
        for name, states in self.between.items():
            is_known = name in self._began and name in now and states[0][0] == number
            if is_known and not rng.is_same(self._began[name], now[name]):
                self._moved.add(name)

    def shared(self) -> list[str]:
        """Return the generators that both draw from, if the states of some batches were not kept."""
        names = sorted(name for name in self._moved if len(self.between[name]) == MOST)
        # The path of a generator of the script's own begins with the place where it was given.
        return [path if kind == "random" else path.partition(".")[2] or path for kind, path in names]


def _flat(states: States) -> dict[Name, Any]:
    return {(kind, name): state for kind, by_name in states.items() for name, state in by_name.items()}
