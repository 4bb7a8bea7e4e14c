"""Tells Accelerate where an epoch ends, and keeps its place in a window of accumulated gradients."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import Once
from ..loaders import wrappers
from ..variables.script import frames
from .loader_position import LoaderPosition


class Accelerate:
    """The `Accelerator` of the training, if there is one.

    Its `accumulate()` makes a step at the last batch of an epoch even if the window is not full. Only the
    loaders that `prepare` returned say which batch that is: they join a list while they are iterated, and so
    does a loop over `state.batches()`.
    """

    def __init__(self) -> None:
        self._optimizers: Iterable[Any] = ()
        self._once = Once()
        self._loops: dict[LoaderPosition, _Epoch] = {}
        self._saved: Mapping[str, Any] | None = None
        self._found: list[Any] | None = None

    def watch(self, optimizers: Iterable[Any]) -> None:
        """Look for the Accelerator that has prepared these optimizers."""
        self._optimizers = optimizers

    def begin(self, name: str, at: LoaderPosition, processes: int) -> None:
        """Note that a loop over batches begins."""
        if (gradients := _gradient_state()) is None:
            return
        if at.length() is None and gradients.num_steps > 1 and gradients.sync_with_dataloader:
            self._once.warn(
                f"{name} has no length, so Accelerate does not know which batch is the epoch's last: if a "
                "window of accumulate() is not full there, the optimizer makes no step. Give the dataset a "
                "__len__, or the Accelerator a GradientAccumulationPlugin(..., sync_with_dataloader=False)."
            )
        # Accelerate itself keeps only weak references.
        self._loops[at] = epoch = _Epoch(at, processes)
        gradients._add_dataloader(epoch)

    def end(self, at: LoaderPosition) -> None:
        """Note that the loop has ended."""
        epoch, gradients = self._loops.pop(at, None), _gradient_state()
        if epoch is not None and gradients is not None:
            gradients._remove_dataloader(epoch)

    def begin_loop(self) -> None:
        """Restore the place in the window, as the loops continue after a restore."""
        # It may have been made since the last look.
        self._found = self._found or None
        if self._saved is not None:
            self._put_back(self._saved)
            self._saved = None

    def collect(self) -> dict[str, Any] | None:
        """Return the place in the window."""
        gradients, found = _gradient_state(), self._accelerators()
        if gradients is None or not found:
            return None
        return {"step": found[0].step, "sync_gradients": gradients.sync_gradients}

    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Restore what `collect` returned: now, and again when a loop begins."""
        self._saved = saved
        if saved is not None:
            self._put_back(saved)

    def _put_back(self, saved: Mapping[str, Any]) -> None:
        gradients = _gradient_state()
        for accelerator in self._accelerators() if gradients is not None else ():
            accelerator.step = saved["step"]
            gradients.sync_gradients = saved["sync_gradients"]

    def _accelerators(self) -> list[Any]:
        """Return those that have prepared an optimizer of the training."""
        kind = getattr(sys.modules.get("accelerate.accelerator"), "Accelerator", None)
        if kind is None or _gradient_state() is None:
            return []
        if self._found is None:
            ours = {id(wrappers.inside(optimizer)) for optimizer in self._optimizers}
            self._found = [one for one in frames.instances(kind) if ours & _prepared(one)]
        return self._found


class _Epoch:
    """Stands in for a loader from `prepare` while the loop over its batches runs."""

    def __init__(self, at: LoaderPosition, processes: int) -> None:
        self._at = at
        self.remainder = -1
        """The samples of the last batch, of all processes together, as loaders from `prepare` have it."""
        loader = at.source.loader
        # A loader without a length, or without batches, has no remainder.
        with contextlib.suppress(AttributeError, TypeError):
            if not loader.drop_last:
                self.remainder = len(loader.dataset) % (loader.batch_size * processes)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch in hand is the epoch's last."""
        length = self._at.length()
        return length is not None and self._at.in_hand is not None and self._at.done + 1 >= length


def _gradient_state() -> Any:
    """Return the state that all Accelerators share; None before the first one."""
    # To import Accelerate for that would take seconds.
    kind = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    return kind() if kind is not None and kind._shared_state else None


def _prepared(accelerator: Any) -> set[int]:
    return {id(wrappers.inside(optimizer)) for optimizer in accelerator._optimizers}
