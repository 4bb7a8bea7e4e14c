"""A folder on any filesystem that fsspec knows."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import RemoteError
from ..files import disk
from . import filesystem
from .connection import Connection
from .deadline import Meter, Moved

PART = 6 << 20
"""The size of the parts of a large file, of which several are sent at once."""

AT_ONCE = 4
"""The most requests at once."""


class Store(Connection):
    """A folder on a filesystem that fsspec knows, such as `s3://bucket/exp`.

    >>> store = Store("memory://example/store")
    >>> store.write("run.json", b"{}")
    >>> store.sizes(), store.read("run.json", limit=100)
    ({'run.json': 2}, b'{}')
    """

    def __init__(self, place: str, options: Mapping[str, Any] | None = None, patience: float = 60) -> None:
        super().__init__(place, options or {}, patience)
        self._torn: set[str] = set()
        """Files whose last upload has not succeeded."""

    def __str__(self) -> str:
        return self.url

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Return the files in a folder and below it, with their sizes; none if there is no such folder."""

        def job() -> dict[str, int]:
            with contextlib.suppress(FileNotFoundError):
                return self._sizes(folder)
            return {}

        return self.retry(f"{self._shown(folder)} cannot be listed", job)

    def _sizes(self, folder: str) -> dict[str, int]:
        fs, root = self.open()
        top = _join(root, folder)
        fs.invalidate_cache()
        if filesystem.is_object_store(fs):
            infos = [*self.call("find", top, detail=True).values()]
        else:
            # find() takes a folder that cannot be read for an empty one.
            infos = [*self._walk(top, _DEPTH)]
        # Filesystems differ in what a full path begins with.
        start = fs._strip_protocol(top).strip("/") + "/"
        names = {info["name"].strip("/"): info.get("size") for info in infos if info["type"] == "file"}
        return {
            name.removeprefix(start): size
            for name, size in names.items()
            if name.startswith(start) and isinstance(size, int)
        }

    def _walk(self, folder: str, depth: int) -> Iterator[dict[str, Any]]:
        for info in self.call("ls", folder, detail=True):
            if info["type"] != "directory":
                yield info
            elif depth > 1:
                # One that is removed meanwhile must not make the others look gone.
                with contextlib.suppress(FileNotFoundError):
                    yield from self._walk(info["name"], depth - 1)

    def read(self, name: str, limit: int) -> bytes | None:
        """Return the content of a small file, None if there is none; RemoteError if it is too large."""

        def job() -> bytes | None:
            try:
                size = self._info(name)["size"]
                if size <= limit:
                    return self._read(name, 0, size) if size else b""
            except FileNotFoundError:
                return None
            raise RemoteError(
                f"{self._shown(name)} has {size:,} bytes; at most {limit:,} make sense.",
                fix="look at who wrote it; nothing of it was read.",
            )

        return self.retry(f"{self._shown(name)} cannot be read", job)

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """Return some bytes of a file."""
        return self.retry(f"{self._shown(name)} cannot be read", lambda: self._read(name, begin, end))

    def _read(self, name: str, begin: int, end: int) -> bytes:
        fs, path = self.open()[0], self._path(name)
        in_flight = AT_ONCE * (end - begin)
        if filesystem.is_object_store(fs):
            found = self.call("cat_file", path, start=begin, end=end, in_flight=in_flight)
        else:
            found = self.do(partial(filesystem.read_range, fs, path, begin, end), in_flight=in_flight)
        if len(found) != end - begin:
            raise OSError(errno.EIO, f"{len(found):,} bytes came instead of {end - begin:,}")
        return bytes(found)

    @property
    def at_once(self) -> int:
        """How many calls may be made at once: clients with one connection mix them up."""
        fs, _ = self.retry(f"{self} cannot be reached", self.open)
        return AT_ONCE if filesystem.is_async(fs) else 1

    def write(self, name: str, data: bytes) -> None:
        """Write a small file: it is there as a whole or not at all."""

        def job() -> None:
            fs, _ = self.open()
            self._make_folder(name)
            if not filesystem.renames(fs):
                self.call("pipe_file", self._path(name), data)
                return
            folder, _, last = name.rpartition("/")
            # Always the same name: the next try overwrites what a kill has left.
            fresh = _join(folder, f".{last}.part")
            self.call("pipe_file", self._path(fresh), data)
            self._flush(fresh)
            self.call("mv", self._path(fresh), self._path(name))
            self._flush(name)

        self.retry(f"{self._shown(name)} cannot be written", job)

    def send(self, path: Path, name: str, moved: Moved) -> str | None:
        """Copy a local file there, and return its ETag, if it has one."""
        return self.retry(f"{self._shown(name)} cannot be written", partial(self._send, path, name, moved))

    def _send(self, path: Path, name: str, moved: Moved) -> str | None:
        fs, size = self.open()[0], os.path.getsize(path)
        if name in self._torn:
            # The parts that the last try has left would stay, and cost.
            self._end_uploads(name)
        self._torn.add(name)
        self._make_folder(name)
        with Meter(moved, size) as meter:
            if filesystem.is_async(fs):
                part = max(PART, -(-size // _MOST_PARTS))
                how, in_flight = filesystem.part_options(fs, part, AT_ONCE), min(size, AT_ONCE * part)
                self.call("put_file", str(path), self._path(name), meter=meter, in_flight=in_flight, **how)
            else:
                self.do(partial(filesystem.write_file, path, fs, self._path(name), meter), meter)
            self._flush(name)
            tag = self._arrived(name, size)
        self._torn.discard(name)
        return tag

    def _arrived(self, name: str, size: int) -> str | None:
        info = self._info(name)
        if info["size"] != size:
            raise OSError(errno.EIO, f"{info['size']:,} bytes have arrived instead of {size:,}")
        return filesystem.tag(info)

    def copy(self, source: str, tag: str, name: str, size: int) -> str | None:
        """Copy a file there if it still has that ETag; return the copy's, None if it was not copied."""
        with contextlib.suppress(Exception):
            self.call("cp_file", self._path(source), self._path(name))
            # After the copy: the source may have been written before it.
            if filesystem.tag(self._info(source)) == tag:
                return self._arrived(name, size)
        # Whatever went wrong, sending the file is as good.
        return None

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""

        def job() -> None:
            with contextlib.suppress(FileNotFoundError):
                self.call("rm_file", self._path(name))

        self.retry(f"{self._shown(name)} cannot be removed", job)

    def remove_folder(self, name: str) -> None:
        """Remove a folder if it is empty, where there are folders."""
        # Files in it that are not ours stay, and an empty folder does no harm.
        with contextlib.suppress(Exception):
            if not filesystem.is_object_store(self.open()[0]):
                self.call("rmdir", self._path(name))

    def end_uploads(self, folder: str) -> int:
        """End the uploads to a folder that killed processes have left; return how many there were."""
        problem = f"what was left in {self._shown(folder)} cannot be tidied"
        return self.retry(problem, lambda: self._end_uploads(f"{folder}/"))

    def _end_uploads(self, start: str) -> int:
        fs, _ = self.open()
        if not hasattr(fs, "list_multipart_uploads") or not hasattr(fs, "split_path"):
            return 0
        bucket, key, _ = fs.split_path(self._path(start))
        try:
            answer = self.call("call_s3", "list_multipart_uploads", Bucket=bucket, Prefix=key)
        except PermissionError:
            # Keys that may not list uploads can still do everything else.
            return 0
        mine = [one for one in answer.get("Uploads") or [] if one["Key"].startswith(key)]
        for one in mine:
            which = {"Bucket": bucket, "Key": one["Key"], "UploadId": one["UploadId"]}
            with contextlib.suppress(FileNotFoundError, PermissionError):
                self.call("call_s3", "abort_multipart_upload", **which)
        return len(mine)

    def _path(self, name: str) -> str:
        return _join(self.open()[1], name)

    def _shown(self, name: str) -> str:
        return _join(self.url, name)

    def _make_folder(self, name: str) -> None:
        # An object store has no folders: makedirs would make the bucket.
        if not filesystem.is_object_store(self.open()[0]):
            self.call("makedirs", self._path(name).rpartition("/")[0], exist_ok=True)

    def _info(self, name: str) -> dict[str, Any]:
        path = self._path(name)
        self.open()[0].invalidate_cache()
        found: dict[str, Any] = self.call("info", path)
        return found

    def _flush(self, name: str) -> None:
        fs, _ = self.open()
        if filesystem.protocol(fs) == "file":
            path = Path(fs._strip_protocol(self._path(name)))
            with disk.joined(path):
                pass
            disk.flush_folder(path.parent)


def _join(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}" if name and folder else folder or name


_DEPTH = 5
_MOST_PARTS = 9000
