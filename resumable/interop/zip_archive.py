"""A zip archive of what is stored as it is, read strictly; nothing in it can become larger than it is."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ..errors import Unsupported

Read = Callable[[int, int], memoryview]
"""What returns the bytes of a file from one position to another, in memory that nobody else has."""

_MOST_DIRECTORY = 64 << 20


def refused(problem: str) -> Unsupported:
    """Return the error for a file that is not read."""
    return Unsupported(
        f"{problem}.",
        fix="ask its maker for a .safetensors file. If you trust whoever made this one, torch.load() it "
        "where nothing else is at stake, and torch.save() a dict of just its tensors by name.",
    )


class _Entry(NamedTuple):
    name: str
    start: int
    begin: int
    end: int
    checksum: int


class Archive:
    """The entries of an archive; ValueError if it is damaged, Unsupported if they are not just stored."""

    def __init__(self, size: int, read: Read) -> None:
        self._read = read
        try:
            entries = [*_entries(size, read)]
        except struct.error as exc:
            raise ValueError("its directory is none") from exc
        _refuse_overlap(entries)
        self._entries = {entry.name: entry for entry in entries}
        if len(self._entries) != len(entries):
            raise refused("two entries in it have the same name")
        self.sizes = {entry.name: entry.end - entry.begin for entry in entries}
        """The bytes of each entry."""

    def content(self, name: str) -> memoryview:
        """Return the bytes of an entry; ValueError if they are not those that were written."""
        entry = self._entries[name]
        content = self._read(entry.begin, entry.end)
        if zlib.crc32(content) != entry.checksum:
            raise ValueError(f"{name} in it is not what its checksum says")
        return content


def _entries(size: int, read: Read) -> Iterator[_Entry]:
    limit, end = _directory(size, read)
    rest = read(limit, end)
    while rest:
        # (no unpack_from: what is missing at the end has to be an error)
        flags, method, checksum, *numbers, names, extras, comments, start = struct.unpack(
            "<4x4xHH4xIIIHHH8xI", rest[:46]
        )
        name = str(rest[46 : 46 + names], "utf-8")
        packed, length, start = _wide(rest[46 + names : 46 + names + extras], *numbers, start)
        if bytes(rest[:4]) != b"PK\x01\x02" or 46 + names + extras + comments > len(rest):
            raise ValueError("its directory is none")
        if method or flags & 1 or packed != length:
            raise refused(f"{name} in it is packed, so that it can become any size")
        if "\\" in name or {"", ".", ".."} & {*name.split("/")}:
            raise refused(f"{name!r} cannot be the name of what is in it")
        begin = _content_begins(start, limit, read)
        if begin + length > limit:
            raise ValueError(f"{name} does not lie in it")
        yield _Entry(name, start, begin, begin + length, checksum)
        rest = rest[46 + names + extras + comments :]


def _content_begins(start: int, limit: int, read: Read) -> int:
    if start + 30 > limit or bytes((head := read(start, start + 30))[:4]) != b"PK\x03\x04":
        raise ValueError("its directory leads to what is no entry")
    names, extras = struct.unpack("<26xHH", head)
    return start + 30 + int(names) + int(extras)


def _refuse_overlap(entries: Iterable[_Entry]) -> None:
    before = None
    for entry in sorted(entries, key=lambda entry: entry.start):
        if before and entry.start < before.end:
            raise refused(f"{before.name} and {entry.name} in it overlap")
        before = entry


def _directory(size: int, read: Read) -> tuple[int, int]:
    """Return where the directory lies, which is the last thing in the file."""
    if size < 22 or bytes((last := read(size - 22, size))[:4]) != b"PK\x05\x06":
        raise ValueError("it does not end as a zip archive does")
    length, begin = struct.unpack("<12xII2x", last)
    end = size - 22
    if size >= 42 and bytes((link := read(size - 42, size - 22))[:4]) == b"PK\x06\x07":
        (end,) = struct.unpack("<8xQ4x", link)
        if end + 56 > size or bytes((wide := read(end, end + 56))[:4]) != b"PK\x06\x06":
            raise ValueError("it does not end as a zip archive does")
        length, begin = struct.unpack("<40xQQ", wide)
    if begin + length != end or length > _MOST_DIRECTORY:
        raise ValueError(f"it does not have a directory of {length:,} bytes")
    return begin, end


def _wide(extra: memoryview, *numbers: int) -> list[int]:
    """Return numbers of a directory, those that do not fit into 32 bits from where they stand instead."""
    wide: tuple[int, ...] = ()
    while len(extra) >= 4:
        kind, length = struct.unpack("<HH", extra[:4])
        if kind == 1:
            wide = struct.unpack(f"<{length // 8}Q", extra[4 : 4 + length // 8 * 8])
        extra = extra[4 + length :]
    # (they stand there with the length before the packed length)
    packed, plain, start = numbers
    found = iter(wide)
    plain, packed, start = (next(found, one) if one == 0xFFFFFFFF else one for one in (plain, packed, start))
    return [packed, plain, start]
