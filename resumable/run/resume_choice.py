"""Which checkpoint to resume from: the newest intact one, the best, or the one that was named."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Generic, Protocol, TypeGuard, TypeVar

from ..errors import (
    CannotRead,
    CheckpointDamaged,
    CheckpointNotFound,
    NotARun,
    RemoteError,
    ResumableError,
    RunExists,
    UsageError,
    did_you_mean,
    warn,
)
from . import address, checkpoint, manifest
from .catalog import Catalog, number_of
from .checkpoint import Checkpoint, IsElsewhere

T = TypeVar("T")
Which = str | int | os.PathLike[str]
"""A word, a save number or a checkpoint's path."""

_NEWEST = ("must", "newest", "latest", "last")
_WORDS = ("auto", "never", "best", *_NEWEST)
_CHOICES = (
    "'auto', 'must', 'never', 'best', 'newest', a save number, or a checkpoint: its folder, "
    "'runs/other@best' or 'runs/other@41'"
)


class Copies(Protocol):
    """Copies of a run's checkpoints elsewhere."""

    @property
    def numbers(self) -> Mapping[int, str]:
        """The names of the folders, by save number."""

    def pull(self, number: int) -> None:
        """Copy one into the run, in place of a damaged one."""

    def best(self, above: int) -> int | None:
        """Return the number of the best, according to those above a number."""


def is_number(which: object) -> TypeGuard[int | str]:
    """Return whether this is a save number, as a number or as text."""
    if isinstance(which, str):
        return which.isdecimal()
    return isinstance(which, int) and not isinstance(which, bool)


def check(catalog: Catalog, which: Which, is_copied: bool) -> None:
    """Raise if the folder cannot be that of a run, or `which` cannot be chosen from it."""
    path = catalog.folder.parent
    for folder in (catalog.folder, *catalog.folder.parents):
        if os.path.lexists(folder) and not _is_folder(folder):
            raise NotARun(
                f"{folder} is not a folder.",
                fix="give the run a directory: a new one, an empty one, or one of an earlier run.",
                command="give the directory of a run, or the folder of a checkpoint, and no file in it.",
            )
    is_empty = catalog.highest() is None
    if which == "never" and not is_empty:
        held = len(catalog)
        raise RunExists(
            f"{path} holds {held} checkpoint{'s' * (held != 1)}, and resume='never'.",
            fix="give the new run another directory, or move this one away.",
        )
    if is_copied and (which in _WORDS or is_number(which)):
        return
    if which in (*_NEWEST, "best") and is_empty:
        raise _missing(path)
    if which not in _WORDS:
        _open_named(catalog, which)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError as exc:
        raise CannotRead(
            f"{path} cannot be read: {exc.strerror}.",
            fix="mend the cause (the disk, permissions) and start again.",
        ) from exc


