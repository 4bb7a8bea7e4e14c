"""The crew of a training of one process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from ..files.codec import Encoded
from ..files.large_files import Content, Way, Written
from ..files.strict_json import Json
from ..run import checkpoint
from ..run.checkpoint import Checkpoint
from ..run.manifest import Manifest
from ..run.resume_choice import Copies, Which
from .crew import Crew
from .stages import Told

if TYPE_CHECKING:
    from .write_shares import Range

T = TypeVar("T")


class Alone(Crew):
    """The only process: it decides and writes everything."""

    def meet(
        self, facts: Mapping[str, Json], parts: Told, check: Callable[[], None], *, is_copied: bool
    ) -> Sequence[Told]:
        """Return the parts of this process: there are no others."""
        return [parts]

    def note_set(self, disks: Sequence[int]) -> None:
        """Do nothing: there is one disk."""

    def own(self, *, is_copied: bool = False) -> None:
        """Lock the run for this training."""
        # It may have been lost since.
        self._run.acquire()
        if self.run_id is None:
            self.run_id = self._run.identity(None)

    def choose(
        self, which: Which, read: Callable[[Checkpoint], T], copies: Copies | None = None
    ) -> tuple[Checkpoint, T] | None:
        """Return the checkpoint that `which` means, read; None to start fresh."""
        return self._run.choose(which, read, copies)

    def _highest(self, last: int) -> int:
        return max(last, self._run.highest() or 0)

    def compare(self, groups: Mapping[str, Encoded], differing: Collection[int]) -> None:
        """Do nothing: there is no other rank to compare with."""

    def share(
        self, sizes: Callable[[], Mapping[str, int]], headers: Callable[[], Mapping[str, bytes]]
    ) -> dict[str, Range] | None:
        """Return None: this process writes all files."""
        return None

    def commit(
        self, about: Manifest, files: Mapping[str, Content], way: Way
    ) -> tuple[Manifest, dict[str, Written]]:
        """Write the checkpoint; return its manifest and its files, when it is durable."""
        found, written = checkpoint.commit(self._run.folder, about, files, way)
        return found.about, written

    def fail(self, number: int, error: BaseException) -> None:
        """Do nothing: no other process waits for this save."""

    def leave(self, reason: str) -> None:
        """Do nothing: there are no others."""
