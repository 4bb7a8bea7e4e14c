"""Digests of the batches that are handed out, for an observer such as a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .held_generators import Hook


class BatchDigests:
    """The digests of the batches that were handed out, and a call as a body begins."""

    def __init__(self) -> None:
        self.digest: Callable[[Any], Any] | None = None
        """Makes the digest of a batch, if there is an observer."""
        self.first_body: Hook | None = None
        """Called when the next body begins."""
        self.first_loop: Hook | None = None
        """Called when the next loop begins."""
        self._digests: list[Any] = []

    def watch(self, digest: Callable[[Any], Any] | None) -> None:
        """Make a digest of each batch, or of none any more."""
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
        """Call a hook when the next body begins."""
        self.first_body = hook

    def call_at_loop(self, hook: Hook) -> None:
        """Call a hook when the next loop begins."""
        self.first_loop = hook

    def loop_begins(self) -> None:
        """Call the hook that waits for a loop, if there is one."""
        if self.first_loop is not None:
            hook, self.first_loop = self.first_loop, None
            hook()

    def body_begins(self) -> None:
        """Call the hook that waits for a body, if there is one."""
        if self.first_body is not None:
            hook, self.first_body = self.first_body, None
            hook()
