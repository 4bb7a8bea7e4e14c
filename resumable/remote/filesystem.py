"""What fsspec's filesystems have in common, and where they differ."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .deadline import Meter

PIECE = 4 << 20
"""What is read at once: a connection that breaks costs no more than this."""


def without_tries(place: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Keep botocore from trying again by itself: s3fs does, and we do."""
    if not place.startswith(("s3://", "s3a://")):
        return options
    # It waits by Python's own generator: the training would be given other numbers after each failure.
    config = {"retries": {"total_max_attempts": 1}, **(options.get("config_kwargs") or {})}
    return {**options, "config_kwargs": config}


def is_async(fs: Any) -> bool:
    """Whether its calls are tasks of a loop."""
    return bool(getattr(fs, "async_impl", False)) and not fs.asynchronous


def in_parts(fs: Any, part: int, at_once: int) -> dict[str, int]:
    """Return how to ask for a file to be sent in parts, several at once, where that can be asked for."""
    takes = inspect.signature(fs._put_file).parameters
    asked = {"chunksize": part, "max_concurrency": at_once}
    return {name: value for name, value in asked.items() if name in takes}


def is_objects(fs: Any) -> bool:
    """Whether it is a store of objects: without folders, listed as a whole, each written at one stroke."""
    if not getattr(fs, "async_impl", False):
        return False
    from fsspec.asyn import AsyncFileSystem

    return type(fs)._find is not AsyncFileSystem._find


def renames(fs: Any) -> bool:
    """Whether a file is seen half written, and a rename puts another in its place at one stroke."""
    return protocol(fs) in ("file", "local", "sftp", "ssh")


def protocol(fs: Any) -> str:
    """Return what its addresses begin with."""
    return fs.protocol if isinstance(fs.protocol, str) else str(fs.protocol[0])


def has_bodies(fs: Any) -> bool:
    """Whether `fill` can read from it."""
    return hasattr(fs, "_call_s3") and hasattr(fs, "split_path")


async def fill(fs: Any, path: str, begin: int, room: memoryview, meter: Meter) -> int:
    """Fill memory with what an object has from a place on; return how much came.

    s3fs's own cat_file holds it several times over.
    """
    bucket, key, _ = fs.split_path(path)
    wanted = f"bytes={begin}-{begin + room.nbytes - 1}"
    body = (await fs._call_s3("get_object", Bucket=bucket, Key=key, Range=wanted))["Body"]
    at = 0
    try:
        while piece := await body.read(_CHUNK):
            meter.add(len(piece))
            room[at : at + len(piece)] = piece
            at += len(piece)
    finally:
        body.close()
    return at


def stream_out(path: Path, fs: Any, name: str, meter: Meter) -> None:
    """Copy a local file there, piece by piece."""
    with open(path, "rb") as here, fs.open(name, "wb") as there:
        if hasattr(there, "set_pipelined"):
            # (paramiko) Else each 32 KiB would wait for an answer.
            there.set_pipelined(True)
        _stream(here, there, meter)


def stream_in(fs: Any, name: str, path: Path, meter: Meter) -> None:
    """Copy a file from there, piece by piece."""
    with fs.open(name, "rb") as there, open(path, "wb") as here:
        if hasattr(there, "prefetch"):
            there.prefetch()
        _stream(there, here, meter)


def _stream(source: Any, target: Any, meter: Meter) -> None:
    while piece := source.read(PIECE):
        meter.add(len(piece))
        target.write(piece)


_CHUNK = 1 << 18
