"""Make bytes durable: stage a folder, flush, rename, hash, lock."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import stat
import sys
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any, ClassVar

import xxhash

from .errors import CannotRead, CheckpointDamaged, RunInUse, SaveFailed

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_BINARY = getattr(os, "O_BINARY", 0)
_WRITE_AT_MOST = 64 << 20


def digest(data: Any) -> str:
    """Return the xxh3-128 of a buffer."""
    return xxhash.xxh3_128(data).hexdigest()


def write(path: Path, pieces: Iterable[Any]) -> tuple[int, str]:
    """Create the file, write the buffers, flush, and return its size and digest."""
    hasher = xxhash.xxh3_128()
    size = 0
    # EXCL: what is committed is never written again. 0o666 under the umask: colleagues can read it.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o666)
    try:
        for piece in pieces:
            rest = memoryview(piece)
            hasher.update(rest)
            size += rest.nbytes
            while rest.nbytes:
                rest = rest[os.write(fd, rest[:_WRITE_AT_MOST]) :]
        # A failure here is final: a second fsync would report success for bytes that are lost.
        os.fsync(fd)
    except OSError as exc:
        exc.filename = str(path)
        raise
    finally:
        os.close(fd)
    return size, hasher.hexdigest()


def read(folder: Path, name: str, size: int, expected: str) -> memoryview:
    """Return the bytes of a file, verified in the private memory that the caller goes on to use."""
    with _opened(folder, name) as file:
        found = os.fstat(file.fileno()).st_size
        if found != size:
            raise damaged(folder, f"{name} has {found:,} bytes, its manifest says {size:,}")
        buffer = memoryview(bytearray(size))
        _fill(file, buffer)
    if (actual := digest(buffer)) != expected:
        raise damaged(folder, f"{name} has the digest {actual}, its manifest says {expected}")
    return buffer


def read_small(folder: Path, name: str, limit: int = 64 << 20) -> bytes:
    """Return the bytes of a file for whose size nobody vouches."""
    with _opened(folder, name) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise damaged(folder, f"{name} has {size:,} bytes; at most {limit:,} make sense")
        buffer = memoryview(bytearray(size))
        _fill(file, buffer)
    return bytes(buffer)


@contextlib.contextmanager
def _opened(folder: Path, name: str) -> Iterator[FileIO]:
    # NOFOLLOW: a link must not lead outside the folder. NONBLOCK: a pipe must not hang the load.
    flags = os.O_RDONLY | _BINARY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    path = folder / name
    if path.parent != folder and path.parent.is_symlink():
        raise damaged(folder, f"{path.parent.name} is a symbolic link")
    try:
        with FileIO(path, opener=lambda path, _: os.open(path, flags)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise damaged(folder, f"{name} is not a regular file")
            yield file
    except OSError as exc:
        if exc.errno in _NOT_ITS_FAULT:
            raise CannotRead(
                f"{path} cannot be read: {exc.strerror}.",
                fix="mend the cause and start again; nothing says that the file is damaged.",
            ) from exc
        reason = "is missing" if exc.errno == errno.ENOENT else f"cannot be read: {exc.strerror}"
        raise damaged(folder, f"{name} {reason}") from exc


# Permissions, open files, memory: an older checkpoint would be used for no good reason.
_NOT_ITS_FAULT = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def _fill(file: FileIO, buffer: memoryview) -> None:
    while buffer.nbytes:
        count = file.readinto(buffer)
        if not count:
            raise OSError(errno.EIO, f"the file ended {buffer.nbytes:,} bytes early")
        buffer = buffer[count:]


def damaged(folder: Path, problem: str) -> CheckpointDamaged:
    """Return the error that says what is wrong with the checkpoint in `folder`."""
    return CheckpointDamaged(
        f"{folder} is damaged: {problem}.",
        fix="resume='auto' goes on from the newest intact checkpoint. This one can be deleted.",
    )


def flush_folder(path: Path) -> None:
    """Make the names in a folder durable: a power cut otherwise loses a rename or a new file."""
    if sys.platform == "win32":  # (NTFS journals names; folders cannot be opened)
        return
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(path: Path) -> None:
    """Create a folder and the ones above it, durably; one that exists is left as it is."""
    if path.is_dir():
        return
    make_folder(path.parent)
    # Another process may have been quicker: that is the same outcome.
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    flush_folder(path.parent)


def replace(path: Path, data: bytes) -> None:
    """Put a small file in place as a whole: readers see the old content or the new one."""
    fresh = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    write(fresh, [data])
    os.replace(fresh, path)
    flush_folder(path.parent)


def publish(stage: Path, target: Path) -> None:
    """Give a flushed stage its final name, durably. This is the commit."""
    # rename() would silently replace an empty folder of that name.
    if os.path.lexists(target):
        raise SaveFailed(
            f"{target} already exists, so the checkpoint cannot be given that name.",
            fix=f"look at what made {target} and move it away; nothing in it was touched.",
        )
    os.rename(stage, target)
    flush_folder(target.parent)


def point(link: Path, target: Path) -> None:
    """Let the symbolic link `link` lead to `target`, replacing it as a whole if it is ours."""
    fresh = link.with_name(f".{link.name}-{secrets.token_hex(4)}")
    os.symlink(os.path.relpath(target, link.parent), fresh, target_is_directory=True)
    os.replace(fresh, link)


def remove(folder: Path, names: Iterable[str]) -> None:
    """Remove a folder that holds `names` (those of folders end in "/"); OSError if it holds anything else."""
    # Backwards: what a subfolder holds comes before the subfolder.
    for name in sorted(names, reverse=True):
        if name.endswith("/"):
            os.rmdir(folder / name)
        else:
            os.unlink(folder / name)
    os.rmdir(folder)


class Lock:
    """The right to write one folder, held by one process until it lets go or dies.

    A POSIX record lock: the kernel frees it with its process, and what was forked from
    the holder (loader workers) does not keep it alive when the holder is killed.
    """

    # Closing *any* descriptor of the file frees a record lock of the whole process, so it is opened once.
    # With the process: what is forked from the holder inherits this set, but no lock.
    _held: ClassVar[set[tuple[int, Path]]] = set()

    def __init__(self, path: Path) -> None:
        self._key = (os.getpid(), path.resolve())
        if self._key in self._held:
            raise in_use(path, f"this process ({os.getpid()})")
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | _BINARY, 0o666)
        try:
            _take(self._fd)
        except OSError as exc:
            holder = os.read(self._fd, 4096).decode(errors="replace").strip() or "another process"
            os.close(self._fd)
            if exc.errno not in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
                raise
            raise in_use(path, holder) from exc
        self._held.add(self._key)
        # Only for the message that others get: a full disk must not cost us the lock.
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.write(self._fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode())

    def is_held(self) -> bool:
        """Whether this process holds it; a forked child has a copy of this object, but not the lock."""
        return self._key in self._held and self._key[0] == os.getpid()

    def renew(self) -> None:
        """Take it again where this process has lost it: by opening and closing the file, as a copy does."""
        if sys.platform == "win32":  # (where a lock belongs to its descriptor)
            return
        try:
            _take(self._fd)
        except OSError as exc:
            self.release()
            raise in_use(self._key[1], "another process, since this one has lost its lock") from exc

    def release(self) -> None:
        """Let go; the file stays, since removing it would race with the next holder."""
        if self.is_held():
            # Even a close that fails (on a network disk) has closed it.
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._held.discard(self._key)


def in_use(path: Path, holder: str) -> RunInUse:
    """Return the error that says who else is writing the run of the lock file `path`."""
    return RunInUse(
        f"{path.parent} is being written by {holder}.",
        fix="wait for it or stop it, or give this training a run directory of its own. "
        "A lock never outlives its process: there is no file to delete.",
    )


def _take(fd: int) -> None:
    if sys.platform == "win32":
        # Windows locks are mandatory: lock a byte far behind the text that others read.
        os.lseek(fd, 1 << 20, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        os.lseek(fd, 0, os.SEEK_SET)
    else:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
