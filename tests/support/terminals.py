"""Runs a command in a terminal of a given width."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence


def in_a_terminal(
    command: Sequence[str], width: int, *, answer: str = "", after: str = "", plain: bool = True
) -> str:
    """Return what a command prints in a terminal; it gets the answer when it has printed `after`."""
    settings = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    settings |= {"COLUMNS": str(width), "TERM": "xterm-256color"}
    ours, its = os.openpty()
    # Not pty.fork(): this process has threads.
    child = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=settings, start_new_session=True)
    os.close(its)
    text, is_due = b"", bool(answer)
    try:
        while piece := _read(ours):
            text += piece
            if is_due and after.encode() in text:
                os.write(ours, answer.encode())
                is_due = False
    finally:
        os.close(ours)
        child.wait()
    shown = text.decode().replace("\r\n", "\n")
    return re.sub(r"\x1b\[[0-9;]*m", "", shown) if plain else shown


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except OSError:
        # No process has the terminal any more.
        return b""
