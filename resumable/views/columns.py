"""Tables that fit the terminal: the least needed columns are left out."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import printable


class Column(NamedTuple):
    """A column of a table; empty below its head, it is left out."""

    head: str
    cells: Sequence[str]
    need: int = 0
    """How badly it is needed, from 1; 0: it always stays."""
    is_left: bool = False
    """Whether it is aligned left, as words are."""
    has_marks: bool = False
    """Whether its words have colours."""
    least: int = 0
    """The width to which it may be cut; 0: it is never cut."""


def terminal_width() -> int | None:
    """Return the width of the terminal that the output goes to; None if it goes elsewhere."""
    if not sys.stdout.isatty():
        return None
    given = os.environ.get("COLUMNS", "")
    try:
        return int(given) if given.isdecimal() else os.get_terminal_size(sys.stdout.fileno()).columns or None
    except OSError:
        return None


def fitted(columns: Sequence[Column], width: int | None) -> tuple[list[list[str]], list[Column], list[str]]:
    """Return the cells of the columns that fit a width, padded and with their heads; the columns; what went.

    >>> fitted([Column("step", ["1", "20"]), Column("note", ["a", "b"], need=1)], 8)[::2]
    ([['step', '   1', '  20']], ['note'])
    """
    texts = [_printable([one.head, *one.cells]) if any(one.cells) else [] for one in columns]
    widths = [max(map(len, cells), default=0) for cells in texts]
    kept = [at for at, cells in enumerate(texts) if cells]
    gone: list[int] = []
    while width and _total(least := [_least(columns[at], widths[at]) for at in kept]) > width:
        at = min((at for at in kept if columns[at].need), key=lambda at: columns[at].need, default=None)
        if at is None:
            break
        kept.remove(at)
        gone.append(at)
    padded = []
    for at in kept:
        size = widths[at]
        if width and columns[at].least:
            size = min(size, max(columns[at].least, width - _total(least) + _least(columns[at], size)))
        pad = str.ljust if columns[at].is_left else str.rjust
        cells = [cut(text, size) for text in texts[at]] if size < widths[at] else texts[at]
        padded.append([pad(text, size) for text in cells])
    return padded, [columns[at] for at in kept], [columns[at].head for at in sorted(gone) if columns[at].head]


def _least(column: Column, size: int) -> int:
    return min(column.least, size) if column.least else size


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * len(widths) - 2


def cut(line: str, width: int | None) -> str:
    """Return a text that is no longer than a width.

    >>> cut("a long one", 6), cut("short", 6)
    ('a lon…', 'short')
    """
    return line if not width or len(line) <= width else f"{line[: max(0, width - 1)]}…"


def _printable(texts: list[str]) -> list[str]:
    # One look at all of them: most tables hold nothing else.
    return texts if "".join(texts).isprintable() else [printable(text, but="") for text in texts]
