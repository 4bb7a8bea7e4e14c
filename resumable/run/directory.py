"""One run directory: its lock, its id, its links, and the checkpoints in it."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeVar

from ..errors import (
    CannotRead,
    CheckpointDamaged,
    CheckpointNotFound,
    FormatTooNew,
    NotARun,
    ResumableError,
    SaveFailed,
    warn,
)
from ..files import disk, lock
from ..tracebacks import short_methods
from . import checkpoint, manifest, markup, resume_choice
from .catalog import Catalog
from .checkpoint import Checkpoint, Stage
from .manifest import Best, Goal, Manifest
from .policy import Keep, counted, when
from .resume_choice import Choice, Copies, Which

T = TypeVar("T")
_AT_A_GLANCE = 5
_LINK_DEBRIS = re.compile(r"\.(?:newest|best|run\.json|history\.jsonl|probe)-[0-9a-f]{8}")


@short_methods
class Run:
    """A run directory, to inspect and to prune; nothing is read before a method is called.

    Args:
        path: The directory.

    >>> Run("runs/exp").numbers()
    []
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._given = os.fspath(path)
        # Absolute, because a script may change its working directory.
        self.path = Path(os.path.expanduser(path)).absolute()
        self.folder = self.path / "checkpoints"
        self._catalog = Catalog(self.folder)
        self._lock: lock.Lock | None = None
        self._is_free = threading.Event()
        self._is_free.set()

    def __str__(self) -> str:
        return str(self._given)

    def __repr__(self) -> str:
        try:
            there = self.numbers()
        except CannotRead:
            return f"<Run {self}>"
        return f"<Run {self}: {counted(len(there), 'checkpoint')}{f', newest {there[-1]}' if there else ''}>"

    def _repr_html_(self) -> str:
        """Return the table that a notebook shows: the newest checkpoints."""
        there = self.numbers()
        caption = f"{self}: {counted(len(there), 'checkpoint')}"
        caption += f", the newest {_AT_A_GLANCE}" if len(there) > _AT_A_GLANCE else ""
        rows = (_glance(self, number) for number in reversed(there[-_AT_A_GLANCE:]))
        return markup.table(caption, ("number", "epoch", "batch", "step", "metrics", "saved"), rows, (4, 5))

    def check(self, resume: Which, is_copied: bool = False) -> None:
        """Raise if the path cannot be a run, before anything is made or locked.

        What is not here may be in a remote copy, if there is one.
        """
        resume_choice.check(self._catalog, resume, is_copied)

    def numbers(self) -> list[int]:
        """Return the save numbers, oldest first, without opening a checkpoint."""
        return self._catalog.numbers()

    def names(self) -> dict[int, str]:
        """Return the names of the checkpoints' folders by save number, oldest first."""
        return self._catalog.names()

    def highest(self) -> int | None:
        """Return the highest save number, None without a checkpoint."""
        return self._catalog.highest()

    def holds_more_than(self, count: int) -> bool:
        """Return whether there are more than `count` checkpoints."""
        return len(self._catalog) > count

    def holds(self, found: Checkpoint) -> bool:
        """Return whether a checkpoint belongs to this run."""
        # Most often it is; to resolve a path asks the disk for each folder of it.
        return found.path.parent == self.folder or found.path.resolve().parent == self.folder.resolve()

    def path_of(self, number: int) -> Path | None:
        """Return the folder of a checkpoint, if it exists.

        Args:
            number: Its save number.
        """
        return self._catalog.path_of(number)

    def open(self, number: int) -> Checkpoint:
        """Return one checkpoint.

        Args:
            number: Its save number.
        """
        return self._catalog.open(number)

    def checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints whose manifests are intact, oldest first."""
        return [*reversed([*self._catalog.intact()])]

    def choose(
        self, which: Which, read: Callable[[Checkpoint], T], copies: Copies | None = None
    ) -> tuple[Checkpoint, T] | None:
        """Return the checkpoint that `which` means and the result of `read` for it; None to start fresh.

        What is not here, or is damaged, is taken from its `copies`.
        """
        return Choice(self._catalog, str(self), read, copies).find(which)

    def best(self, goal: Goal | None) -> Best | None:
        """Return the best of the intact checkpoints; only new ones are opened."""
        return self._catalog.best(goal)

    def added(self, about: Manifest) -> None:
        """Know what a new checkpoint's manifest says, without opening it."""
        self._catalog.added(about)

    def take_in(self, stage: Stage, about: Manifest) -> Checkpoint:
        """Commit a complete stage to this run, in place of a damaged checkpoint of that name."""
        return self._catalog.take_in(stage, about)

    def remove_pulls(self, but: Path | None = None) -> None:
        """Remove what killed pulls have left, except for one."""
        for path in self.folder.glob(".pull-*"):
            if path != but and checkpoint.PULL.fullmatch(path.name):
                # Other files in it keep it there.
                with contextlib.suppress(OSError):
                    checkpoint.remove(path)

    def prune(self, keep: Keep | None, protect: Iterable[int | None], goal: Goal | None = None) -> None:
        """Delete all checkpoints except those that `keep` keeps and the protected ones.

        To be called when the newest one is durable: until then an older one may be the last intact one.
        """
        if keep is not None:
            self._catalog.prune(keep, protect, goal)

    def remove(self, going: Iterable[int]) -> dict[int, str]:
        """Delete checkpoints unconditionally; return which could not be deleted, and why."""
        return self._catalog.remove(going)

    def acquire(self) -> None:
        """Become the only process that writes this run, and clean up after the last one."""
        is_held = self._lock is not None and self._lock.is_held()
        if self._lock and is_held and self._lock.is_in_place():
            self._lock.renew()
            return
        # The locked folder may have been moved; another process could start here.
        self.release()
        with _writing(self.path):
            disk.make_folder(self.path)
            disk.flush_names(self.path)
            self._lock = lock.Lock(self.path / ".lock")
            self._is_free.clear()
            left = [self.path / name for name in os.listdir(self.path) if _LINK_DEBRIS.fullmatch(name)]
            _remove_debris([*self._catalog.debris(), *left])
        if is_held:
            warn(
                f"{self.path} is not what this process has locked: it was moved or deleted, or its disk is "
                "not mounted any more. What is saved from here on goes to the folder that has this name now."
            )

    def release(self) -> None:
        """Release the lock, so that another process can write this run."""
        if self._lock:
            self._lock.release()
            self._lock = None
        self._is_free.set()

    def wait_until_free(self, patience: float) -> None:
        """Wait until the lock of this object is released, for at most `patience` seconds."""
        self._is_free.wait(patience)

    def identity(self, known: str | None = None) -> str:
        """Return the run's id; the first call in its life writes it, the `known` id if given."""
        path = self.path / "run.json"
        if os.path.lexists(path):
            try:
                return _written_id(self.path)
            except FormatTooNew as exc:
                raise FormatTooNew(f"{path} cannot be read: {exc.problem}", fix=exc.fix) from exc
            except (CheckpointDamaged, ValueError, KeyError) as exc:
                if self._catalog.highest() is None and not _id_text(self.path).startswith(b'{"checksum"'):
                    raise NotARun(
                        f"{path} was not written by resumable.",
                        fix="give the run a directory of its own; nothing in this one was touched.",
                    ) from exc
                # Nothing is lost: every manifest repeats the id.
                warn(f"{path} is damaged and written again")
        ids = (found.about.run_id for found in self._catalog.intact())
        run_id = known or next(ids, None) or os.urandom(8).hex()
        self.adopt(run_id)
        return run_id

    def known_id(self) -> str | None:
        """Return the run's id if it has checkpoints, without writing anything."""
        known = next((found.about.run_id for found in self._catalog.intact()), None)
        if known is None and self._catalog.highest() is not None:
            # All are damaged: checkpoints of another run must not be mixed with them.
            with contextlib.suppress(CheckpointDamaged, ValueError, KeyError):
                return _written_id(self.path)
        return known

    def adopt(self, run_id: str) -> None:
        """Take over a run id, in place of the one that was here."""
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        with _writing(self.path):
            disk.replace(self.path / "run.json", manifest.seal({"run_id": run_id, "created": created}))

    def point(self, word: str, target: Path | None) -> None:
        """Link runs/exp/`word` to a checkpoint: for people; nothing here reads it."""
        link = self.path / word
        if target is None or (os.path.lexists(link) and not os.path.islink(link)):
            return
        try:
            if os.path.lexists(link) and os.path.realpath(link) == os.path.realpath(target):
                return
            disk.point(link, target)
        except OSError as exc:
            warn(f"the link {link} could not be made ({exc.strerror}); nothing depends on it")


def _glance(run: Run, number: int) -> tuple[object, ...]:
    try:
        about = run.open(number).about
    except (CheckpointDamaged, CheckpointNotFound, FormatTooNew):
        return number, *[""] * 4, "damaged"
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in about.metrics.items())
    return number, about.epoch, about.batch, about.step, metrics, when(about.saved)


def _written_id(path: Path) -> str:
    return str(manifest.unseal(_id_text(path))["run_id"])


def _id_text(path: Path) -> bytes:
    # The run may be a link to a folder elsewhere.
    return disk.read_small(Path(os.path.realpath(path)), "run.json")


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except ResumableError:
        raise
    except OSError as exc:
        raise SaveFailed(
            f"{path} cannot be written: {exc}.",
            fix="mend the cause (room on the disk, permissions), or give another run directory.",
        ) from exc


def _remove_debris(left: list[Path]) -> None:
    for path in sorted(left):
        try:
            if path.is_dir() and not path.is_symlink():
                checkpoint.remove(path)
            else:
                os.unlink(path)
        except OSError as exc:
            warn(f"what a killed save left in {path} could not be removed: {exc}")


def is_empty(folder: Path) -> bool:
    """Return whether a folder does not exist, or has nothing in it."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return next(entries, None) is None
    return True
