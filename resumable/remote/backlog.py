"""Which checkpoints of a run its remote still lacks."""

from __future__ import annotations

from collections.abc import Iterable

from ..run.directory import Run
from ..run.policy import Facts, Keep, Push, to_prune


class Backlog:
    """The checkpoints of a run that are still to be pushed, as `Remote(push=..., keep=...)` wants it.

    >>> backlog = Backlog(Run("runs/exp"), "newest", None)
    >>> backlog.due(), backlog.is_known
    ([], False)
    """

    def __init__(self, run: Run, push: Push, keep: Keep | None) -> None:
        self.best: int | None = None
        """The number of the best checkpoint."""
        self.is_known = False
        """Whether the remote was asked which checkpoints it has."""
        self._run = run
        self._push = push
        self._keep = keep
        self._there: set[int] = set()
        self._damaged: set[int] = set()
        self._pruned: set[int] = set()
        self._were_due: set[int] = set()

    def wanted(self) -> set[int]:
        """Return the checkpoints that are here and should be there."""
        here = self._run.numbers()
        if self._push == "all":
            return {*here}
        newest = here[-1:] if self._push == "newest" else []
        return {*here} & {*newest, self.best}

    def missing(self) -> list[int]:
        """Return the checkpoints that should be there and are not, newest first."""
        wanted = self.wanted()
        if self._push == "all":
            # A checkpoint that the remote would not keep need not go there.
            wanted -= self._not_kept({*self._run.numbers()} | self._there)
        return sorted(wanted - self._there - self._pruned, reverse=True)

    def due(self) -> list[int]:
        """Return the checkpoints to push, newest first: those that are missing and not damaged here."""
        return [number for number in self.missing() if number not in self._damaged]

    def newest(self) -> int:
        """Return the number of the newest checkpoint there."""
        return max(self._there)

    def has_only_damaged(self) -> bool:
        """Return whether everything that is missing is damaged here."""
        return {*self.missing()} <= self._damaged

    def know(self, there: Iterable[int]) -> None:
        """Take these for all that is there."""
        self._there, self.is_known = {*there}, True

    def saved(self, number: int) -> None:
        """Note a new checkpoint here: one of its number there is of another branch of the training."""
        self._there.discard(number)

    def pushed(self, number: int) -> None:
        """Note that a checkpoint is complete there."""
        self._there.add(number)

    def is_there(self, number: int) -> bool:
        """Return whether a checkpoint is there, or what this disk has of it."""
        return number in self._there

    def damaged(self, number: int) -> None:
        """Note that a checkpoint cannot be pushed, because it is damaged here."""
        self._damaged.add(number)

    def pruned(self, numbers: Iterable[int]) -> None:
        """Note which checkpoints the remote has not kept."""
        self._there -= {*numbers}
        # Otherwise two checkpoints that the remote does not keep would evict each other for ever.
        self._pruned |= {*numbers}

    def missed(self) -> int | None:
        """Return a checkpoint that was pruned here before it was pushed, though the remote would keep it."""
        here, due = {*self._run.numbers()}, {*self.due()}
        gone = self._were_due - here - self._there if self._push == "all" else set()
        self._were_due = due
        return min(gone - self._not_kept(here | self._there | gone), default=None)

    def _not_kept(self, numbers: Iterable[int]) -> set[int]:
        if self._keep is None or self._keep.every or self._keep.best > 1:
            return set()
        facts = [Facts(number, 0) for number in sorted(numbers)]
        return {*to_prune(facts, self._keep, None, [self.best])}
