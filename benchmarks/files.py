"""What is on the disk: made durable, read into the cache, counted, removed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

CHUNK = 8 << 20


def files_in(path: Path) -> Iterator[Path]:
    """Return the files of a folder and of those in it, or the file itself."""
    if path.is_dir():
        for folder, _, names in os.walk(path):
            yield from (Path(folder, name) for name in names)
    else:
        yield path


def flush(path: Path) -> None:
    """Make a file, or a folder with all that is in it, durable under its name."""
    folders = {path.parent}
    for file in files_in(path):
        _flush_one(file)
        folders.add(file.parent)
    for folder in folders:
        _flush_one(folder)


def _flush_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def warm(path: Path) -> None:
    """Read everything once, so that it is in the page cache whichever way it was written."""
    for file in files_in(path):
        with file.open("rb", buffering=0) as stream:
            while stream.read(CHUNK):
                pass


def sizes(path: Path) -> dict[tuple[int, int], int]:
    """Return the sizes of what is in a folder by inode: what is linked there twice counts once."""
    found = {}
    for file in files_in(path):
        status = file.lstat()
        found[status.st_dev, status.st_ino] = status.st_size
    return found


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
