"""Stamps of checkpoints, read by two processes at once: tens of thousands of files take one too long."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ..run import manifest


def of(path: str, files: Sequence[str], until: int | None = None) -> int:
    """Return a number that changes with the manifest and the files of a checkpoint; never 0.

    It is MISSING if one does not exist, or if one has changed after `until`: that can change again without
    another time.
    """
    try:
        look, top = os.lstat, f"{path}/"
        b = look(top + manifest.NAME)
        found = [look(top + file) for file in files]
    except OSError:
        return MISSING
    if until is not None and any(one.st_ctime_ns >= until for one in (b, *found)):
        return MISSING
    its = b.st_ino, b.st_mtime_ns, b.st_ctime_ns, b.st_size
    # Without the ctime: it changes when another checkpoint that has the same file goes.
    return hash((*its, *[(f.st_ino, f.st_mtime_ns, f.st_size) for f in found])) or MISSING


class Look:
    """The stamps of many checkpoints, of which a second process reads some from the beginning on.

    >>> Look(Path("runs/none/checkpoints"), {"000001-step-00000001": ("state.json",)}).result()
    {}
    """

    def __init__(self, folder: Path, checkpoints: Mapping[str, Sequence[str]]) -> None:
        self._top = f"{folder}{os.sep}"
        self._names = [*checkpoints]
        self._files = [*checkpoints.values()]
        # Shared, and all zero at first.
        self._found = memoryview(mmap.mmap(-1, 8 * (len(checkpoints) or 1))).cast("q")
        self._child = self._forked() if len(checkpoints) > _FEW and _is_single() else None

    def result(self) -> dict[str, int]:
        """Return the stamps of those that exist."""
        try:
            # Until they meet: all, if the other is killed.
            self._read(range(len(self._names) - 1, -1, -1))
        finally:
            # The system forgets a child at once if this process ignores SIGCHLD.
            with contextlib.suppress(ChildProcessError):
                if self._child is not None:
                    os.waitpid(self._child, 0)
        return {name: one for name, one in zip(self._names, self._found, strict=False) if one != MISSING}

    def _read(self, places: Iterable[int]) -> None:
        """Read stamps until one is found that the other process has read."""
        for at in places:
            if self._found[at]:
                return
            self._found[at] = of(self._top + self._names[at], self._files[at])

    def _forked(self) -> int | None:
        try:
            child = os.fork()
        except OSError:
            return None
        if not child:
            try:
                # Shorter paths: the folders above need not be looked up for each file.
                os.chdir(self._top)
                self._top = ""
                self._read(range(len(self._names)))
            finally:
                # At once: what the parent has not flushed must not be written twice.
                os._exit(0)
        return child


def _is_single() -> bool:
    """Return whether this process can fork: another thread may hold a lock that the child would wait for."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


MISSING = -1
"""The stamp of what does not exist; no hash is -1."""
_FEW = 1000
