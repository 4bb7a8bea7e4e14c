"""Reads a loader that keeps its own position."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.data import DataLoader

from .generators import draws_between, rng
from .source import Source, size_of
from .workers.states import freeze, thaw


class StatefulSource(Source):
    """The batches of anything that keeps its own position: it has `state_dict` and `load_state_dict`."""

    has_cheap_marks = False
    restores_generators = True

    def __init__(self, loader: Any, own: Mapping[str, rng.Generator]) -> None:
        self.loader = loader
        self._own = own
        self._saved: Mapping[str, Any] | None = None
        self._is_used = self._is_stuck = False
        self._first: Any = None
        """Its state before it was looped over."""
        self._given = 0

    def root(self) -> object:
        names = (
            ("sampler", "batch_sampler", "generator", "dataset")
            if isinstance(self.loader, DataLoader)
            else ()
        )
        return {name: getattr(self.loader, name) for name in names}

    def open_at(
        self, batch: int, drawing: AbstractContextManager[None], *, loads_ahead: bool
    ) -> Iterator[Any]:
        """Return what the loader gives from where it stands: the script has restored its own state."""
        batches = self.open(loads_ahead=loads_ahead)
        self._given = batch
        return batches

    def _all(self) -> dict[str, Any]:
        return {"loader": self.root(), "extra": self._own}

    def open(self, *, loads_ahead: bool = False) -> Iterator[Any]:
        saved, self._saved = self._saved, None
        if not self._is_used and not isinstance(self.loader, DataLoader):
            # Asking torchdata's loader for its state begins its epoch.
            self._first = _state_of(self.loader)
        self._is_used, self._given = True, 0
        if saved is None or saved["state"] is None:
            if self._is_stuck:
                self._unstick()
            return self._reading(iter(self.loader))
        held = draws_between.read(self._all())
        iterator = self._go_on(saved, held)
        if saved["is_under_way"]:
            draws_between.write(self._all(), held)
        return self._reading(iterator)

    def _go_on(self, saved: Mapping[str, Any], held: Mapping[str, Any]) -> Iterator[Any]:
        if saved["is_under_way"] and saved["given"] == self._length():
            # Some begin again when they are asked for more after their last batch.
            self._saved = {**saved, "is_under_way": False}
            return iter(())
        self.loader.load_state_dict(saved["state"])
        self._is_stuck = self._first is not None and _state_of(self.loader) != freeze(saved["state"])
        self._given = saved["given"]
        if saved["is_under_way"]:
            return iter(self.loader)
        self._given = 0
        if isinstance(self.loader, DataLoader):
            # Torchdata's takes its state with one iterator, and begins the next epoch with another.
            iter(self.loader)
        elif self._is_stuck:
            self._unstick()
        draws_between.write(self._all(), held)
        return self._next_epoch(iter(self.loader), held)

    def _unstick(self) -> None:
        # Hugging Face's datasets begin every epoch where they were put last.
        self.loader.load_state_dict(thaw(self._first))
        self._is_stuck = False

    def _next_epoch(self, iterator: Iterator[Any], held: Mapping[str, Any]) -> Iterator[Any]:
        # Restored at the end of an epoch, some loaders begin the next one, and some stay at the end.
        is_empty = True
        for batch in iterator:
            is_empty = False
            yield batch
        if is_empty:
            draws_between.write(self._all(), held)
            yield from self.loader

    def _reading(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._given += 1
            yield batch

    def _length(self) -> int | None:
        try:
            return len(self.loader)
        except TypeError:
            return None

    def size(self, batch: Any) -> int:
        return size_of(batch, getattr(self.loader, "batch_size", None))

    def mark(self) -> tuple[int, Any]:
        # The state is frozen: a loader may keep counting in the object that it returned.
        return self._given, freeze(self.loader.state_dict())

    def collect(
        self, mark: tuple[int, Any] | None, ahead: Sequence[Any], is_under_way: bool
    ) -> dict[str, Any]:
        if self._saved:
            return dict(self._saved)
        if not self._is_used and isinstance(self.loader, DataLoader):
            return {"state": None, "given": 0, "is_under_way": is_under_way}
        given, state = mark or self.mark()
        return {"state": thaw(state), "given": given, "is_under_way": is_under_way}

    def in_question(self, setting: str, saved: Mapping[str, Any]) -> tuple[str, str] | None:
        return "", ""

    def restore(self, saved: Mapping[str, Any], other: AbstractSet[str]) -> None:
        # Between two epochs a script may change to another kind of loader.
        self._saved = saved if "state" in saved else None

    def begin_own_streams(self) -> None:
        self._saved = None

    def rewind(self) -> None:
        if self._saved and self._saved["is_under_way"]:
            self._saved = None


def _state_of(loader: Any) -> Any:
    # Asked for before the first batch, some have none yet.
    with contextlib.suppress(Exception):
        return freeze(loader.state_dict())
    return None
