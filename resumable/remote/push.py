"""Pushes a checkpoint to a remote: it is complete there, or it is not there.

Of one that lies on several disks, each pushes what it has: the first all but the shards of the others, which
push theirs once they see that it has begun. It commits when all has arrived.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import NamedTuple

from ..errors import CannotRead, RemoteError
from ..files import disk
from ..files.threads import in_daemons
from ..run import history, manifest
from ..run.checkpoint import Checkpoint
from ..run.directory import Run
from ..run.manifest import FileRecord, Manifest
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


class OthersDue(RemoteError):
    """A checkpoint lies on several disks, and the others have not pushed what they have of it."""

    lacking = 0
    """How many files are missing."""
    sent = Sent(0, 0)
    """What was moved all the same."""


def push(remote: Remote, found: Checkpoint, moved: Moved, *, commits: bool | None = None) -> Sent:
    """Copy a checkpoint to a remote, complete on return; files that have arrived are not sent again.

    Of one that lies on several disks only the first `commits`, and raises OthersDue if it cannot yet.
    """
    return _push_of(remote, found, commits).push(moved)


def missing(remote: Remote, found: Checkpoint) -> int | None:
    """Return how many bytes of a checkpoint a push would have to send; None if it is complete there."""
    return _push_of(remote, found, None).missing()


def is_there(remote: Remote, found: Checkpoint, name: str, *, commits: bool) -> bool:
    """Return whether a complete checkpoint there has what a push would send."""
    if found.path.name != name:
        return False
    there = remote.about(name)[0]
    return there == found.about.whole() if commits else _holds_shards(there, found.about)


def _push_of(remote: Remote, found: Checkpoint, commits: bool | None) -> _Push:
    commits = found.about.is_first_part if commits is None else commits
    return (_Push if commits else _PushShards)(remote, found)


def _shards(about: Manifest) -> dict[str, FileRecord]:
    return {file: record for file, record in about.files.items() if record.blocks}


def _holds_shards(there: Manifest, here: Manifest) -> bool:
    return there.run_id == here.run_id and _shards(here).items() <= there.files.items()


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
        self._files: Mapping[str, FileRecord] = found.about.files
        self._folder = f"{FOLDER}/{found.path.name}"
        self._there = self._store.sizes(self._folder)
        self._copied: list[int] = []
        whole, text = found.about.whole(), disk.read_small(found.path, manifest.NAME)
        self._text = text if manifest.from_json(text) == whole else manifest.to_json(whole)

    def missing(self) -> int | None:
        if self._is_complete():
            return None
        kept = self._there if self._holds(MARK) else {}
        return sum(record.size for file, record in self._files.items() if kept.get(file) != record.size)

    def push(self, moved: Moved) -> Sent:
        if self._is_complete():
            moved(self._found.about.size)
            return Sent(0, 0)
        if self._is_due():
            # A checkpoint that is damaged here must not be the only one left when this machine is gone.
            self._found.verify()
            self._begin()
        due = [file for file, record in self._files.items() if self._there.get(file) != record.size]
        size = sum(self._files[file].size for file in due)
        moved(self._found.about.size - size)
        self._put(due, moved)
        copied = sum(self._copied)
        sent = Sent(size - copied, copied)
        try:
            self._finish(self._store.sizes(self._folder))
        except OthersDue as exc:
            exc.sent = sent
            raise
        return sent

    def _is_due(self) -> bool:
        """Return whether there is anything to send; while others are waited for there is not."""
        is_sent = all(self._there.get(file) == record.size for file, record in self._files.items())
        return not is_sent or not self._holds(MARK)

    def _is_complete(self) -> bool:
        sizes = {file: record.size for file, record in self._found.about.whole().files.items()}
        return sizes.items() <= self._there.items() and self._holds(manifest.NAME)

    def _finish(self, there: Mapping[str, int]) -> None:
        self._check_sizes(there)
        others = self._found.about.elsewhere
        if lacking := [file for file, record in others.items() if there.get(file) != record.size]:
            error = OthersDue(
                f"checkpoint {self._found.about.number} is not complete in {self._remote}: {len(lacking)} of "
                "its files come from other nodes.",
                fix="they are pushed by these nodes: while they train, or with `resumable push` there.",
            )
            error.lacking = len(lacking)
            raise error
        self._remote.commit(self._found.path.name, self._text)

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

    def _check_sizes(self, there: Mapping[str, int]) -> None:
        for file, record in self._files.items():
            if there.get(file) != record.size:
                raise RemoteError(
                    f"{self._remote}/{self._folder}/{file} has {there.get(file, 'no')} bytes after it was "
                    f"sent; it should have {record.size:,}.",
                    fix="look whether something else writes or deletes there; the next push sends it again.",
                )


class _PushShards(_Push):
    """Of a checkpoint on several disks, the shards on one that is not the first: that one commits."""

    def __init__(self, remote: Remote, found: Checkpoint) -> None:
        super().__init__(remote, found)
        self._files = _shards(found.about)

    def _is_complete(self) -> bool:
        sizes = {file: record.size for file, record in self._files.items()}
        return sizes.items() <= self._there.items() and self._holds(manifest.NAME)

    def _holds(self, file: str) -> bool:
        size = self._there.get(file)
        text = None if size is None else self._store.read(f"{self._folder}/{file}", size)
        with contextlib.suppress(ValueError):
            return text is not None and _holds_shards(manifest.from_json(text), self._found.about)
        return False

    def _is_due(self) -> bool:
        if not self._holds(MARK):
            raise OthersDue(
                f"the first node that has checkpoint {self._found.about.number} has not begun to push it to "
                f"{self._remote}.",
                fix="it begins while it trains, or with `resumable push` there.",
            )
        return any(self._there.get(file) != record.size for file, record in self._files.items())

    def _begin(self) -> None:
        pass

    def _finish(self, there: Mapping[str, int]) -> None:
        # Otherwise it was committed by now, and perhaps pruned.
        if MARK in there:
            self._check_sizes(there)


_SMALL_AT_ONCE = 2
_WORTH_A_COPY = 1 << 20
