"""What `RunState` needs of the other processes of its training; alone it is the only one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Container, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..errors import CheckpointDamaged, RankLost, RanksDiffer, RemoteError, SaveFailed, UsageError
from ..files import codec, fingerprint, large_files
from ..files.codec import Encoded
from ..files.large_files import Content, Way, Written
from ..files.strict_json import Json
from ..run import checkpoint, manifest
from ..run.checkpoint import Checkpoint
from ..run.directory import Copies, Run, Which
from ..run.manifest import Manifest
from . import write_shares
from .joint_save import Group, Said, Together
from .ranks import Place, Ranks, by_disk, versions
from .write_shares import Range

T = TypeVar("T")


class SaveSkipped(SaveFailed):
    """Another process has not made this save: it was told of an earlier one, as this one was."""


class Crew:
    """The processes of a training, as one of them sees them: who leads, who writes what, who decides."""

    def __init__(
        self, run: Run, timeout: float, stands_at: Callable[[], Place], *, is_shared: bool, all_write: bool
    ) -> None:
        self.ranks = Ranks(timeout, stands_at)
        self._run = run
        self._is_shared = is_shared
        self._all_write = all_write
        self._together: Together | None = None
        self._highest_at_start = 0
        self._highest_elsewhere = 0
        self.is_copied = False
        """Whether what a disk lacks can come from elsewhere."""
        self._is_told = False
        self._shared_files: Mapping[str, int] = {}
        self._replicas: Mapping[str, Any] = {}
        self._layout = ""
        self.run_id: str | None = None
        """What tells the run from all others; known once it is owned."""

    @property
    def rank(self) -> int | None:
        """This process's rank; None if it is alone."""
        return None if self.ranks.is_alone else self.ranks.rank

    @property
    def is_first(self) -> bool:
        """Whether this process decides for all."""
        return self.ranks.is_first

    @property
    def leads(self) -> bool:
        """Whether this process makes the checkpoints on its disk."""
        return self._together is None or self._together.group.leads

    @property
    def saves_all(self) -> bool:
        """Whether this process saves what all share."""
        return self.leads or self._all_write

    @property
    def writers(self) -> int:
        """How many processes divide what all share."""
        return len(self._together.group.members) if self._together and self._all_write else 1

    @property
    def has_met(self) -> bool:
        """Whether there is nobody to meet any more."""
        return self.ranks.is_alone or self._together is not None

    def meet(self, facts: Mapping[str, Json], check: Callable[[], None]) -> None:
        """Meet the others; RanksDiffer if the facts differ.

        What `check` raises it raises before anything is made on a disk.
        """
        ranks = self.ranks
        where = {"the run directory": str(self._run)} if self._is_shared else {}
        how = {"write": "all" if self._all_write else "one", "shared": self._is_shared}
        ranks.join({**versions(), **where, **how, **facts})
        groups = [[*range(ranks.size)]]
        if not self._is_shared:
            ranks.each("the run", check)
            groups = by_disk(ranks, self._run.path)
        self._together = Together(ranks, Group(ranks.rank, groups))
        self._count_from_the_highest()

    def _count_from_the_highest(self) -> None:
        ranks = self.ranks
        highest = ranks.agree("the numbers", lambda: (self._run.highest() or 0) if self.leads else 0)
        if not highest[0] and any(highest) and not self.is_copied:
            rank = next(rank for rank, number in enumerate(highest) if number)
            raise RanksDiffer(
                f"{self._run.path} holds no checkpoint on {ranks.person(0)}, but checkpoint {highest[rank]} "
                f"on {ranks.person(rank)}.",
                fix="copy the run from the node that has it to the others, or give all a new directory.",
            )
        self._highest_at_start = max(highest)

    def count_from(self, number: int) -> None:
        """Let the next save have a higher number: that one is known elsewhere."""
        self._highest_elsewhere = max(self._highest_elsewhere, number)

    def own(self) -> None:
        """Become the ones that write this run: one process on each disk does."""
        first = self.ranks.first("the run's id", lambda: self._own(None))
        self.run_id = self.ranks.each("the run directory", lambda: self._own(first))
        if self._together:
            # (who wrote the run before has let go of it only now)
            self._count_from_the_highest()
            if self._is_shared:
                self._together.check_disk(self._run.path)

    def _own(self, known: str | None) -> str | None:
        if not self.leads:
            return known
        self._run.acquire()
        run_id = self.run_id or self._run.identity(known)
        if known and run_id != known:
            raise RanksDiffer(
                f"{self._run.path} holds another run ({run_id}) than that of rank 0 ({known}).",
                fix="copy the run of one node to the others, or give all a new directory.",
            )
        return run_id

    def own_still(self) -> None:
        """Take the run again where this process has lost it; the others are not asked."""
        if self.run_id is None:
            self.own()
        elif self.leads:
            self._run.acquire()

    def choose(
        self,
        which: Which,
        read: Callable[[Checkpoint], T],
        copies: Copies | None = None,
        skip: Container[int] = (),
    ) -> tuple[Checkpoint, T] | None:
        """Return the checkpoint that `which` means, read by all processes; None to start fresh."""
        if self.ranks.is_alone:
            return self._run.choose(which, read, copies, skip)
        if not self.is_first:
            return self._follow(read, copies)
        self._is_told = False
        try:
            announced = _Announced(copies, self._pull) if copies else None
            found = self._run.choose(which, lambda found: self._propose(found, read), announced, skip)
        except BaseException as exc:
            # What was wrong with a proposal all know; that there is none left they do not.
            if not self._is_told:
                self.ranks.first("the choice", partial(_raise, exc), is_due=True)
            raise
        if found is None:
            self.ranks.first("the choice", lambda: None, is_due=True)
        return found

    def _pull(self, number: int, copies: Copies) -> None:
        self.ranks.first("the choice", lambda: number, is_due=True)
        try:
            self.ranks.each("pulling the checkpoint", lambda: self._pull_own(number, copies))
        except (CheckpointDamaged, RemoteError):
            raise
        except BaseException:
            self._is_told = True
            raise

    def _pull_own(self, number: int, copies: Copies) -> None:
        # One process on each disk.
        if self.leads:
            copies.pull(number)

    def _propose(self, found: Checkpoint, read: Callable[[Checkpoint], T]) -> T:
        is_here = found.path.resolve().parent == self._run.folder.resolve()
        path = found.path.name if is_here else str(found.path)
        self.ranks.first("the choice", lambda: path, is_due=True)
        try:
            return self.ranks.each("reading the checkpoint", lambda: read(found))
        except CheckpointDamaged:
            raise
        except BaseException:
            self._is_told = True
            raise

    def _follow(self, read: Callable[[Checkpoint], T], copies: Copies | None) -> tuple[Checkpoint, T] | None:
        while (said := self._heard()) is not None:
            # (rank 0 goes on with an older one)
            with contextlib.suppress(CheckpointDamaged, RemoteError):
                if isinstance(said, Path):
                    return self.ranks.each("reading the checkpoint", partial(self._read, said, read))
                assert copies is not None
                self.ranks.each("pulling the checkpoint", partial(self._pull_own, said, copies))
        return None

    def _heard(self) -> Path | int | None:
        said: str | int | None = self.ranks.first("the choice", lambda: None, is_due=True)
        # (a path that is absolute stays one)
        return Path(said) if isinstance(said, str) else said

    def _read(self, path: Path, read: Callable[[Checkpoint], T]) -> tuple[Checkpoint, T]:
        found = checkpoint.open_checkpoint(self._run.folder / path)
        return found, read(found)

    def next_number(self, last: int) -> int:
        """Return the number of the next save."""
        if self.ranks.is_alone:
            return self._checked(max(last, self._run.highest() or 0, self._highest_elsewhere) + 1)
        # Each counts for itself, from what they agreed on when they met; one that fails has its number too.
        self.ranks.saves_begun = (
            max(self.ranks.saves_begun, self._highest_at_start, self._highest_elsewhere) + 1
        )
        return self._checked(self.ranks.saves_begun)

    def _checked(self, number: int) -> int:
        if number > checkpoint.HIGHEST:
            raise UsageError(
                f"{self._run.folder} holds a folder with the highest save number that there is, "
                f"{checkpoint.HIGHEST}: no save can follow it.",
                fix="rename or remove that folder, if no training made it.",
            )
        return number

    def compare(self, groups: Mapping[str, Encoded], differing: Collection[int]) -> None:
        """Look at the tensors that should be the same on every rank: the next save tells which are not."""
        tensors = {
            f"{path}: {name}": tensor
            for path, group in groups.items()
            if codec.rank_of(path) is None
            for name, tensor in group.tensors.items()
            if tensor.data_ptr() not in differing
        }
        self._replicas = dict(zip(tensors, fingerprint.of([*tensors.values()]), strict=True))

    def share(
        self, sizes: Mapping[str, int], headers: Callable[[], Mapping[str, bytes]]
    ) -> dict[str, Range] | None:
        """Return which bytes of the files this process writes; None for all of those that it has."""
        of_all = {path: size for path, size in sizes.items() if codec.rank_of(path) is None}
        if not self.saves_all:
            return {path: (0, sizes[path]) for path in sizes.keys() - of_all.keys()}
        if self._together is None or not self._all_write:
            return None
        group = self._together.group
        # Files of the same sizes, in which the tensors lie in another order, would be mixed into one.
        of_all_headers = [header for path, header in headers().items() if path in of_all]
        self._layout = large_files.digest(b"".join(of_all_headers))
        # What may be linked to the last save's has one writer, who knows of both.
        plans = write_shares.plan(of_all, len(group.members), [*filter(codec.is_frozen, of_all)])
        writers = {path: sum(path in plan for plan in plans) for path in of_all}
        self._shared_files = {path: of_all[path] for path, count in writers.items() if count > 1}
        return {**plans[group.index], **{path: (0, sizes[path]) for path in sizes.keys() - of_all.keys()}}

    def commit(self, about: Manifest, files: Mapping[str, Content], way: Way) -> dict[str, Written]:
        """Write this process's files; return how, when the checkpoint of all is durable."""
        folder = self._run.folder
        if self._together is None:
            return checkpoint.commit(folder, about, files, way)[1]
        place = about.epoch, about.batch, about.step
        text = manifest.to_json(about).decode() if self.is_first else None
        replicas = {name: _text(found) for name, found in sorted(self._replicas.items())}
        digest = large_files.digest(repr(replicas).encode()) if replicas else ""
        said = Said(place, about.boundary.value, self._layout, digest, text)
        return self._together.commit(about.number, said, replicas, folder, files, self._shared_files, way)

    def decided(self, number: int) -> Manifest | None:
        """Return the manifest of a save as rank 0 has it, but for the files; None to rank 0 itself."""
        return None if self.is_first or self._together is None else self._together.heard(number)

    def fail(self, number: int, error: BaseException) -> None:
        """Tell the others, who would wait, that there will be no such checkpoint."""
        if self._together:
            self._together.fail(number, error)

    def skip(self, number: int, error: BaseException) -> None:
        """The same where this process was told instead what became of the one before."""
        problem = f"checkpoint {number} was not made: rank {self.ranks.rank} was told of the one before it"
        text = str(error).partition("\n")[0]
        self.fail(number, SaveSkipped(f"{problem}: {text}", fix="call save() again."))

    def leave(self, reason: str) -> None:
        """Let the others know that this process takes part no more."""
        # Where they cannot be reached any more, there is nobody to tell.
        with contextlib.suppress(RankLost):
            self.ranks.leave(reason)
            if self._together:
                self._together.close()
        self.ranks.close()


class _Announced:
    """Copies that all processes bring together: rank 0 says which."""

    def __init__(self, copies: Copies, pull: Callable[[int, Copies], None]) -> None:
        self.numbers = copies.numbers
        self._copies = copies
        self._pull = pull

    def __str__(self) -> str:
        return str(self._copies)

    def pull(self, number: int) -> None:
        self._pull(number, self._copies)

    def best(self, above: int) -> int | None:
        return self._copies.best(above)


def _text(found: Any) -> str:
    """Return a fingerprint as text; one that is made on a device is waited for."""
    return found.hex() if isinstance(found, bytes) else str(None if found is None else int(found))


def _raise(error: BaseException) -> Any:
    raise error
