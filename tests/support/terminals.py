"""Runs a command in a terminal of a given width."""

from __future__ import annotations

import os
import pty
import re
from collections.abc import Sequence


def in_a_terminal(
    command: Sequence[str], width: int, *, answer: str = "", after: str = "", plain: bool = True
) -> str:
    """Return what a command prints in a terminal; it gets the answer when it has printed `after`."""
    child, fd = pty.fork()
    if child == 0:
        settings = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
        os.execvpe(command[0], command, {**settings, "COLUMNS": str(width), "TERM": "xterm-256color"})
    text, is_due = b"", bool(answer)
    try:
        while piece := _read(fd):
            text += piece
            if is_due and after.encode() in text:
                os.write(fd, answer.encode())
                is_due = False
    finally:
        os.close(fd)
        os.waitpid(child, 0)
    shown = text.decode().replace("\r\n", "\n")
    return re.sub(r"\x1b\[[0-9;]*m", "", shown) if plain else shown


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except OSError:
        # The terminal has no process any more.
        return b""
