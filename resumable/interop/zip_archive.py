"""A zip archive of uncompressed entries, read strictly: none can become larger than the file."""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from zipfile import ZipInfo

from ..errors import Unsupported

Read = Callable[[int, int], memoryview]
"""Returns the bytes of a file from one position to another, in memory that nothing else has."""

_MOST_DIRECTORY = 64 << 20


def refused(problem: str) -> Unsupported:
    """Return the error for a file that is not read."""
    return Unsupported(
        f"{problem}.",
        fix="ask its maker for a .safetensors file. If you trust whoever made this one, torch.load() it "
        "where nothing else is at stake, and torch.save() a dict of just its tensors by name.",
    )


class Archive:
    """The entries of an archive; ValueError if it is damaged, Unsupported if they are compressed."""

    def __init__(self, size: int, read: Read) -> None:
        self._read = read
        last = bytes(read(max(0, size - 22), size))
        # zipfile would also find an end that a comment or anything else follows.
        if last[:4] != b"PK\x05\x06" or last[20:] != b"\0\0":
            raise ValueError("it does not end as a zip archive does")
        try:
            with zipfile.ZipFile(_Raw(size, read)) as archive:
                entries, limit = archive.infolist(), archive.start_dir
        except (zipfile.BadZipFile, NotImplementedError, OSError, OverflowError, struct.error) as exc:
            raise ValueError(f"its directory is none: {exc}") from exc
        self._entries = {entry.filename: entry for entry in entries}
        if len(self._entries) != len(entries):
            raise refused("two entries in it have the same name")
        self._begin = {entry.filename: self._content_begins(entry, limit) for entry in entries}
        self.sizes = {entry.filename: entry.file_size for entry in entries}
        """The bytes of each entry."""
        end = 0
        for entry in sorted(entries, key=lambda entry: entry.header_offset):
            if entry.header_offset < end:
                raise refused(f"{entry.filename} and the entry before it overlap")
            if entry.header_offset and not end:
                raise ValueError("it does not begin as a zip archive does")
            end = self._begin[entry.filename] + entry.file_size

    def _content_begins(self, entry: ZipInfo, limit: int) -> int:
        name, start = entry.orig_filename, entry.header_offset
        if entry.compress_type or entry.flag_bits & 1 or entry.compress_size != entry.file_size:
            raise refused(f"{name} in it is packed, so that it can become any size")
        if name != entry.filename or "\\" in name or {"", ".", ".."} & {*name.split("/")}:
            raise refused(f"{name!r} cannot be the name of what is in it")
        if start + 30 > limit or bytes((head := self._read(start, start + 30))[:4]) != b"PK\x03\x04":
            raise ValueError("its directory leads to what is no entry")
        names, extras = struct.unpack("<26xHH", head)
        begin = start + 30 + int(names) + int(extras)
        if begin + entry.file_size > limit:
            raise ValueError(f"{name} does not lie in it")
        return begin

    def content(self, name: str) -> memoryview:
        """Return the bytes of an entry; ValueError if they are not those that were written."""
        begin = self._begin[name]
        content = self._read(begin, begin + self.sizes[name])
        if zlib.crc32(content) != self._entries[name].CRC:
            raise ValueError(f"{name} in it is not what its checksum says")
        return content


class _Raw(io.RawIOBase):
    """A file for zipfile, which never reads more of it at once than a directory may have."""

    def __init__(self, size: int, read: Read) -> None:
        self._size, self._read, self._at = size, read, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if not 0 <= at <= self._size:
            raise OSError(f"there is no byte {at}")
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        end = self._size if size is None or size < 0 else min(self._size, self._at + size)
        if end - self._at > _MOST_DIRECTORY:
            raise ValueError(f"it does not have a directory of {end - self._at:,} bytes")
        begin, self._at = self._at, end
        return bytes(self._read(begin, end))
