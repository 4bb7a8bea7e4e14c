"""Finds the generators from which the order of an epoch is drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..loaders.generators import rng

States = Mapping[str, Any]
Path = tuple[str, ...]


class Drawing:
    """A context that finds the generators from which the order of an epoch is drawn."""

    def __init__(self, read: Callable[[], States]) -> None:
        self._read = read
        self._before: Mapping[Path, Any] = {}
        self.drawn: set[Path] = set()
        """The paths of those generators."""

    def of_loaders(self) -> set[Path]:
        """Return the paths of the generators that hang off loaders."""
        return {path for path in flat(self._read()) if path[0] == "loaders"}

    def __enter__(self) -> None:
        self._before = flat(self._read())

    def __exit__(self, *_: object) -> None:
        now = flat(self._read())
        self.drawn |= {path for path, state in self._before.items() if not rng.is_same(state, now.get(path))}


_UNTOUCHED = (
    "that are as they were in RunState.load, and not as at the beginning of this epoch: the rest of it has "
    "other samples than in the training that is continued. Restore them first, or begin at an epoch: "
    "begin_at(epoch=...)."
)
_UNSET = (
    "that all code draws from: if they are as at the checkpoint, the rest of this epoch has other samples "
    "than in the training that is continued; if they are as at the beginning of this epoch, other random "
    "numbers follow. Let the loader draw from a generator= of its own or use a sampler with a seed, set the "
    "seed in the body of the loop over the epochs, or begin at an epoch: begin_at(epoch=...)."
)


class Elsewhere:
    """The generators before and after the script has loaded the checkpoint of another training."""

    def __init__(self, before: States | None, loaded: States) -> None:
        self._before, self._loaded = before, loaded

    def faults(self, body_start: States | None, now: States, is_first_epoch: bool) -> dict[str, set[Path]]:
        """Return what is wrong with drawing an epoch's order from the generators as they are `now`."""
        untouched = _alike(self._before, now)
        unset = {path for path in _alike(body_start or self._loaded, now) if path[0] == "global"}
        # A seed set before the load is that of the first epoch.
        return {_UNTOUCHED: set() if is_first_epoch else untouched, _UNSET: unset - untouched}


def _alike(then: States | None, now: States) -> set[Path]:
    states = flat(now)
    found = flat(then).items() if then else ()
    return {path for path, state in found if path in states and rng.is_same(state, states[path])}


def flat(states: States) -> dict[Path, Any]:
    """Return states by their paths, such as ("global", "torch") and ("loaders", "loader", "sampler")."""
    loaders = states["loaders"].items()
    return {
        **{(kind, name): state for kind in ("global", "own") for name, state in states[kind].items()},
        **{("loaders", name, path): state for name, found in loaders for path, state in found.items()},
    }


def nested(states: Mapping[Path, Any]) -> dict[str, Any]:
    """Return the states of which `flat` returned this."""
    found: dict[str, Any] = {"global": {}, "own": {}, "loaders": {}}
    for (kind, *within, last), state in states.items():
        at = found[kind]
        for name in within:
            at = at.setdefault(name, {})
        at[last] = state
    return found
