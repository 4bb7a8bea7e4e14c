"""A pseudo-terminal, and what the rows at its bottom say."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
import termios
import threading
from collections.abc import Iterator
from typing import TextIO

_DRAWN = re.compile(r"\x1b\[9999;1H(.*?)\x1b\[\?7h")
_ROW = re.compile(r"\r\x1b\[m(.*?)\x1b\[K")
_CLEARED = "\x1b7\x1b[r\x1b8\x1b[J\x1bD\x1b[1A\x1b7\x1b8"


class Pty:
    """A pseudo-terminal; `stream` writes to it."""

    def __init__(self, columns: int = 100, lines: int = 24) -> None:
        self._master, slave = os.openpty()
        self.stream: TextIO = os.fdopen(slave, "w", encoding="utf-8")
        self.resize(columns, lines)
        self._bytes, self._marks, self._arrived = b"", 0, threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while piece := os.read(self._master, 65536):
                with self._arrived:
                    self._bytes += piece
                    self._arrived.notify_all()

    @property
    def text(self) -> str:
        """All that was written so far."""
        self._marks += 1
        mark = f"\x00{self._marks}\x00"
        os.write(self.stream.fileno(), mark.encode())
        with self._arrived:
            assert self._arrived.wait_for(lambda: mark.encode() in self._bytes, 20)
            return re.sub("\x00[0-9]+\x00", "", self._bytes.decode())

    @property
    def rows(self) -> list[str]:
        """The rows that are at the bottom now."""
        drawn = _DRAWN.findall(self.text.rpartition(_CLEARED)[2])
        return [*filter(None, _ROW.findall(drawn[-1]))] if drawn else []

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.stream.close()
        self._thread.join(20)
        os.close(self._master)


@contextlib.contextmanager
def opened(columns: int = 100, lines: int = 24) -> Iterator[Pty]:
    """Open a pseudo-terminal for a while."""
    found = Pty(columns, lines)
    try:
        yield found
    finally:
        found.close()
