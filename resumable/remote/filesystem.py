"""Hides the differences between the filesystems of fsspec."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .deadline import Meter

PIECE = 4 << 20
"""The bytes of one read: a broken connection costs no more than this."""


def without_retries(place: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options of a filesystem, changed so that botocore leaves retries to us."""
    if not place.startswith(("s3://", "s3a://")):
        return options
    # It waits by Python's own generator: the training would draw other numbers after each failure.
    config = {"retries": {"total_max_attempts": 1}, **(options.get("config_kwargs") or {})}
    return {**options, "config_kwargs": config}


def is_async(fs: Any) -> bool:
    """Return whether its calls are coroutines, which can be cancelled at any moment."""
    return bool(getattr(fs, "async_impl", False)) and not fs.asynchronous


def is_object_store(fs: Any) -> bool:
    """Return whether it is a flat store of objects: no folders, listed as a whole, written atomically."""
    if not getattr(fs, "async_impl", False):
        return False
    from fsspec.asyn import AsyncFileSystem

    return type(fs)._find is not AsyncFileSystem._find


def renames(fs: Any) -> bool:
    """Return whether a file can be seen half written there, and renaming one is atomic."""
    return protocol(fs) in ("file", "local", "sftp", "ssh")


def protocol(fs: Any) -> str:
    """Return the scheme of its addresses."""
    return fs.protocol if isinstance(fs.protocol, str) else str(fs.protocol[0])


def tag(info: Mapping[str, Any]) -> str | None:
    """Return the ETag of a file, which changes whenever the file is written; None if there is none."""
    found = info.get("ETag") or info.get("etag")
    return str(found) if found else None


def part_options(fs: Any, part: int, at_once: int) -> dict[str, int]:
    """Return the arguments of its put_file that limit the size of parts and how many are sent at once."""
    takes = inspect.signature(fs._put_file).parameters
    asked = {"chunksize": part, "max_concurrency": at_once}
    return {name: value for name, value in asked.items() if name in takes}


def read_range(fs: Any, name: str, begin: int, end: int) -> bytes:
    """Read some bytes of a file of a filesystem that is not an object store."""
    # The Hub's files read ahead by default, and would fetch twice as much as is asked for.
    options = {"cache_type": "none"} if protocol(fs) == "hf" else {}
    with fs.open(name, "rb", **options) as file:
        if hasattr(file, "readv"):
            # paramiko: a plain read waits for every 32 KiB before it asks for the next.
            return b"".join(file.readv([(begin, end - begin)]))
        file.seek(begin)
        found: bytes = file.read(end - begin)
        return found


def write_file(path: Path, fs: Any, name: str, meter: Meter) -> None:
    """Copy a local file there, piece by piece."""
    with open(path, "rb") as here, fs.open(name, "wb") as there:
        if hasattr(there, "set_pipelined"):
            # paramiko: otherwise every 32 KiB waits for an answer.
            there.set_pipelined(True)
        while piece := here.read(PIECE):
            meter.add(len(piece))
            there.write(piece)
