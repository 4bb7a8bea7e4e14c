"""Pushes a checkpoint to a remote: it is complete there, or it is not there."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from ..errors import CannotRead, RemoteError
from ..files import disk
from ..files.threads import in_daemons
from ..run import history, manifest
from ..run.checkpoint import Checkpoint
from ..run.directory import Run
from ..run.policy import bytes_of, duration
from .deadline import Moved
from .run_copy import FOLDER, MARK, Remote
from .storage import PART

LOCK = ".push.lock"
"""Held by the one process that pushes a run."""


class Sent(NamedTuple):
    """What a push has moved, in bytes: sent from here, and copied from another checkpoint there."""

    sent: int
    copied: int


def push(remote: Remote, found: Checkpoint, moved: Moved) -> Sent:
    """Copy a checkpoint to a remote, complete on return; files that have arrived are not sent again."""
    return _Push(remote, found).push(moved)


def missing(remote: Remote, found: Checkpoint) -> int | None:
    """Return how many bytes of a checkpoint a push would have to send; None if it is complete there."""
    return _Push(remote, found).missing()


def noted(remote: Remote, run: Run) -> set[int]:
    """Return the checkpoints that are complete in a remote according to the run's history."""
    # A history that cannot be read is reported by its writer.
    with contextlib.suppress(CannotRead):
        return history.pushed(history.read(run.path)).get(str(remote), set())
    return set()


def summary(what: str, size: int, seconds: float) -> str:
    """Return the line that reports a transfer.

    >>> summary("pushed checkpoint 41 to s3://bucket/exp", 1_400_000_000, 12.1)
    'pushed checkpoint 41 to s3://bucket/exp: 1.4 GB in 12 s (116 MB/s)'
    """
    return f"{what}: {bytes_of(size)} in {duration(seconds)} ({bytes_of(size / max(seconds, 1e-3))}/s)"


class _Push:
    def __init__(self, remote: Remote, found: Checkpoint) -> None:
        self._remote = remote
        self._store = remote.store
        self._found = found
        self._files = found.about.files
        self._folder = f"{FOLDER}/{found.path.name}"
        self._text = disk.read_small(found.path, manifest.NAME)
        self._there = self._store.sizes(self._folder)
        self._copied: list[int] = []

    def missing(self) -> int | None:
        if self._is_complete():
            return None
        kept = self._there if self._holds(MARK) else {}
        return sum(record.size for file, record in self._files.items() if kept.get(file) != record.size)

    def push(self, moved: Moved) -> Sent:
        if self._is_complete():
            moved(self._found.about.size)
            return Sent(0, 0)
        # A checkpoint that is damaged here must not be the only one left when this machine is gone.
        self._found.verify()
        self._begin()
        due = [file for file, record in self._files.items() if self._there.get(file) != record.size]
        size = sum(self._files[file].size for file in due)
        moved(self._found.about.size - size)
        self._put(due, moved)
        self._check_sizes()
        self._remote.commit(self._found.path.name, self._text)
        copied = sum(self._copied)
        return Sent(size - copied, copied)

    def _is_complete(self) -> bool:
        sizes = {file: record.size for file, record in self._files.items()}
        return sizes.items() <= self._there.items() and self._holds(manifest.NAME)

    def _holds(self, file: str) -> bool:
        """Return whether a file there is the manifest of this checkpoint."""
        size = len(self._text)
        return (
            self._there.get(file) == size and self._store.read(f"{self._folder}/{file}", size) == self._text
        )

    def _begin(self) -> None:
        name = self._found.path.name
        if manifest.NAME in self._there:
            self._remote.uncommit(name)
        if not self._holds(MARK):
            # Files of the same size, but of another branch of the training, or of unknown origin.
            self._remote.remove_files(name, self._there)
            self._store.write(f"{self._folder}/{MARK}", self._text)
            self._there = {}

    def _put(self, files: list[str], moved: Moved) -> None:
        def put(file: str) -> None:
            self._copy_or_send(file, moved)

        small = [file for file in files if self._files[file].size < 2 * PART]
        in_daemons(put, small, min(_SMALL_AT_ONCE, self._store.at_once))
        # A large file is sent in parts, several at once: two such files would only need more memory.
        for file in files:
            if file not in small:
                put(file)

    def _copy_or_send(self, file: str, moved: Moved) -> None:
        record, name = self._files[file], f"{self._folder}/{file}"
        source, tag = self._remote.sources.get(record), None
        if source and (tag := self._store.copy(*source, name, record.size)):
            self._copied.append(record.size)
            moved(record.size)
        else:
            tag = self._store.send(self._found.path / file, name, moved)
        if tag and record.size >= _WORTH_A_COPY:
            self._remote.sources[record] = name, tag

    def _check_sizes(self) -> None:
        there = self._store.sizes(self._folder)
        for file, record in self._files.items():
            if there.get(file) != record.size:
                raise RemoteError(
                    f"{self._remote}/{self._folder}/{file} has {there.get(file, 'no')} bytes after it was "
                    f"sent; it should have {record.size:,}.",
                    fix="look whether something else writes or deletes there; the next push sends it again.",
                )


_SMALL_AT_ONCE = 2
_WORTH_A_COPY = 1 << 20
