"""Watches the length of a dataset: items that a training adds are in no checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ..errors import StateMismatch, warn
from .workers.object_states import is_stateful


def length_of(dataset: Any) -> int | None:
    """Return the length of a dataset, if it has one."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


class DatasetLength:
    """The length of a loader's dataset: at the start, and when the last order was drawn."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._given = self._drawn = self.now()

    def now(self) -> int | None:
        """Return the current length; None for a stream."""
        dataset = self._loader.dataset
        return None if isinstance(dataset, IterableDataset) else length_of(dataset)

    def order_drawn(self) -> None:
        """Note that an order is drawn."""
        self._drawn = self.now()

    def collect(self) -> list[int | None]:
        """Return the length when the last order was drawn, and the length now."""
        return [self._drawn, self.now()]

    def check(self, drawn: int | None, then: int | None, *, is_drawn: bool) -> None:
        """Check that the dataset has the items that were added before the checkpoint.

        `is_drawn`: whether an order that was drawn from them is to be drawn again.
        """
        now = self.now()
        if is_drawn and not now == drawn == then:
            raise StateMismatch(
                f"the dataset has {now} items. It had {drawn} when this epoch's order was drawn, and {then} "
                "at the checkpoint.",
                fix="let the script add the items again before it loops over the batches (a list of them "
                "in extra= is restored by then), and add items only between two epochs; or begin the "
                "epoch's data anew with allow=['loader'].",
            )
        if now == self._given != then:
            warn(
                f"the dataset has {now} items, as the script makes it, and had {then} at the checkpoint: "
                "what was added or removed is lost, and the training goes on without it. Keep the items "
                "in extra= (the very list that the dataset has), or give the dataset state_dict and "
                "load_state_dict."
            )

    def outgrown(self, keeps: Callable[[Any], bool], *, is_under_way: bool) -> str | None:
        """Return a warning if items of the dataset would be missing after a resume.

        `keeps`: whether an object is saved with the training.
        """
        now, drawn = self.now(), self._drawn
        if now == drawn:
            return None
        if is_under_way:
            return (
                f"the dataset has {now} items, and had {drawn} when this epoch's order was drawn: a resume "
                "from here is refused, as the order cannot be drawn again. Add items only after the loop "
                "over the batches has ended."
            )
        dataset = self._loader.dataset
        if is_stateful(dataset) or any(map(keeps, getattr(dataset, "__dict__", {}).values())):
            return None
        return (
            f"the dataset has {now} items, and had {drawn} before: a resume has those that the script "
            "makes, and not what was added. Keep the items in extra= (the very list that the dataset "
            "has), or give the dataset state_dict and load_state_dict."
        )
