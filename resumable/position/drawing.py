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
