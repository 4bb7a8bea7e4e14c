"""Tables, colours and relative times, as the commands print them for people."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TextIO

from .. import rows as progress_rows
from ..errors import printable
from ..run import history
from ..run.policy import bytes_of, counted, moment
from .columns import Column, cut, fitted, terminal_width

_LEAST_CELL = 8
_LEAST_ENDED = len("ended: killed or crashed…")
_COUNTS = {"epoch": 90, "batch": 70, "step": 0}
_UNKNOWN = {
    **dict.fromkeys(("epoch", "batch", "step", "saved", "why", "remote")),
    **{"metrics": {}, "elsewhere": 0},
    **dict.fromkeys(("newest", "best", "abandoned"), False),
}


def print_checkpoints(rows: Sequence[Mapping[str, Any]], goal: str | None = None) -> None:
    """Print a line for each checkpoint, with a column for each metric, that of the goal first."""
    print_columns(_columns(rows, goal))


def print_columns(columns: Sequence[Column]) -> None:
    """Print a table below its heads, as wide as the terminal at most, and name what has no room."""
    padded, kept, gone = fitted(columns, width := terminal_width())
    is_coloured = _is_coloured()
    shown = [
        [*map(painted, cells)] if one.has_marks and is_coloured else cells
        for one, cells in zip(kept, padded, strict=True)
    ]
    rows = zip(*shown, strict=True)
    print("  ".join(map(bold, next(rows, ()))).rstrip())
    print("\n".join(["  ".join(row).rstrip() for row in rows]))
    if gone:
        print(dim(cut(f"no room for: {', '.join(gone)}", width)))


def _columns(rows: Sequence[Mapping[str, Any]], goal: str | None) -> list[Column]:
    whole = [row if "metrics" in row else {**_UNKNOWN, **row, "why": None} for row in rows]
    names = dict.fromkeys([goal] * (goal is not None) + [name for row in whole for name in row["metrics"]])
    some_share = any(row["own"] != row["size"] for row in whole)
    now = time.time()
    return [
        Column("number", [str(row["number"]) for row in whole]),
        *(Column(name, [_text(row[name]) for row in whole], need) for name, need in _COUNTS.items()),
        *(_metric(whole, name, at) for at, name in enumerate(names)),
        Column("size", _sizes([row["size"] for row in whole]), 50),
        Column("own", _sizes([row["own"] if some_share else None for row in whole]), 20),
        Column("age", [_age(row["saved"], now) for row in whole], 60),
        Column("why", [row["why"] or "" for row in whole], 80, is_left=True, least=6),
        Column("", [*map(_marks, whole)], is_left=True, has_marks=True),
    ]


def _metric(rows: Sequence[Mapping[str, Any]], name: str, at: int) -> Column:
    values = (row["metrics"].get(name) for row in rows)
    # That of the goal stays; the others are the first to go, from the last on.
    need = 0 if at == 0 else max(1, 19 - at)
    return Column(name, ["" if value is None else f"{float(value):.4g}" for value in values], need)


def _marks(row: Mapping[str, Any]) -> str:
    words = ["damaged"] if row["problem"] else []
    words += ["a part"] if row["elsewhere"] else []
    words += [word for word in ("newest", "best", "abandoned") if row[word]]
    return ", ".join([*words, row["remote"]] if row["remote"] else words)


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _sizes(sizes: Sequence[int | None]) -> list[str]:
    # Most checkpoints of a run have the same size.
    texts = {size: "" if size is None else bytes_of(size) for size in {*sizes}}
    return [texts[size] for size in sizes]


def _age(saved: str | None, now: float) -> str:
    then = moment(saved) if saved else None
    return "" if then is None else progress_rows.age(now - then)


def print_rest(
    remote: Mapping[str, str] | None, attempts: Sequence[Mapping[str, Any]], state: str | None
) -> None:
    """Print where checkpoints are pushed to, and a line for each start of the training."""
    if remote or attempts:
        print()
    if remote:
        print(printable(f"remote  {remote['url']} (push {remote['push']})", but=""))
    if attempts:
        cells = [_attempt_cells(attempt, state if attempt is attempts[-1] else None) for attempt in attempts]
        # The age goes first, then where it ran; how it ended is cut before either.
        needs = (0, 2, 3, 4, 1, 5, 0)
        columns = [
            Column("", one, need, is_left=True, least=0 if need else _LEAST_ENDED * (at > 0))
            for at, (one, need) in enumerate(zip(zip(*cells, strict=True), needs, strict=True))
        ]
        padded, _, _ = fitted(columns, terminal_width())
        for *words, ended in [*zip(*padded, strict=True)][1:]:
            print("  ".join([*words, painted(ended) if ended.strip() == "running" else ended]).rstrip())


def numbers(metrics: Mapping[str, float | str]) -> str:
    """Return metrics as text.

    >>> numbers({"loss": 0.51812, "acc": "nan"})
    'loss 0.5181, acc nan'
    """
    return ", ".join(f"{name} {float(value):.4g}" for name, value in metrics.items())


def _attempt_cells(attempt: Mapping[str, Any], state: str | None) -> tuple[str, ...]:
    came_from, ended = attempt["from"], attempt["ended"]
    last = f"ended: {ended.splitlines()[0] if ended else history.NO_EXIT}"
    return (
        f"attempt {attempt['attempt']}",
        str(attempt["host"] or ""),
        f"process {attempt['pid']}",
        "fresh" if came_from is None else f"from checkpoint {came_from}",
        age(attempt["time"]),
        counted(len(attempt["warnings"]), "warning") if attempt["warnings"] else "",
        "running" if state == "running" and not ended else last,
    )


def print_table(
    rows: Iterable[Sequence[str]],
    to_the_left: Collection[int] = (),
    indent: str = "",
    marks: int | None = None,
    *,
    has_head: bool = False,
    width: int | None = None,
) -> None:
    """Print rows of cells in columns; the words in the column `marks` are coloured, and a head stands out.

    With a `width` the longest cells are cut until a line fits it.
    """
    shown = [[printable(cell, but="") for cell in row] for row in rows]
    # A column that is empty below its head is left out.
    used = [i for i, column in enumerate(zip(*shown, strict=True)) if any(column[1:] or column)]
    widths = {i: max(len(row[i]) for row in shown) for i in used}
    if width:
        room = width - len(indent) - 2 * (len(used) - 1)
        while sum(widths.values()) > room and max(widths.values()) > _LEAST_CELL:
            widths[max(widths, key=widths.__getitem__)] -= 1
        shown = [[cut(cell, widths.get(i)) for i, cell in enumerate(row)] for row in shown]
    # Below a bold title a head is grey.
    style = dim if indent else bold
    for at, row in enumerate(shown):
        # Numbers are aligned right, words left.
        cells = [row[i].ljust(widths[i]) if i in to_the_left else row[i].rjust(widths[i]) for i in used]
        if marks in used:
            cells[used.index(marks)] = painted(cells[used.index(marks)])
        print(indent + "  ".join(map(style, cells) if has_head and not at else cells).rstrip())


def painted(text: str) -> str:
    """Return a text in which the words for a state are coloured, if a person looks at it on a terminal.

    >>> painted("newest, best")
    'newest, best'
    """
    if not _is_coloured():
        return text
    return _WORDS.sub(lambda word: f"\x1b[{_COLOURS[word[0]]}m{word[0]}\x1b[0m", text)


def bold(text: str) -> str:
    """Return a text in bold, if a person looks at it on a terminal."""
    return f"\x1b[1m{text}\x1b[0m" if text.strip() and _is_coloured() else text


def dim(text: str) -> str:
    """Return a text in grey, if a person looks at it on a terminal."""
    return f"\x1b[2m{text}\x1b[0m" if _is_coloured() else text


def error_text(text: str) -> str:
    """Return the text of an error with its colours, if a person looks at it on a terminal."""
    if not _is_coloured(sys.stderr):
        return text
    text = re.sub(r"(?m)^Fix:", "\x1b[1;36mFix:\x1b[0m", text)
    return re.sub(r"\bdamaged\b", "\x1b[31mdamaged\x1b[0m", text)


def _is_coloured(stream: TextIO | None = None) -> bool:
    # See https://no-color.org. A dumb terminal prints the codes, as old ones of Windows do.
    is_unwanted = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or sys.platform == "win32"
    return not is_unwanted and (stream or sys.stdout).isatty()


_COLOURS = {
    "newest": "1",
    "best": "32",
    "intact": "32",
    "damaged": "31",
    "abandoned": "2",
    "running": "36",
    "finished": "32",
    "stopped": "33",
    "crashed": "31",
    "not pushed": "33",
    "pushed": "36",
    "removed": "31",
    "goes": "31",
    "exact": "32",
    "NOT exact": "31",
    "NOT repeatable": "31",
    "FAILED": "31",
}
_WORDS = re.compile("|".join(rf"\b{word}\b" for word in _COLOURS))


def age(saved: str) -> str:
    """Return how long ago a time was.

    >>> age("2100-01-01T00:00:00+00:00")
    '0 s ago'
    """
    if (then := moment(saved)) is None:
        return "?"
    return f"{progress_rows.age(time.time() - then)} ago"
