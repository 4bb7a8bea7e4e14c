"""The processes of a training, as `RunState` uses them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from ..errors import SaveFailed, UsageError
from ..files.codec import Encoded
from ..files.large_files import Content, Way, Written
from ..files.strict_json import Json
from ..run import checkpoint
from ..run.checkpoint import Checkpoint
from ..run.directory import Run
from ..run.manifest import Manifest
from ..run.resume_choice import Copies, Which
from .ranks import Ranks
from .stages import Told

if TYPE_CHECKING:
    from .write_shares import Range

T = TypeVar("T")


class SaveSkipped(SaveFailed):
    """Another process did not make this save: it reported the failure of an earlier one instead."""


class Crew(ABC):
    """The processes of a training, as one of them sees them: which one leads, writes and decides."""

    leads = True
    """Whether this process makes the checkpoints on its disk."""
    saves_all = True
    """Whether this process saves what all ranks share."""
    disks = 1
    """The number of disks, each with a run directory."""
    disk = 0
    """Which of them this process sees."""
    on_disks: Sequence[Sequence[int]] = ((0,),)
    """The processes that see each disk."""
    pushes = True
    """Whether what this process's disk has of a checkpoint goes to the remote from here."""
    writers = 1
    """The number of processes that divide what all ranks share."""
    has_met = True
    """Whether the processes have found each other."""

    def __init__(self, run: Run, ranks: Ranks) -> None:
        self.ranks = ranks
        self.is_first = ranks.is_first
        self.rank = None if ranks.is_alone else ranks.rank
        """This process's rank; None if it is the only process."""
        self.run_id: str | None = None
        """Identifies the run; None until the run is locked."""
        self._run = run
        self._highest_elsewhere = 0

    @abstractmethod
    def meet(
        self, facts: Mapping[str, Json], parts: Told, check: Callable[[], None], *, is_copied: bool
    ) -> Sequence[Told]:
        """Meet the others, and return the parts of each; RanksDiffer if facts or parts differ.

        An error that `check` raises comes before anything is written to a disk. `is_copied`: whether a disk
        can pull from a remote what it lacks.
        """

    @abstractmethod
    def note_set(self, disks: Sequence[int]) -> None:
        """Note which disks hold a whole checkpoint together, this one among them."""

    def count_from(self, number: int) -> None:
        """Give the next save a number above this one, which is taken elsewhere."""
        self._highest_elsewhere = max(self._highest_elsewhere, number)

    @abstractmethod
    def own(self, *, is_copied: bool = False) -> None:
        """Lock the run for this training, on each disk by one process."""

    @abstractmethod
    def choose(
        self, which: Which, read: Callable[[Checkpoint], T], copies: Copies | None = None
    ) -> tuple[Checkpoint, T] | None:
        """Return the checkpoint that `which` means, read by all processes; None to start fresh."""

    def next_number(self, last: int) -> int:
        """Return the number of the next save; `last` is that of the save before."""
        number = max(self._highest(last), self._highest_elsewhere) + 1
        if number > checkpoint.HIGHEST:
            raise UsageError(
                f"{self._run.folder} holds a folder with the highest save number that there is, "
                f"{checkpoint.HIGHEST}: no save can follow it.",
                fix="rename or remove that folder, if no training made it.",
            )
        return number

    @abstractmethod
    def _highest(self, last: int) -> int:
        """Return the highest save number that is taken here."""

    @abstractmethod
    def compare(self, groups: Mapping[str, Encoded], differing: Collection[int]) -> None:
        """Hash the tensors that should be equal on every rank, for the next save to compare."""

    @abstractmethod
    def share(
        self, sizes: Callable[[], Mapping[str, int]], headers: Callable[[], Mapping[str, bytes]]
    ) -> dict[str, Range] | None:
        """Return which bytes of the files this process writes; None for all of those that it has."""

    @abstractmethod
    def commit(
        self, about: Manifest, files: Mapping[str, Content], way: Way
    ) -> tuple[Manifest | None, dict[str, Written]]:
        """Write this process's files; return once the checkpoint of all is durable.

        Return the manifest, if this process leads, and the files that it wrote.
        """

    def decided(self, number: int) -> Manifest | None:
        """Return rank 0's manifest of a save, without the files; None on rank 0."""
        return None

    @abstractmethod
    def fail(self, number: int, error: BaseException) -> None:
        """Tell the others, who would wait for it, that this checkpoint will not be made."""

    def skip(self, number: int, error: BaseException) -> None:
        """Tell the others that this process reports the failure of the save before, and makes none."""
        problem = f"checkpoint {number} was not made: rank {self.ranks.rank} was told of the one before it"
        text = str(error).partition("\n")[0]
        self.fail(number, SaveSkipped(f"{problem}: {text}", fix="call save() again."))

    @abstractmethod
    def leave(self, reason: str) -> None:
        """Tell the others that this process leaves the training."""
