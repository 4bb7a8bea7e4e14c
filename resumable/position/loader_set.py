"""The loaders of a training: those that were given, and iterables that were looped over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from .epoch_place import EpochPlace
from .loader_position import LoaderPosition


class LoaderSet:
    """The loaders that were given, and the iterables that were looped over without having been given."""

    def __init__(self, make: Callable[[str, Any], LoaderPosition]) -> None:
        """`make`: returns where a new loader stands; it gets a name and the loader."""
        self._make = make
        self.given: dict[str, LoaderPosition] = {}
        self.found: dict[str, LoaderPosition] = {}
        """The iterables, by their names."""
        self.all: list[LoaderPosition] = []
        """Where all of them stand."""
        self._found_before: Mapping[str, Any] = {}
        """The states of the iterables in the checkpoint."""

    def give(self, name: str, loader: Any) -> LoaderPosition:
        """Add a loader that was given to RunState; return where it stands."""
        return self._add(self.given, name, loader)

    def _add(self, to: dict[str, LoaderPosition], name: str, loader: Any) -> LoaderPosition:
        to[name] = at = self._make(name, loader)
        self.all.append(at)
        return at

    def at(self, name: str) -> LoaderPosition:
        """Return the position of a loader, by its name."""
        return self.given.get(name) or self.found[name]

    def find(self, iterable: Any, *, is_in_epochs: bool) -> str:
        """Return the name of an iterable, and know it from now on."""
        kind = getattr(iterable, "__name__", type(iterable).__name__)
        name, number = kind, 1
        while name in self.found and not _can_be(self.found[name], iterable, is_in_epochs):
            number += 1
            name = f"{kind}-{number}"
        if name in self.found:
            self.found[name].continue_with(iterable)
        else:
            at = self._add(self.found, name, iterable)
            if name in self._found_before:
                at.restore(self._found_before[name], set())
        self.found[name].claim()
        return name

    def restore_found(self, saved: Mapping[str, Any], unfit: AbstractSet[str]) -> None:
        """Restore the positions of the iterables; those that are `unfit` begin again."""
        self._found_before = {name: at for name, at in saved.items() if name not in unfit}
        for name, at in self.found.items():
            at.rewind()
            if name in self._found_before:
                at.restore(self._found_before[name], set())

    def of_epochs(self) -> list[LoaderPosition]:
        """Return those whose passes begin and end with the epochs."""
        return [at for at in self.all if not at.is_endless]

    def in_hand(self) -> list[LoaderPosition]:
        """Return those of the epochs that have a batch in hand, the outermost loop first."""
        return sorted((at for at in self.of_epochs() if at.in_hand is not None), key=lambda at: at.opened)

    def is_training(self) -> bool:
        """Whether a batch of any of them is in hand; one of an endless loader may be, between two bodies."""
        # No generator, which takes longer: this is asked at every step.
        for at in self.all:  # noqa: SIM110
            if at.in_hand is not None and not at.is_endless:
                return True
        return False

    def is_under_way(self) -> bool:
        """Whether the batches of any of them, in this epoch, have begun and not ended."""
        return any(at.is_under_way() for at in self.of_epochs())

    def is_through(self) -> bool:
        """Whether looping over the batches of any of them again would be another epoch."""
        return any(at.is_through() for at in self.of_epochs())

    def is_over(self) -> bool:
        """Whether any of them has no more batches in this epoch, or was left for good."""
        return any(at.is_over for at in self.of_epochs())

    def is_put_off(self) -> bool:
        """Whether the loop of any of them was left by an exception before its batch was trained."""
        return any(at.is_put_off() for at in self.all)

    def is_awaited(self) -> bool:
        """Whether a loop that was open at the checkpoint has not been opened again yet."""
        unseen = self._found_before.keys() - self.found.keys()
        return any(at.is_awaited for at in self.all) or any(
            self._found_before[name].get("is_open") for name in unseen
        )

    def is_outermost(self, place: EpochPlace) -> bool:
        """Whether no other loop over batches is around this one."""
        return len(self.all) == 1 or not any(
            other.in_hand and other.rank() < place.rank() for other in self.all
        )

    def is_in_inner_loop(self) -> bool:
        """Whether a loop over batches runs in the body of one over those of another loader."""
        in_hand = [at.habits for at in self.in_hand()]
        return len(in_hand) > 1 and in_hand[-1].is_inside(in_hand[0])


def _can_be(at: LoaderPosition, iterable: Any, is_in_epochs: bool) -> bool:
    # The same one, or one that the script makes again for every epoch.
    is_over = at.is_over and is_in_epochs
    return at.source.loader is iterable or not (at.in_hand or at.is_claimed or is_over)
