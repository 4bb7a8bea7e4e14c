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

    >>> fitted([Column("step", ["1", "20"]), Column("note", ["a", "b"], need=1)], 8)
    ([['step', '   1', '  20']], [Column(head='step', cells=['1', '20'], need=0, ...)], ['note'])
    """
    kept = [(one, _printable([one.head, *one.cells])) for one in columns if any(one.cells)]
    widths = {id(one): max(map(len, texts)) for one, texts in kept}
    gone: list[str] = []
    while width and sum(widths[id(one)] + 2 for one, _ in kept) - 2 > width:
        least = min((one for one, _ in kept if one.need), key=lambda one: one.need, default=None)
        if least is None:
            break
        gone.append(least.head)
        kept = [pair for pair in kept if pair[0] is not least]
    padded = []
    for one, texts in kept:
        pad, size = str.ljust if one.is_left else str.rjust, widths[id(one)]
        padded.append([pad(text, size) for text in texts])
    return padded, [one for one, _ in kept], gone


def _printable(texts: list[str]) -> list[str]:
    # One look at all of them: most tables hold nothing else.
    return texts if "".join(texts).isprintable() else [printable(text, but="") for text in texts]
