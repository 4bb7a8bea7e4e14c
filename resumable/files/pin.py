"""The cryptographic hash that pins the content of a checkpoint (`expect=`)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Protocol

from ..errors import CheckpointNotExpected, UsageError

_FORM = re.compile(r"sha256:[0-9a-f]{64}")


class Hasher(Protocol):
    """Takes the bytes of a file, in order."""

    def update(self, data: Any, /) -> None:
        """Take the next bytes."""


class Pin:
    """The SHA-256 of files as they are read, and of all of them together.

    It hashes the very bytes that are used. A hash from a second reading would vouch for bytes that may have
    been replaced in between.

    >>> pin = Pin()
    >>> pin.file("state.json").update(b"{}")
    >>> str(pin)
    'sha256:37d5e40760546ca9740dcacfb41bde0362e519abedbe5be269bd2ea4d708c087'
    """

    def __init__(self) -> None:
        self._files: dict[str, Any] = {}

    def file(self, name: str) -> Hasher:
        """Return the hasher for the bytes of a file."""
        # Imported here, because most commands need no such hash.
        import hashlib

        found: Hasher = hashlib.sha256()
        self._files[name] = found
        return found

    def __str__(self) -> str:
        lines = (f"{found.hexdigest()}  {name}\n" for name, found in sorted(self._files.items()))
        return of_bytes("".join(lines).encode())


def of_bytes(data: Any) -> str:
    """Return the digest of the content of one file.

    >>> of_bytes(b"")
    'sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855'
    """
    import hashlib

    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def checked(expect: Any) -> str | None:
    """Return the pin that a user expects; UsageError if it is not a digest."""
    if expect is None or (isinstance(expect, str) and _FORM.fullmatch(expect)):
        return expect
    raise UsageError(
        f"expect={expect!r} is not the digest of a content.",
        fix="give what `resumable verify RUN --pin` or Checkpoint.pin() tells where you trust the content: "
        "'sha256:' and 64 hexadecimal digits.",
    )


def due(resume: Any, expect: str | None) -> Any:
    """Return what to resume from: what is expected must exist."""
    if expect and resume == "never":
        raise UsageError(
            f"resume='never' continues from nothing, but expect={expect!r} says what to continue from.",
            fix="leave out one of the two. RESUMABLE_RESUME, if it is set, overrides resume=.",
        )
    return "must" if expect and resume == "auto" else resume


def refuse_others(expect: str | None, found: str, path: Path) -> None:
    """Raise CheckpointNotExpected if a pin is expected and another was found."""
    if expect is not None and found != expect:
        raise CheckpointNotExpected(
            f"{path} has the content {found}, and expected was {expect}.",
            fix="find out who has changed it, and load it only if you trust them: expect what was found. "
            "Nothing was changed here.",
        )
