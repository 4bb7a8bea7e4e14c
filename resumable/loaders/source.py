"""What the position needs of a loader, of whatever kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Protocol

import torch


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


class WithoutWorkers:
    """What is the same for all sources that have no workers of their own."""

    def load_ahead(self) -> None:
        """Do nothing: what is loaded ahead is the same."""

    def can_load_ahead(self) -> bool:
        """Return False: what asking early does is unknown."""
        return False

    def forgive(self) -> int:
        """Count nothing: an iterator that has raised is at its end, or keeps its own position."""
        return 0

    def effects(self, saved: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
        """Return nothing: what a change of a setting does is unknown."""
        return {}

    def close(self, *, now: bool) -> None:
        """Do nothing: the loader is the user's."""


def size_of(batch: Any, otherwise: int | None) -> int:
    """Return the samples in a batch, as its first tensor has them."""
    while isinstance(batch, (Mapping, list, tuple)) and batch:
        batch = next(iter(batch.values() if isinstance(batch, Mapping) else batch))
    return batch.shape[0] if isinstance(batch, torch.Tensor) and batch.ndim else otherwise or 1
