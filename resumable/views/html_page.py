"""Self-contained pages with one look, which never replace a file that is not such a page."""

from __future__ import annotations

import contextlib
import os
import secrets
import string
from datetime import datetime, timezone
from pathlib import Path

from ..errors import SaveFailed, UsageError
from ..files import disk
from ..run.markup import Markup, escaped
from ..run.policy import when
from ..version import __version__


def page(
    maker: str, *, title: str, heading: str, body: Markup, note: str = "", data: str = "", script: str = ""
) -> str:
    """Return the page of a command; `data` are elements that hold data for its script."""
    values = {
        "maker": maker,
        "title": title,
        "heading": heading,
        "made": when(datetime.now(timezone.utc).isoformat()),
        "body": body,
        "version": __version__,
        "note": note,
        "style": Markup(text_of("page.css")),
        "data": Markup(data),
        "nonce": secrets.token_hex(16),
        "script": Markup(text_of("theme.js") + script),
    }
    template = string.Template(text_of("page.html"))
    return template.substitute({key: escaped(value) for key, value in values.items()})


def text_of(name: str) -> str:
    """Return the text of a file that belongs to the pages."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def check(path: str | os.PathLike[str], maker: str) -> None:
    """Check that a page can be written there: only an older one of the same command is replaced."""
    target = Path(path)
    if target.is_dir():
        raise UsageError(f"{target} is a folder.", fix=f"name a file: {target / f'{maker}.html'}.")
    if not (folder := Path(os.path.abspath(target)).parent).is_dir():
        raise UsageError(f"there is no folder {folder} to write {target.name} to.", fix="make it first.")
    if os.path.lexists(target) and not _is_made_by(maker, target):
        raise UsageError(
            f"{target} is there already, and is not a page that `resumable {maker}` has written.",
            fix="name another file, or move that one away.",
        )


def _is_made_by(maker: str, path: Path) -> bool:
    mark = f'<!doctype html>\n<html lang="en" data-made-by="resumable {maker}">'.encode()
    # A pipe would never end.
    with contextlib.suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                return file.read(len(mark)) == mark
    return False


def write(path: str | os.PathLike[str], text: str) -> None:
    """Write a page, completely or not at all."""
    try:
        disk.replace(Path(os.path.realpath(path)), text.encode(errors="replace"))
    except OSError as exc:
        raise SaveFailed(
            f"the page could not be written to {os.fspath(path)}: {exc.strerror}.",
            fix="mend the cause (room on the disk, permissions), or name another file.",
        ) from exc
