"""The interface of all kinds of loaders to the position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Protocol

import torch


class Source(Protocol):
    """A loader as `LoaderPosition` uses it."""

    loader: Any
    has_cheap_marks: bool
    """Whether a mark can be made with every batch."""

    def __len__(self) -> int:
        """Return the batches of this epoch."""

    def settings(self) -> dict[str, Any]:
        """Return the settings with which the script made the loader."""

    def root(self) -> object:
        """Return the root under which the loader's generators are found."""

    def open(self, *, loads_ahead: bool = False) -> Iterator[Any]:
        """Return the rest of the epoch's batches. In mid-epoch, no generator is moved.

        `loads_ahead`: whether batches are requested before the training wants them.
        """

    def load_ahead(self) -> None:
        """Note that from now on batches are requested before the training wants them."""

    def can_load_ahead(self) -> bool:
        """Whether requesting a batch early changes no random number."""

    def size(self, batch: Any) -> int:
        """Return the number of samples in the last batch."""

    def forgive(self) -> int:
        """Count the batches that failed, as the training continues without them."""

    def mark(self) -> Any:
        """Return the loader's place after its last batch."""

    def collect(self, mark: Any, ahead: Sequence[Any], is_under_way: bool) -> dict[str, Any]:
        """Return the state to continue from after the batch of a mark; None: after the last one.

        `ahead` are the marks of later batches that the training has not had yet.
        """

    def in_question(self, setting: str, saved: Mapping[str, Any]) -> tuple[str, str] | None:
        """Return what a changed setting invalidates in mid-epoch: itself or everything (""), and why."""

    def effects(self, saved: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
        """Return how a changed setting changes the results, and why, where its name alone does not say it."""

    def restore(self, saved: Mapping[str, Any], other: AbstractSet[str]) -> None:
        """Continue from a state that `collect` returned; the `other` settings have changed since."""

    def begin_own_streams(self) -> None:
        """Drop the saved workers: they are another rank's."""

    def rewind(self) -> None:
        """Return to the beginning of an epoch."""

    def close(self, *, now: bool) -> None:
        """Release what runs in the background; `now`: also what a loop still holds."""


class WithoutWorkers:
    """The common part of all sources without workers of their own."""

    loader: Any

    def replace(self, loader: Any) -> None:
        """Read from this loader, made like the one before, when it is opened next."""
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def settings(self) -> dict[str, Any]:
        """Return the kind of the loader: how the script made it is unknown."""
        return {"kind": type(self.loader).__name__}

    def load_ahead(self) -> None:
        """Do nothing: loading ahead changes nothing here."""

    def can_load_ahead(self) -> bool:
        """Return False: the effect of an early request is unknown."""
        return False

    def forgive(self) -> int:
        """Return 0: an iterator that has raised is at its end, or keeps its own position."""
        return 0

    def effects(self, saved: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
        """Return nothing: the effect of a changed setting is unknown."""
        return {}

    def close(self, *, now: bool) -> None:
        """Do nothing: the loader is the user's."""


def size_of(batch: Any, otherwise: int | None) -> int:
    """Return the number of samples in a batch: the length of its first tensor."""
    while isinstance(batch, (Mapping, list, tuple)) and batch:
        batch = next(iter(batch.values() if isinstance(batch, Mapping) else batch))
    return batch.shape[0] if isinstance(batch, torch.Tensor) and batch.ndim else otherwise or 1
