"""The batches between a loader and the training: those loaded ahead, and the one in hand."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

from ..errors import Once
from .random_streams import Hook, Streams


class Phase(Enum):
    """How far the loops over an epoch's batches have come."""

    DUE = "due"
    """Batches are left: no loop over them has begun, or one is open."""
    LEFT = "left"
    """The loop was left: for good, unless an exception is being handled."""
    KEPT = "kept"
    """The loop was left, and the body of `epochs()` with it: the next loop continues there."""
    OVER = "over"
    """No batches are left: another loop is an error, or the next epoch."""
    PASSED = "passed"
    """No batches were left where the training resumed: the first loop over them is empty."""


class Loaded(NamedTuple):
    """A batch that was loaded and not handed out."""

    size: int
    mark: Any
    """The source's mark after it."""
    digest: Any = None
    """Its digest, if there is a trace."""
    draws: Any = None
    """The generators from which `through=` draws for it."""


@dataclass(slots=True)
class InHand:
    """The batch that the training works on."""

    size: int
    before: Any
    """The source's mark before it."""
    draws: Any
    updates: int
    """The optimizer steps that were made before it."""
    is_step: bool = False
    """Whether it counts as a step when it is done."""
    is_last: bool = False
    """Whether no other batch will be requested: it is done when the optimizer steps."""

    def leave_out(self) -> None:
        """Count it as done, and nothing as trained; a break after it does not bring it back."""
        self.size, self.is_step, self.updates = 0, False, -1


class ThroughDraws:
    """The states of the generators for each batch that `through=` has loaded ahead, and may draw for."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
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
        """Drop all states: the loader is moved elsewhere."""
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
            self.live = self._streams.read_draws()
            self._streams.write(draws)
            return draws
        return self._streams.read_draws()

    def catch_up(self) -> None:
        """Restore the generators after a batch that was ahead at a save."""
        if self.live is not None:
            self._streams.write(self.live)
            self.live = None


class BatchDigests:
    """The digests of the batches that were handed out, and a call as a body begins."""

    def __init__(self) -> None:
        self.digest: Callable[[Any], Any] | None = None
        """Makes the digest of a batch, if there is an observer."""
        self.first_body: list[Hook] = []
        """Called when the next body begins."""
        self._digests: list[Any] = []

    def watch(self, digest: Callable[[Any], Any] | None) -> None:
        """Make a digest of each batch from now on; None: of no batch."""
        self.digest, self._digests = digest, []

    def add(self, digest: Any) -> None:
        """Note the digest of a batch that is handed out."""
        self._digests.append(digest)

    def take(self) -> list[Any]:
        """Return the digests since the last call."""
        digests, self._digests = self._digests, []
        return digests

    def peek(self) -> list[Any]:
        """Return the digests that the next call of `take` returns."""
        return self._digests

    def repeat(self, digests: list[Any]) -> None:
        """Return these digests again at the next call of `take`."""
        self._digests = digests

    def call_at_body(self, hook: Hook) -> None:
        """Call a hook, once, when the next body begins."""
        if hook not in self.first_body:
            self.first_body.append(hook)

    def body_begins(self) -> None:
        """Call the hooks that wait for a body."""
        hooks, self.first_body = self.first_body, []
        for hook in hooks:
            hook()


class StepCounted(Protocol):
    """The batches that another thread loads: one counts when the optimizer steps."""

    def stepped(self) -> None:
        """Count a batch."""

    def warn_of_uncounted(self) -> None:
        """Warn, at an epoch's end, of batches that no step was made for."""

    def refuse_to_leave_out(self) -> None:
        """Raise UsageError unless all batches are counted."""


class Counters(Protocol):
    """The counters of the training, as the place in a loader's epoch moves them."""

    epoch: int
    updates: int
    counts_steps: bool
    once: Once
    handed: BatchDigests
    streams: Streams
    loops_begun: int

    def next_opened(self) -> int:
        """Return the next number in the order in which loops have handed out their first batch."""

    def pass_begins(self) -> None:
        """Note that a pass over a loader begins."""

    def handed_out(self, place: Any, digest: Any) -> bool:
        """Note that a batch is in hand, with its digest; return whether it counts as a step."""

    def count_batch(self, place: Any, hand: InHand) -> None:
        """Count a batch of a loader that is done."""

    def batches_ended(self, ended: Any) -> None:
        """Note that the loop over a loader's batches has ended."""

    def is_saved_body(self) -> bool:
        """Whether `save()` was called in the body that is running."""

    def has_one_loader(self) -> bool:
        """Whether there is one loader, given or looped over."""

    def is_in_epochs(self) -> bool:
        """Whether a body of `epochs()` is running, or has just ended."""

    def is_repeated(self, place: Any) -> bool:
        """Whether another pass over this loader may follow in the same epoch."""

    def is_in_batches(self) -> bool:
        """Whether the end of a batch is a boundary."""

    def is_mid_epoch(self) -> bool:
        """Whether a checkpoint taken now stands between two batches of an epoch."""

    def reopened(self) -> None:
        """Restore the generators if all loops over batches that were open are open again."""

    def progress(self) -> object:
        """Return a value that changes with every step and every gradient; None if that is unknown."""


class OpenLoop(Protocol):
    """A loop over the batches of a loader."""

    def abandon(self) -> None:
        """Give no more batches."""

    def cut(self) -> None:
        """Raise UsageError if another batch is asked for."""

    def unwatch(self) -> None:
        """Stop watching for signals."""
