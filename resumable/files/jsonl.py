"""An append-only file with a JSON object on each line; a kill tears at most the last line."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from . import disk
from .strict_json import Json, parse

Line = dict[str, Json]
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def read(path: Path) -> list[Line]:
    """Return the lines of a file without damaged ones; none if there is no such file."""
    return parsed(content(path))


def parsed(data: bytes) -> list[Line]:
    """Return the lines of a text without damaged ones."""
    return [line for text in data.split(b"\n") if (line := _parsed(text)) is not None]


def each(path: Path) -> Iterator[Line]:
    """Yield the lines of a file of any size, as `read` returns them."""
    try:
        with _opened(path, os.O_RDONLY) as fd, open(fd, "rb", closefd=False) as file:
            yield from (line for text in file if (line := _parsed(text.rstrip(b"\n"))) is not None)
    except FileNotFoundError:
        return


def append(path: Path, lines: Iterable[Line]) -> None:
    """Append lines, flushed; none of them if OSError is raised."""
    with _opened(path, os.O_RDWR | os.O_CREAT | os.O_APPEND) as fd:
        if os.fstat(fd).st_nlink > 1:
            # A hard link: a backup, for example, must not change with it.
            rewrite(path, lambda line: line, lines)
            return
        end, glue = _tail(fd)
        if end < os.fstat(fd).st_size:
            os.ftruncate(fd, end)
        try:
            _put(fd, glue + b"".join(map(_text, lines)))
        except OSError:
            # Remove half a line, or a whole one that the next try would write again.
            with contextlib.suppress(OSError):
                os.ftruncate(fd, end)
            raise
    if not end:
        disk.flush_folder(path.parent)


def rewrite(path: Path, change: Callable[[Line], Line | None], lines: Iterable[Line]) -> None:
    """Rewrite the file atomically: each line as `change` returns it (None drops it), then the new lines."""
    kept = []
    *whole, last = content(path).split(b"\n")
    for text in whole if _parsed(last) is None else [*whole, last]:
        if (line := _parsed(text)) is None:
            # The version that wrote this may be able to read it.
            kept.append(text + b"\n")
        elif changed := change(line):
            kept.append(text + b"\n" if changed is line else _text(changed))
    disk.replace(path, b"".join([*kept, *map(_text, lines)]))


def plain(value: Json) -> Json:
    """Return a value as strict JSON: NaN and infinities become strings, and text becomes valid UTF-8.

    >>> plain({"loss": float("nan"), "argv": ("train.py",)})
    {'loss': 'nan', 'argv': ['train.py']}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _text(line: Line) -> bytes:
    try:
        text = _ENCODER.encode(line).encode()
    except (TypeError, ValueError):
        text = _ENCODER.encode(plain(line)).encode()
    return text + b"\n"


def _parsed(text: bytes) -> Line | None:
    # Lines that are not ours are left alone: a training must not end because of them.
    with contextlib.suppress(ValueError):
        found = parse(text)
        return found if isinstance(found, dict) else None
    return None


def content(path: Path) -> bytes:
    """Return the bytes of a file; none if there is no such file."""
    with contextlib.suppress(FileNotFoundError), _opened(path, os.O_RDONLY) as fd:
        return _rest(fd)
    return b""


def ending(path: Path, most: int) -> bytes:
    """Return the last whole lines of a file, of at most so many bytes; none if there is no such file."""
    with contextlib.suppress(FileNotFoundError), _opened(path, os.O_RDONLY) as fd:
        skipped = os.lseek(fd, 0, os.SEEK_END) - most
        os.lseek(fd, max(0, skipped), os.SEEK_SET)
        return _rest(fd).partition(b"\n")[2] if skipped > 0 else _rest(fd)
    return b""


def _tail(fd: int) -> tuple[int, bytes]:
    """Return where the last whole line ends, and the separator that the next line needs."""
    size = os.lseek(fd, 0, os.SEEK_END)
    os.lseek(fd, max(0, size - 1), os.SEEK_SET)
    if os.read(fd, 1) in (b"", b"\n"):
        return size, b""
    last = _last_line(fd, size)
    return (size - len(last), b"") if _parsed(last) is None else (size, b"\n")


def _last_line(fd: int, size: int) -> bytes:
    text = b""
    with open(fd, "rb", closefd=False) as file:
        while len(text) < size and b"\n" not in text:
            # Twice as much each time: the lines before it may be very many.
            begin = max(0, size - 2 * len(text) - 4096)
            file.seek(begin)
            text = file.read(size - begin)
    return text.rpartition(b"\n")[2]


def _put(fd: int, text: bytes) -> None:
    rest = memoryview(text)
    while rest.nbytes:
        rest = rest[os.write(fd, rest) :]
    getattr(os, "fdatasync", os.fsync)(fd)


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = disk.open_regular(path, flags)
    try:
        yield fd
    finally:
        os.close(fd)


def _rest(fd: int) -> bytes:
    with open(fd, "rb", closefd=False) as file:
        if (size := os.fstat(fd).st_size) > _MOST:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes; at most {_MOST:,} make sense")
        return file.read()


# Half a million saves.
_MOST = 256 << 20
