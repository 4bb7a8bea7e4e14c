"""The library's messages: records of the logger "resumable", printed if the user has set up no logging."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import textwrap


def say(text: str, level: int = logging.INFO) -> None:
    """Log a message; print it if neither the logger "resumable" nor the root logger has a handler.

    >>> say("resumed runs/exp")
    resumed runs/exp
    >>> say("pushed checkpoint 41", logging.DEBUG)
    """
    log = logging.getLogger("resumable")
    # The root logger's default level would hide which checkpoint a training continues from.
    least = log.level or logging.INFO
    if log.hasHandlers():
        if log.level != least:
            log.setLevel(least)
        log.log(level, "%s", text)
    elif level >= least and not log.disabled and level > log.manager.disable:
        print(_wrapped(text), flush=True)


def _wrapped(text: str) -> str:
    """Return a text in lines that fit the terminal of stdout; as it is where stdout is something else."""
    # stdout may be missing, closed, or a stream without a file.
    with contextlib.suppress(AttributeError, ValueError, OSError):
        if os.isatty(sys.stdout.fileno()):
            width = max(20, os.get_terminal_size(sys.stdout.fileno()).columns - 1)
            wrap = textwrap.TextWrapper(
                width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
            )
            return "\n".join(wrap.fill(line) for line in text.splitlines())
    return text
