"""Make names and small files durable: stage a folder, flush, rename."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from io import FileIO
from pathlib import Path

from ..errors import CannotRead, CheckpointDamaged, ResumableError, SaveFailed, warn

_BINARY = getattr(os, "O_BINARY", 0)
# NOFOLLOW: a link must not lead outside the folder. NONBLOCK: a pipe must not hang the training.
_SAFELY = _BINARY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


@contextlib.contextmanager
def created(path: Path, flags: int = os.O_CREAT | os.O_EXCL) -> Iterator[int]:
    """Create a file; the context writes to the descriptor, and the file is flushed at its end."""
    # EXCL: what is committed is never written again. 0o666 under the umask: colleagues can read it.
    fd = os.open(path, os.O_RDWR | flags | _BINARY, 0o666)
    try:
        yield fd
        # A failure here is final: a second fsync would report success for bytes that are lost.
        os.fsync(fd)
    except OSError as exc:
        exc.filename = str(path)
        raise
    finally:
        os.close(fd)


def joined(path: Path) -> AbstractContextManager[int]:
    """Open a file that several processes write, and flush it when this one has written its share."""
    return created(path, flags=0)


def write(path: Path, data: bytes) -> None:
    """Create a small file, write the bytes, and flush."""
    with created(path) as fd:
        rest = memoryview(data)
        while rest.nbytes:
            rest = rest[os.write(fd, rest) :]


def read_small(folder: Path, name: str, limit: int = 64 << 20) -> bytes:
    """Return the bytes of a file whose size is not in a manifest."""
    with opened(folder, name) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise damaged(folder, f"{name} has {size:,} bytes; at most {limit:,} make sense")
        buffer = memoryview(bytearray(size))
        _fill(file, buffer)
    return bytes(buffer)


def open_regular(path: Path, flags: int) -> int:
    """Open a regular file; OSError for a link, a pipe or a folder of that name."""
    fd = os.open(path, flags | _SAFELY, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    except OSError:
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def opened(folder: Path, name: str, size: int | None = None) -> Iterator[FileIO]:
    """Open a regular file in a folder of ours; damage and an unreadable disk raise different errors.

    `size`: what it must have, if its manifest says so.
    """
    flags = os.O_RDONLY | _SAFELY
    path = folder / name
    try:
        if path.parent != folder and path.parent.is_symlink():
            raise damaged(folder, f"{path.parent.name} is a symbolic link")
        with FileIO(path, opener=partial(_open_in, folder, name, flags)) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise damaged(folder, f"{name} is not a regular file")
            if size is not None and found.st_size != size:
                raise damaged(folder, f"{name} has {found.st_size:,} bytes, its manifest says {size:,}")
            yield file
    except ResumableError:
        raise
    except OSError as exc:
        raise unread(folder, name, exc) from exc


def look(folder: Path, name: str) -> os.stat_result:
    """Return the stat of a regular file in a folder of ours, without opening it."""
    try:
        found = os.lstat(f"{folder}/{name}")
    except OSError as exc:
        raise unread(folder, name, exc) from exc
    if not stat.S_ISREG(found.st_mode):
        raise damaged(folder, f"{name} is not a regular file")
    return found


def unread(folder: Path, name: str, exc: OSError) -> CannotRead | CheckpointDamaged:
    """Return the error for a file that cannot be read."""
    if exc.errno in _NOT_ITS_FAULT:
        return CannotRead(
            f"{folder / name} cannot be read: {exc.strerror}.",
            fix="mend the cause and start again; nothing says that the file is damaged.",
        )
    reason = "is missing" if exc.errno == errno.ENOENT else f"cannot be read: {exc.strerror}"
    return damaged(folder, f"{name} {reason}")


def _open_in(folder: Path, name: str, flags: int, *_: object) -> int:
    if os.open not in os.supports_dir_fd:  # Windows
        return os.open(folder / name, flags)
    # Folder by folder: one may have been replaced by a link since it was checked.
    *folders, name = Path(name).parts
    fd = os.open(folder, _FOLDER)
    try:
        for inner in folders:
            outer, fd = fd, os.open(inner, _FOLDER, dir_fd=fd)
            with contextlib.suppress(OSError):
                os.close(outer)
        return os.open(name, flags, dir_fd=fd)
    finally:
        # Nothing was written through it, so nothing can be lost.
        with contextlib.suppress(OSError):
            os.close(fd)


_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)

# Permissions, open files, memory: an older checkpoint would be used for no good reason.
_NOT_ITS_FAULT = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def _fill(file: FileIO, buffer: memoryview) -> None:
    while buffer.nbytes:
        count = file.readinto(buffer)
        if not count:
            raise OSError(errno.EIO, f"the file ended {buffer.nbytes:,} bytes early")
        buffer = buffer[count:]


def damaged(folder: Path, problem: str) -> CheckpointDamaged:
    """Return the error for a damaged checkpoint in `folder`."""
    is_in_a_run = folder.parent.name == "checkpoints"
    run = folder.parent.parent
    removal = f"To remove this one: resumable prune {run} --damaged" if is_in_a_run else "It can be deleted."
    return CheckpointDamaged(
        f"{folder} is damaged: {problem}.",
        fix=f"resume='auto' continues from the newest intact checkpoint. {removal}",
        command=f"name another one. {removal}",
    )


def is_proof(exc: CheckpointDamaged) -> bool:
    """Return whether a checkpoint is damaged for good, rather than unreadable at this moment."""
    cause = exc.__cause__
    return not isinstance(cause, OSError) or cause.errno in _NO_FILE


_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO)


def flush_folder(path: Path) -> bool:
    """Make the names in a folder durable: a power cut otherwise loses a rename or a new file.

    False if the file system cannot do that: some of FUSE, and folders shared with a virtual machine.
    """
    if sys.platform == "win32":  # NTFS journals names; folders cannot be opened
        return True
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as exc:
        if exc.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        exc.filename = str(path)
        raise
    finally:
        os.close(fd)
    return True


def make_folder(path: Path) -> None:
    """Create a folder and its parents, durably; existing ones are left as they are."""
    if path.is_dir():
        return
    make_folder(path.parent)
    try:
        # Another process may have made it first, with the same result.
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
        flush_folder(path.parent)
    except BaseException:
        # Who finds it there takes it for durable. It stays only if another process has put something in it.
        with contextlib.suppress(OSError):
            os.rmdir(path)
        raise


def flush_names(path: Path) -> None:
    """Make the names in an existing folder durable, and those of its parents."""
    # Whoever made it (the script, a start that was killed) may not have flushed them: a power cut would
    # take everything that is flushed below along.
    if not flush_folder(path):
        warn(f"the file system of {path} cannot flush folders: a power cut may take new checkpoints along.")
    device = os.stat(path).st_dev
    # The parents of the target, if it is a link.
    for folder in Path(os.path.realpath(path)).parents:
        if os.stat(folder).st_dev != device:
            break
        # A folder that we may not open was not made by us.
        with contextlib.suppress(PermissionError):
            flush_folder(folder)


def cache() -> Path:
    """Return the user's folder for what can be made again: $RESUMABLE_CACHE, or ~/.cache/resumable."""
    home = os.environ.get("RESUMABLE_CACHE")
    return Path(home or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/resumable").expanduser()


def replace(path: Path, data: bytes) -> None:
    """Write a small file atomically: readers see the old content or the new one."""
    fresh = path.with_name(f".{path.name}-{os.urandom(4).hex()}")
    try:
        write(fresh, data)
        os.replace(fresh, path)
    except BaseException:
        # A full disk has no room for half a file.
        with contextlib.suppress(OSError):
            os.unlink(fresh)
        raise
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
    """Make `link` a symbolic link to `target`, atomically; an existing link is replaced."""
    fresh = link.with_name(f".{link.name}-{os.urandom(4).hex()}")
    os.symlink(os.path.relpath(target, link.parent), fresh, target_is_directory=True)
    try:
        os.replace(fresh, link)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(fresh)
        raise


def remove(folder: Path, names: Iterable[str]) -> None:
    """Remove a folder that holds `names` (those of folders end in "/"); OSError if it holds anything else."""
    # In reverse order: the files of a subfolder come before the subfolder.
    for name in sorted(names, reverse=True):
        if name.endswith("/"):
            os.rmdir(folder / name)
        else:
            os.unlink(folder / name)
    os.rmdir(folder)
