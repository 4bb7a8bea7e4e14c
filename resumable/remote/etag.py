"""What a store of objects says of a file's content, to be compared with what it should be."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Sum(NamedTuple):
    """The MD5 of a file, or of the MD5s of its parts."""

    digest: str
    is_of_parts: bool


def told(info: Mapping[str, Any]) -> Sum | None:
    """Return what the store says of the content, if it says that."""
    tag = str(info.get("ETag") or "").strip('"').lower()
    if found := _ETAG.fullmatch(tag):
        return Sum(tag, found[1] is not None)
    if isinstance(other := info.get("md5Hash"), str):
        with contextlib.suppress(ValueError):
            return Sum(base64.b64decode(other, validate=True).hex(), False)
    return None


def of(path: Path, part: int | None = None) -> str:
    """Return the MD5 of a file, or of its parts' ones, as stores that take a file in parts do it."""
    parts = []
    with open(path, "rb") as file:
        whole = hashlib.md5(usedforsecurity=False)
        size = left = part or -1
        while piece := file.read(_PIECE if left < 0 else min(left, _PIECE)):
            whole.update(piece)
            left -= len(piece) if left > 0 else 0
            if left == 0:
                parts.append(whole.digest())
                whole, left = hashlib.md5(usedforsecurity=False), size
    if part is None:
        return whole.hexdigest()
    if left != size or not parts:
        parts.append(whole.digest())
    return f"{hashlib.md5(b''.join(parts), usedforsecurity=False).hexdigest()}-{len(parts)}"


_PIECE = 1 << 20
_ETAG = re.compile(r"[0-9a-f]{32}(-[0-9]+)?")
