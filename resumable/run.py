"""One run directory: list its checkpoints, find the newest intact one, prune."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeVar

from . import checkpoint, disk, manifest, policy
from .checkpoint import Checkpoint
from .errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    FormatTooNew,
    NotARun,
    ResumableError,
    RunExists,
    SaveFailed,
    UsageError,
    warn,
)

T = TypeVar("T")
Which = str | int | os.PathLike[str]
"""A word, a save number or a checkpoint's path."""

_NEWEST = ("must", "newest", "latest", "last")
_WORDS = ("auto", "never", "best", *_NEWEST)


class Run:
    """A run directory, to look at and to tidy; nothing is read before a method is called.

    >>> Run("runs/exp").numbers()
    []
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._given = os.fspath(path)
        # A script may change its working directory; its run stays where it was.
        self.path = Path(path).absolute()
        self.folder = self.path / "checkpoints"
        self._lock: disk.Lock | None = None

    def __str__(self) -> str:
        return str(self._given)

    def check(self, resume: Which) -> None:
        """Raise for what can be seen to be wrong before anything is made or locked."""
        for path in (self.folder, *self.folder.parents):
            if os.path.lexists(path) and not path.is_dir():
                raise NotARun(
                    f"{path} is not a folder.",
                    fix="give the run a directory: a new one, an empty one, or one of an earlier run.",
                )
        numbers = self.numbers()
        if resume == "never" and numbers:
            raise RunExists(
                f"{self.path} holds {len(numbers)} checkpoints, and resume='never'.",
                fix="give the new run another directory, or move this one away.",
            )
        if resume in (*_NEWEST, "best") and not numbers:
            raise self._missing()
        if resume not in _WORDS:
            self._open_named(resume)

    def numbers(self) -> list[int]:
        """Return the save numbers that are there, oldest first, without opening anything."""
        return sorted(self._paths())

    def _paths(self) -> dict[int, Path]:
        found = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            for entry in entries:
                match = checkpoint.NAME.fullmatch(entry.name)
                # Not through a link: what it leads to is another run's, and pruning would delete it.
                if match and entry.is_dir(follow_symlinks=False):
                    found[int(match[1])] = Path(entry.path)
        return found

    def path_of(self, number: int) -> Path | None:
        """Return the folder of a checkpoint, if it is there."""
        return self._paths().get(number)

    def open(self, number: int) -> Checkpoint:
        """Return one checkpoint by its save number."""
        try:
            path = self._paths()[number]
        except KeyError:
            raise self._no_such(number) from None
        found = checkpoint.open_checkpoint(path)
        if path.name != checkpoint.name(found.about.number, found.about.step):
            other = checkpoint.name(found.about.number, found.about.step)
            raise disk.damaged(path, f"{manifest.NAME} is the one of {other}")
        return found

    def _no_such(self, number: int) -> CheckpointNotFound:
        there = ", ".join(map(str, self.numbers())) or "none"
        return CheckpointNotFound(
            f"there is no checkpoint {number} in {self.path}; there are: {there}.",
            fix="name one of these, or resume='auto' for the newest intact one.",
        )

    def checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints whose manifests are intact, oldest first."""
        found = []
        for number in self.numbers():
            with contextlib.suppress(CheckpointDamaged):
                found.append(self.open(number))
        return found

    def choose(self, which: Which, read: Callable[[Checkpoint], T]) -> tuple[Checkpoint, T] | None:
        """Return the checkpoint that `which` means and what `read` returned for it; None to start fresh."""
        if which == "never" or (which == "auto" and not self.numbers()):
            return None
        if which == "auto" or which in _NEWEST:
            return self._newest_intact(read)
        found = self.open(self._best_number()) if which == "best" else self._open_named(which)
        return found, read(found)

    def _newest_intact(self, read: Callable[[Checkpoint], T]) -> tuple[Checkpoint, T]:
        # Newest is the highest save number: after going back, the highest step is of an abandoned branch.
        for number in reversed(self.numbers()):
            try:
                found = self.open(number)
                return found, read(found)
            except CheckpointDamaged as exc:
                # Not only the first: each one that is skipped is training that is lost.
                warn(f"{exc.problem} It is skipped; an older checkpoint is used.")
        if not self.numbers():
            raise self._missing()
        raise CheckpointDamaged(
            f"none of the {len(self.numbers())} checkpoints in {self.path} is intact.",
            fix="look at them with `resumable verify`; to start fresh, give the run another directory.",
        )

    def _best_number(self) -> int:
        for found in reversed(self.checkpoints()):
            if found.about.best:
                return found.about.best.number
        raise CheckpointNotFound(
            f"no checkpoint in {self.path} is known to be the best.",
            fix="say which metric decides (maximize= or minimize=) and give it to save().",
        )

    def _open_named(self, which: Which) -> Checkpoint:
        if isinstance(which, bool) or not isinstance(which, (int, str, os.PathLike)):
            raise UsageError(
                f"resume={which!r} does not say what to go on from.",
                fix="say 'auto', 'must', 'never', 'best', a save number, or a checkpoint's path.",
            )
        if isinstance(which, int) or (isinstance(which, str) and which.isdecimal()):
            return self.open(int(which))
        path = Path(which).resolve()
        if os.path.lexists(path / manifest.NAME):
            return checkpoint.open_checkpoint(path)
        raise CheckpointNotFound(
            f"resume={os.fspath(which)!r} is neither a word that is known nor a checkpoint's folder.",
            fix="say 'auto', 'must', 'never', 'best', a save number, or the path of a folder with a "
            f"{manifest.NAME}.",
        )

    def _missing(self) -> CheckpointNotFound:
        """Return the error for a run that has to be there and is not."""
        similar = difflib.get_close_matches(self.path.name, _siblings(self.path), cutoff=0.5)
        hint = f" Did you mean {self.path.parent / similar[0]}?" if similar else ""
        what = "holds no checkpoint" if self.path.is_dir() else "does not exist"
        return CheckpointNotFound(
            f"{self.path} {what}.{hint}",
            fix="check the path. In a script, resume='auto' starts fresh where there is nothing yet.",
        )

    def acquire(self) -> None:
        """Become the one process that writes this run, and tidy up after the one before."""
        if self._lock and self._lock.is_held():
            self._lock.renew()
            return
        with self._writing():
            disk.make_folder(self.path)
            self._lock = disk.Lock(self.path / ".lock")
            self._remove_debris()

    def release(self) -> None:
        """Let another process write this run."""
        if self._lock:
            self._lock.release()
            self._lock = None

    def identity(self) -> str:
        """Return the run's id; the first call in its life writes it down."""
        path = self.path / "run.json"
        if os.path.lexists(path):
            try:
                return str(manifest.unseal(disk.read_small(self.path, path.name))["run_id"])
            except FormatTooNew as exc:
                raise FormatTooNew(f"{path} cannot be read: {exc.problem}", fix=exc.fix) from exc
            except (CheckpointDamaged, ValueError, KeyError) as exc:
                if not self.numbers() and not disk.read_small(self.path, path.name).startswith(
                    b'{"checksum"'
                ):
                    raise NotARun(
                        f"{path} was not written by resumable.",
                        fix="give the run a directory of its own; nothing in this one was touched.",
                    ) from exc
                # Nothing is lost with it: every manifest repeats the id.
                warn(f"{path} is damaged and written anew")
        known = [found.about.run_id for found in self.checkpoints()]
        run_id = known[-1] if known else secrets.token_hex(8)
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        with self._writing():
            disk.replace(path, manifest.seal({"run_id": run_id, "created": created}))
        return run_id

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except ResumableError:
            raise
        except OSError as exc:
            raise SaveFailed(
                f"{self.path} cannot be written: {exc}.",
                fix="mend the cause (room on the disk, permissions), or give another run directory.",
            ) from exc

    def point(self, word: str, target: Path | None) -> None:
        """Let runs/exp/`word` lead to a checkpoint: for people, never trusted by us."""
        link = self.path / word
        if target is None:
            return
        if os.path.lexists(link) and (not link.is_symlink() or link.resolve() == target.resolve()):
            return
        try:
            disk.point(link, target)
        except OSError as exc:
            warn(f"the link {link} could not be made ({exc.strerror}); nothing depends on it")

    def prune(self, keep: int | None, protect: Iterable[int | None]) -> None:
        """Delete all but the newest `keep` checkpoints and the protected ones.

        To be called when the newest one is durable: until then an older one may be the last intact one.
        """
        paths = self._paths()
        for number in policy.to_prune(paths, keep, protect):
            try:
                self._remove(paths[number])
            except OSError as exc:
                warn(f"checkpoint {number} in {self.path} could not be pruned: {exc.strerror or exc}")

    def _remove(self, path: Path) -> None:
        if others := checkpoint.unknown(path):
            raise OSError(f"it holds {', '.join(others)}, which resumable did not write")
        # Renamed first: a crash in between must not leave half a checkpoint under a checkpoint's name.
        trash = path.with_name(f".trash-{path.name.split('-')[0]}-{secrets.token_hex(4)}")
        os.rename(path, trash)
        disk.flush_folder(self.folder)
        checkpoint.remove(trash)

    def _remove_debris(self) -> None:
        for folder, ours in ((self.path, _LINK_DEBRIS), (self.folder, checkpoint.DEBRIS)):
            for name in sorted(os.listdir(folder)) if folder.is_dir() else []:
                if not ours.fullmatch(name):
                    continue
                try:
                    if (folder / name).is_dir() and not (folder / name).is_symlink():
                        checkpoint.remove(folder / name)
                    else:
                        os.unlink(folder / name)
                except OSError as exc:
                    warn(f"what a killed save left in {folder / name} could not be removed: {exc}")


_LINK_DEBRIS = re.compile(r"\.(?:newest|best|run\.json)-[0-9a-f]{8}")


def _siblings(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return [entry.name for entry in path.parent.iterdir() if (entry / "run.json").exists()]
    return []
