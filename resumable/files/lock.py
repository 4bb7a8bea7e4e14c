"""The exclusive right to write a run, held by a process until it releases it or ends."""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import sys
from pathlib import Path
from typing import ClassVar

from ..errors import RunInUse
from . import disk

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl


class Lock:
    """The exclusive right to write a folder, held by a process until it releases it or ends.

    A POSIX record lock: the kernel frees it when its process ends, and processes forked from the holder
    (loader workers) do not keep it alive when the holder is killed.
    """

    # Closing *any* descriptor of the file frees a record lock of the whole process, so it is opened once.
    # Keyed by process: a child forked from the holder inherits this set, but not the lock.
    _held: ClassVar[set[tuple[int, Path]]] = set()

    def __init__(self, path: Path) -> None:
        self._key = (os.getpid(), path.parent.resolve() / path.name)
        if self._key in self._held:
            raise in_use(path, f"this process ({os.getpid()})")
        self._fd = disk.open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            _take(self._fd)
        except OSError as exc:
            holder = os.read(self._fd, 4096).decode(errors="replace").strip() or "another process"
            os.close(self._fd)
            if exc.errno not in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
                raise
            raise in_use(path, holder) from exc
        self._held.add(self._key)
        self._path = path
        # Only for the message to other processes: a full disk must not cost us the lock.
        with contextlib.suppress(OSError):
            _sign(self._fd, f"process {os.getpid()} on {_host()}\n".encode())

    def is_held(self) -> bool:
        """Return whether this process holds it: a forked child has this object, but not the lock."""
        return self._key in self._held and self._key[0] == os.getpid()

    def is_in_place(self) -> bool:
        """Return whether other processes would find this lock: not if its folder was moved."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            # A disk that does not answer is no evidence.
            return True

    def renew(self) -> None:
        """Take it again in case this process has lost it by closing the file, as copying the run does."""
        if sys.platform == "win32":  # There a lock belongs to its descriptor
            return
        try:
            _take(self._fd)
        except OSError as exc:
            self.release()
            raise in_use(self._key[1], "another process, since this one has lost its lock") from exc

    def release(self) -> None:
        """Release it; the file stays, since removing it would race with the next holder."""
        if self.is_held():
            # Even a close that fails (on a network disk) has closed it.
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._held.discard(self._key)


def holder(path: Path) -> str | None:
    """Return who holds a lock, such as `process 7 on node3`; None if no process does, or this is unknown.

    Nothing is locked to find out: a training that starts meanwhile is not disturbed.

    >>> holder(Path("runs/none/.lock")) is None
    True
    """
    if (os.getpid(), path.parent.resolve() / path.name) in Lock._held:
        # Not opened: closing it would free the lock.
        return f"process {os.getpid()} on {_host()}"
    try:
        fd = disk.open_regular(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        if _is_locked(fd):
            return os.read(fd, 4096).decode(errors="replace").strip() or "another process"
        return None
    finally:
        os.close(fd)


def in_use(path: Path, holder: str) -> RunInUse:
    """Return the error that names the process that writes the run of the lock file `path`."""
    never = "A lock never outlives its process: there is no file to delete."
    return RunInUse(
        f"{path.parent} is being written by {holder}.",
        fix=f"wait for it or stop it, or give this training a run directory of its own. {never}",
        command=f"wait for it or stop it. {never}",
    )


def _host() -> str:
    # Imported late: commands that only read answer sooner.
    import socket

    return socket.gethostname()


def _sign(fd: int, text: bytes) -> None:
    # Other content may be a user's file of the same name.
    if os.read(fd, 8) in (b"", b"process "):
        os.lseek(fd, 0, os.SEEK_SET)
        written = 0
        try:
            written = os.write(fd, text)
        finally:
            # What an earlier process wrote may be longer. To truncate first takes the file system longer.
            os.ftruncate(fd, written)


# struct flock, and where in it the kind of the lock stands.
_FLOCK = {"linux": ("hhqqi0q", 0), "darwin": ("qqihh", 3)}


def _is_locked(fd: int) -> bool:
    if sys.platform not in _FLOCK:
        return False
    layout, at = _FLOCK[sys.platform]
    asked = [0] * 5
    asked[at] = fcntl.F_WRLCK
    # A file system without locks cannot say.
    with contextlib.suppress(OSError):
        found = fcntl.fcntl(fd, fcntl.F_GETLK, struct.pack(layout, *asked))
        return bool(struct.unpack(layout, found)[at] != fcntl.F_UNLCK)
    return False


def _take(fd: int) -> None:
    if sys.platform == "win32":
        # Windows locks are mandatory: lock a byte far behind the text that others read.
        os.lseek(fd, 1 << 20, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        os.lseek(fd, 0, os.SEEK_SET)
    else:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
