"""What a user writes to name a run or one of its checkpoints: runs/exp@41, runs/exp/best."""

from __future__ import annotations

import os

from ..errors import UsageError

WORDS = {"newest": "newest", "latest": "newest", "last": "newest", "best": "best"}
"""The words for a checkpoint, and what they mean."""

_LINKS = ("newest", "best")


def named(text: str) -> tuple[str, str | None]:
    """Return the run, and which of its checkpoints is named, or None.

    >>> named("runs/exp@41"), named("runs/exp@latest"), named("runs/exp")
    (('runs/exp', '41'), ('runs/exp', 'newest'), ('runs/exp', None))
    """
    if "://" in text:
        return text, None
    above, word = os.path.split(text.rstrip("/"))
    # The link may be missing: the best is unknown, or a file system has no links.
    if word in _LINKS and is_run(above) and (os.path.islink(text.rstrip("/")) or not os.path.lexists(text)):
        return above or ".", word
    path, at, word = text.rpartition("@")
    # A folder may have an @ in its name.
    if not at or os.path.lexists(text):
        return text, None
    if word in WORDS or word.isdecimal():
        return path, WORDS.get(word, word)
    raise UsageError(
        f"{text!r} ends with neither a save number nor a known word.",
        fix=f"say {path}@41, {path}@best or {path}@newest; `resumable ls {path}` lists what is there.",
    )


def is_run(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder is that of a run.

    >>> is_run("runs/none")
    False
    """
    return os.path.lexists(os.path.join(path, "run.json"))
