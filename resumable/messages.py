"""The library's messages: records of the logger "resumable", printed if the user has set up no logging."""

from __future__ import annotations

import logging


def say(text: str, level: int = logging.INFO) -> None:
    """Log a message; print it if neither the logger "resumable" nor the root logger has a handler.

    >>> say("resumed runs/exp")
    resumed runs/exp
    >>> say("pushed checkpoint 41", logging.DEBUG)
    """
    log = logging.getLogger("resumable")
    if log.level == logging.NOTSET:
        # The root logger's default level would hide which checkpoint a training continues from.
        log.setLevel(logging.INFO)
    if log.hasHandlers():
        log.log(level, "%s", text)
    elif log.isEnabledFor(level):
        print(text, flush=True)