class Choice(Generic[T]):
    """Finds the checkpoint to resume from and reads it; takes from the copies what is missing or damaged.

    Args:
        catalog: The checkpoints that are here.
        run: The path of the run as the user wrote it.
        read: Reads and verifies a checkpoint.
        copies: The checkpoints elsewhere.
    """

    def __init__(
        self, catalog: Catalog, run: str, read: Callable[[Checkpoint], T], copies: Copies | None
    ) -> None:
        self.catalog, self.run, self.read, self.copies = catalog, run, read, copies

    def find(self, which: Which) -> tuple[Checkpoint, T] | None:
        """Return the checkpoint that `which` means and the result of `read` for it; None to start fresh."""
        is_empty = self.catalog.highest() is None and not (self.copies and self.copies.numbers)
        if which == "never" or (which == "auto" and is_empty):
            return None
        if which == "auto" or which in _NEWEST:
            return self._newest_intact()
        if which != "best" and not is_number(which):
            found = _open_named(self.catalog, which)
            return found, self.read(found)
        return self._open(self._best_number() if which == "best" else int(which))

    def _newest_intact(self) -> tuple[Checkpoint, T]:
        # Newest is the highest save number: after restore(), the highest step may be on an abandoned branch.
        last: ResumableError | None = None
        for number in self._newest_first():
            try:
                return self._open(number)
            except (CheckpointDamaged, IsElsewhere, RemoteError) as exc:
                if isinstance(exc, RemoteError) and self.catalog.highest() is None:
                    raise
                # Of an older one, too, only a part is here.
                if isinstance(exc, IsElsewhere) and not self._is_copied_before(number):
                    raise
                # Warn of each: every skipped checkpoint is lost training.
                warn(f"{exc.problem} It is skipped; an older checkpoint is used.")
                last = _without_frames(exc)
        if last is None:
            raise _missing(self.catalog.folder.parent)
        if isinstance(last, RemoteError):
            raise last
        where, count, other = f"{self.catalog.folder.parent}", len(self.catalog), "another directory"
        if self.copies and self.copies.numbers:
            where, count = f"{where} or {self.copies}", len({*self.catalog.numbers(), *self.copies.numbers})
            other += " and another remote folder"
        raise CheckpointDamaged(
            f"none of the {count} checkpoints in {where} is intact. Of the last one tried: {last.problem}",
            fix=f"look at them with `resumable verify {self.run} --all`; "
            f"to start fresh, give the run {other}.",
            command=f"look at them with `resumable verify {self.run} --all`.",
        ) from last

    def _is_copied_before(self, number: int) -> bool:
        return self.copies is not None and any(one < number for one in self.copies.numbers)

    def _newest_first(self) -> Iterable[int]:
        if self.copies and self.copies.numbers:
            return sorted({*self.catalog.numbers(), *self.copies.numbers}, reverse=True)
        return (number_of(path.name) for path in self.catalog.newest_first())

    def _open(self, number: int) -> tuple[Checkpoint, T]:
        copies = self.copies if self.copies and number in self.copies.numbers else None
        if copies and self.catalog.path_of(number) is None:
            copies.pull(number)
        try:
            found = self.catalog.open(number)
            return found, self.read(found)
        except (CheckpointDamaged, IsElsewhere) as exc:
            if not copies:
                raise
            if isinstance(exc, CheckpointDamaged):
                warn(f"{exc.problem} It is taken from {copies}.")
        copies.pull(number)
        found = self.catalog.open(number)
        return found, self.read(found)

    def _best_number(self) -> int:
        here = next((found.about for found in self.catalog.intact() if found.about.best), None)
        # A newer one in the remote may know of a better one.
        if self.copies and (best := self.copies.best(above=here.number if here else 0)):
            return best
        if here and here.best and here.best.number == manifest.NO_CHECKPOINT:
            raise CheckpointNotFound(
                f"the best {here.best.goal.metric} so far, {here.best.value:.4g}, is from before "
                f"{self.catalog.folder.parent} began (begin_at): no checkpoint here is better.",
                fix="load the old checkpoint as the script does at the first start, or name a save number.",
            )
        if here and here.best:
            return here.best.number
        raise CheckpointNotFound(
            f"no checkpoint in {self.catalog.folder.parent} is known to be the best.",
            fix="say which metric decides (maximize= or minimize=) and give it to save().",
            command=f"name another: `resumable ls {self.run}` shows the numbers and the metrics.",
        )


def _without_frames(error: ResumableError) -> ResumableError:
    """Drop the tracebacks of an error and its causes: their frames hold the tensors that were read."""
    one: BaseException | None = error
    while one:
        one.__traceback__ = None
        one = one.__cause__ or one.__context__
    return error


def _open_named(catalog: Catalog, which: Which) -> Checkpoint:
    if isinstance(which, bool) or not isinstance(which, (int, str, os.PathLike)):
        raise UsageError(f"resume={which!r} does not say where to continue from.", fix=f"say {_CHOICES}.")
    if is_number(which):
        return catalog.open(int(which))
    assert not isinstance(which, int)
    run, word = address.named(os.path.expanduser(which))
    path = Path(run).resolve()
    if word or address.is_run(path):
        # A run of its own, and in it the newest intact one unless another is named.
        other = Choice(Catalog(path / catalog.folder.name), run, lambda found: found, None)
        found = other.find(word or "must")
        assert found
        return found[0]
    if os.path.lexists(path / manifest.NAME):
        return checkpoint.open_checkpoint(path)
    meant = did_you_mean(which, _WORDS)
    is_path = not isinstance(which, str) or os.sep in which or bool(which and os.path.lexists(path))
    raise (CheckpointNotFound if is_path else UsageError)(
        f"resume={os.fspath(which)!r} is neither a known word nor a checkpoint.{meant}",
        fix=f"say {_CHOICES}.",
    )


def _missing(path: Path) -> CheckpointNotFound:
    """Return the error for a run that has to exist and does not."""
    hint = f" Did you mean {meant}?" if (meant := meant_by(path)) else ""
    what = "holds no checkpoint" if path.is_dir() else "does not exist"
    return CheckpointNotFound(
        f"{path} {what}.{hint}",
        fix="check the path. In a script, resume='auto' starts fresh where there is nothing yet.",
        command="check the path; `resumable ls FOLDER` lists the runs below a folder.",
    )


def meant_by(path: Path) -> Path | None:
    """Return the run that a wrong path may mean: below it, above it, or beside it with a similar name."""
    around = (above for above in Path(os.path.realpath(path)).parents if address.is_run(above))
    similar = difflib.get_close_matches(path.name, _runs_in(path.parent), cutoff=0.5)
    near = (path.parent / name for name in similar if name != path.name)
    return next(chain((path / name for name in _runs_in(path)), around, near), None)


def _runs_in(folder: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(entry.name for entry in folder.iterdir() if address.is_run(entry))
    return []
