"""The crew of a training of several processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..errors import CheckpointDamaged, RankLost, RanksDiffer, RemoteError
from ..files import codec, fingerprint, large_files
from ..files.codec import Encoded
from ..files.large_files import Content, Way, Written
from ..files.strict_json import Json
from ..run import checkpoint, manifest
from ..run.checkpoint import Checkpoint, IsElsewhere
from ..run.directory import Run
from ..run.manifest import Manifest
from ..run.resume_choice import Copies, Which
from . import write_shares
from .crew import Crew
from .joint_saves import Group, JointSaves, Said
from .ranks import Ranks, by_disk, versions
from .stages import Told
from .write_shares import Range

T = TypeVar("T")


class Joint(Crew):
    """One of several processes: they agree on every decision, and make each checkpoint together."""

    has_met = False

    def __init__(self, run: Run, ranks: Ranks, *, is_shared: bool, all_write: bool) -> None:
        """`is_shared`: whether all see one run directory; `all_write`: whether all write what they share."""
        super().__init__(run, ranks)
        self._is_shared = is_shared
        self._all_write = all_write
        self._saves: JointSaves | None = None
        self._highest_at_start = 0
        self._has_announced = False
        self._shared_files: Mapping[str, int] = {}
        self._replicas: Mapping[str, Any] = {}
        self._layout = ""

    def meet(
        self, facts: Mapping[str, Json], parts: Told, check: Callable[[], None], *, is_copied: bool
    ) -> Sequence[Told]:
        """Meet the others, and return the parts of each; RanksDiffer if facts or parts differ."""
        ranks = self.ranks
        where = {"the run directory": str(self._run)} if self._is_shared else {}
        how = {"write": "all" if self._all_write else "one", "shared": self._is_shared}
        told = ranks.join({**versions(), **where, **how, **facts}, parts)
        groups = [[*range(ranks.size)]]
        if not self._is_shared:
            ranks.each("the run", check)
            groups = by_disk(ranks, self._run.path)
        group = Group(ranks.rank, groups)
        self._saves, self.has_met = JointSaves(ranks, group), True
        self.leads, self.saves_all = group.leads, group.leads or self._all_write
        self.disks, self.disk, self.on_disks = len(groups), groups.index(group.members), groups
        self.pushes = self.is_first
        self.writers = len(group.members) if self._all_write else 1
        self._count_from_the_highest(is_copied)
        return told

    def note_set(self, disks: Sequence[int]) -> None:
        """Note which disks hold a whole checkpoint together, this one among them."""
        if self._saves and self.leads:
            group = self._saves.group
            group.beside = [leader for n, leader in enumerate(group.leaders) if n in disks and n != self.disk]
            self.pushes = 0 in disks

    def _count_from_the_highest(self, is_copied: bool) -> None:
        ranks = self.ranks
        highest = ranks.agree("the numbers", lambda: (self._run.highest() or 0) if self.leads else 0)
        if not highest[0] and any(highest) and not is_copied:
            rank = next(rank for rank, number in enumerate(highest) if number)
            raise RanksDiffer(
                f"{self._run.path} holds no checkpoint on {ranks.person(0)}, but checkpoint {highest[rank]} "
                f"on {ranks.person(rank)}.",
                fix="copy the run from the node that has it to the others, or give all a new directory.",
            )
        self._highest_at_start = max(highest)

    def own(self, *, is_copied: bool = False) -> None:
        """Lock the run for this training, on each disk by one process."""
        if self.run_id is not None:
            if self.leads:
                # It may have been lost since.
                self._run.acquire()
            return
        first = self.ranks.first("the run's id", lambda: self._own(None))
        self.run_id = self.ranks.each("the run directory", lambda: self._own(first))
        # The process that wrote the run before has unlocked it only now.
        self._count_from_the_highest(is_copied)
        if self._is_shared and self._saves:
            self._saves.check_disk(self._run.path)

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

    def choose(
        self, which: Which, read: Callable[[Checkpoint], T], copies: Copies | None = None
    ) -> tuple[Checkpoint, T] | None:
        """Return the checkpoint that `which` means, read by all processes; None to start fresh."""
        if not self.is_first:
            return self._follow(read, copies)
        self._has_announced = False
        try:
            announced = _Announced(copies, self._pull) if copies else None
            found = self._run.choose(which, lambda found: self._propose(found, read), announced)
        except BaseException as exc:
            # All know why a proposal failed; they do not know yet that no other follows.
            if not self._has_announced:
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
            self._has_announced = True
            raise

    def _pull_own(self, number: int, copies: Copies) -> None:
        # One process on each disk.
        if self.leads:
            copies.pull(number)

    def _propose(self, found: Checkpoint, read: Callable[[Checkpoint], T]) -> T:
        path = found.path.name if self._run.holds(found) else str(found.path)
        self.ranks.first("the choice", lambda: path, is_due=True)
        try:
            return self.ranks.each("reading the checkpoint", lambda: read(found))
        except (CheckpointDamaged, IsElsewhere):
            raise
        except BaseException:
            self._has_announced = True
            raise

    def _follow(self, read: Callable[[Checkpoint], T], copies: Copies | None) -> tuple[Checkpoint, T] | None:
        while (said := self._heard()) is not None:
            # Rank 0 then proposes an older one, has it pulled, or ends the search.
            with contextlib.suppress(CheckpointDamaged, IsElsewhere, RemoteError):
                if isinstance(said, Path):
                    return self.ranks.each("reading the checkpoint", partial(self._read, said, read))
                assert copies is not None
                self.ranks.each("pulling the checkpoint", partial(self._pull_own, said, copies))
        return None

    def _heard(self) -> Path | int | None:
        said: str | int | None = self.ranks.first("the choice", lambda: None, is_due=True)
        # A path that is absolute stays one.
        return Path(said) if isinstance(said, str) else said

    def _read(self, path: Path, read: Callable[[Checkpoint], T]) -> tuple[Checkpoint, T]:
        found = checkpoint.open_checkpoint(self._run.folder / path)
        return found, read(found)

    def next_number(self, last: int) -> int:
        """Return the number of the next save."""
        self.ranks.saves_begun = super().next_number(last)
        return self.ranks.saves_begun

    def _highest(self, last: int) -> int:
        # Each process counts for itself from what they agreed on; a save that fails has its number too.
        return max(self.ranks.saves_begun, self._highest_at_start)

    def compare(self, groups: Mapping[str, Encoded], differing: Collection[int]) -> None:
        """Hash the tensors that should be equal on every rank, for the next save to compare."""
        tensors = {
            f"{path}: {name}": tensor
            for path, group in groups.items()
            if not codec.has_one_writer(path)
            for name, tensor in group.tensors.items()
            if tensor.data_ptr() not in differing
        }
        self._replicas = dict(zip(tensors, fingerprint.of([*tensors.values()]), strict=True))

    def share(
        self, sizes: Callable[[], Mapping[str, int]], headers: Callable[[], Mapping[str, bytes]]
    ) -> dict[str, Range] | None:
        """Return which bytes of the files this process writes; None for all of those that it has."""
        if self.saves_all and (self._saves is None or not self._all_write):
            return None
        whole = sizes()
        of_all = {path: size for path, size in whole.items() if not codec.has_one_writer(path)}
        own = {path: (0, size) for path, size in whole.items() if path not in of_all}
        if not self.saves_all:
            return own
        assert self._saves
        group = self._saves.group
        # Files of equal sizes whose tensors are in another order must not be merged into one.
        of_all_headers = [header for path, header in headers().items() if path in of_all]
        self._layout = large_files.digest(b"".join(of_all_headers))
        # A file that may become a link to the last save's has one writer, which knows both.
        plans = write_shares.plan(of_all, len(group.members), [*filter(codec.is_frozen, of_all)])
        writers = {path: sum(path in plan for plan in plans) for path in of_all}
        self._shared_files = {path: of_all[path] for path, count in writers.items() if count > 1}
        return {**plans[group.index], **own}

    def commit(
        self, about: Manifest, files: Mapping[str, Content], way: Way
    ) -> tuple[Manifest | None, dict[str, Written]]:
        """Write this process's files; return once the checkpoint of all is durable."""
        assert self._saves
        place = about.epoch, about.batch, about.step
        text = manifest.to_json(about).decode() if self.is_first else None
        replicas = {name: _text(found) for name, found in sorted(self._replicas.items())}
        digest = large_files.digest(repr(replicas).encode()) if replicas else ""
        said = Said(place, about.boundary.value, self._layout, digest, text)
        return self._saves.commit(
            about.number, said, replicas, self._run.folder, files, self._shared_files, way
        )

    def decided(self, number: int) -> Manifest | None:
        """Return rank 0's manifest of a save, without the files; None on rank 0."""
        return None if self.is_first or self._saves is None else self._saves.heard(number)

    def fail(self, number: int, error: BaseException) -> None:
        """Tell the others, who would wait for it, that this checkpoint will not be made."""
        if self._saves:
            self._saves.fail(number, error)

    def leave(self, reason: str) -> None:
        """Tell the others that this process leaves the training."""
        # If they cannot be reached any more, there is no one to tell.
        with contextlib.suppress(RankLost):
            self.ranks.leave(reason)
            if self._saves:
                self._saves.close()
        self.ranks.close()


class _Announced:
    """Copies that all processes pull together; rank 0 announces which."""

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
    """Return a fingerprint as text; wait for one that is computed on a device."""
    return found.hex() if isinstance(found, bytes) else str(None if found is None else int(found))


def _raise(error: BaseException) -> Any:
    raise error
