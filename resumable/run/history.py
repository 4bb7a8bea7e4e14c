"""The history of a run: a line for each start, save, restore and end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TypeGuard

from ..errors import CannotRead
from ..files import jsonl
from ..files.jsonl import Line
from ..files.strict_json import Json

NAME = "history.jsonl"

CLOSED = ("closed", "left without close()")
"""How a process ends that was not stopped."""

NO_EXIT = "killed or crashed (no exit recorded)"
"""How a process ended that has not noted its end."""


def read(folder: Path) -> list[Line]:
    """Return the history of the run in a folder, oldest first, without damaged lines."""
    return jsonl.parsed(content(folder))


def content(folder: Path, last: int | None = None) -> bytes:
    """Return the bytes of the history of the run in a folder, or its `last` ones, in whole lines."""
    try:
        return jsonl.content(folder / NAME) if last is None else jsonl.ending(folder / NAME, last)
    except OSError as exc:
        raise CannotRead(
            f"{folder / NAME} cannot be read: {exc.strerror}.",
            fix="mend the cause, or move the file away; the checkpoints do not need it.",
        ) from exc


def attempts(lines: Sequence[Line]) -> list[Line]:
    """Return a summary of each start: the process, its checkpoint, last save, warnings, how it ended.

    >>> start = {"event": "start", "attempt": 1, "time": "2026-07-30T12:00:00+00:00", "host": "node7"}
    >>> [found] = attempts([start, {"event": "end", "attempt": 1, "how": "SIGTERM"}])
    >>> found["host"], found["ended"]
    ('node7', 'SIGTERM')
    """
    starts = {line["attempt"]: line for line in lines if is_start(line)}
    told = {then["attempt"]: then["how"] for line in starts.values() if (then := _previous(line))}
    ends = told | {line["attempt"]: line["how"] for line in lines if is_end(line)}
    saves = {line["attempt"]: line["number"] for line in lines if is_save(line)}
    warned: dict[Json, list[Json]] = {}
    for line in filter(is_warning, lines):
        warned.setdefault(line["attempt"], []).append(line["text"])
    return [
        {key: start.get(key) for key in _SUMMARY}
        | {"last": saves.get(number), "ended": ends.get(number), "warnings": warned.get(number, [])}
        for number, start in starts.items()
    ]


def pushed(lines: Iterable[Line]) -> dict[str, set[int]]:
    """Return the checkpoints that are complete on each remote, according to the history.

    >>> line = {"event": "push", "to": "s3://b/exp"}
    >>> pushed([line | {"number": 1, "removed": []}, line | {"number": 2, "removed": [1]}])
    {'s3://b/exp': {2}}
    """
    there: dict[str, set[int]] = {}
    for line in lines:
        if line.get("event") == "push" and _holds(line, number=int, to=str, removed=list):
            there.setdefault(line["to"], set()).add(line["number"])
            there[line["to"]] -= {number for number in line["removed"] if type(number) is int}
        elif line.get("event") == "pull" and _holds(line, number=int, origin=str):
            there.setdefault(line["origin"], set()).add(line["number"])
    return there


def exists(folder: Path) -> bool:
    """Return whether the run in a folder has a history."""
    return (folder / NAME).exists()


def remote(lines: Sequence[Line]) -> dict[str, str] | None:
    """Return the remote of the last start (`url`) and which checkpoints it pushes; None without one.

    >>> time, where = "2026-07-30T12:00:00+00:00", {"url": "s3://b/exp", "push": "newest"}
    >>> remote([{"event": "start", "attempt": 1, "time": time, "remote": where}])
    {'url': 's3://b/exp', 'push': 'newest'}
    """
    last = next(filter(is_start, reversed(lines)), {})
    found = last.get("remote")
    if isinstance(found, dict) and _holds(found, url=str, push=str):
        return {"url": found["url"], "push": found["push"]}
    return None


def is_save(line: Line) -> bool:
    """Return whether a line is a save, as this library writes it."""
    if line.get("event") != "save" or not _holds(line, number=int, superseded=bool):
        return False
    return {type(line.get("parent", "")), type(line.get("attempt", ""))} <= {int, type(None)}


def abandoned(parents: Mapping[int, int | None], number: int | None, before: Iterable[int]) -> set[int]:
    """Return the saves that are not ancestors of checkpoint `number`.

    Of the saves before one with an unknown parent, those are returned that were abandoned `before`.

    >>> sorted(abandoned({1: None, 2: 1, 3: 1, 4: 3}, 3, before=[2]))
    [2, 4]
    >>> sorted(abandoned({1: None, 2: 1, 5: 4, 6: 5}, 5, before=[1]))
    [1, 6]
    """
    passed: set[int] = set()
    while number is not None and number in parents and number not in passed:
        passed.add(number)
        number = parents[number]
    earlier = {other for other in parents if number is not None and other < number}
    return (parents.keys() - passed - earlier) | (earlier & {*before})


def left_behind(lines: Iterable[Line], here: Mapping[int, int | None], newest: int | None) -> set[int]:
    """Return the saves that are not ancestors of the newest checkpoint; those `here` know their parent.

    >>> left_behind([], {1: None, 2: 1, 3: 1}, newest=3)
    {2}
    """
    saves = [line for line in lines if is_save(line)]
    before = {line["number"] for line in saves if line["superseded"]}
    if newest is None:
        return before
    return abandoned({**{line["number"]: line["parent"] for line in saves}, **here}, newest, before)


_SUMMARY = ("attempt", "time", "host", "pid", "argv", "git", "dirty", "versions", "from")


def is_start(line: Line) -> bool:
    """Return whether a line is a start, as this library writes it."""
    if line.get("event") != "start" or not is_attempt(line.get("attempt")):
        return False
    with contextlib.suppress(ValueError, TypeError):
        return datetime.fromisoformat(line.get("time")).tzinfo is not None  # type: ignore[arg-type]
    return False


def is_attempt(number: Json) -> TypeGuard[int]:
    """Return whether this is the number of a start, as this library writes it."""
    # Longer numbers than Python prints were not written by it.
    return type(number) is int and 0 <= number < 1 << 53


def is_end(line: Line) -> bool:
    """Return whether a line is the end of a start, as this library writes it."""
    return line.get("event") == "end" and _holds(line, attempt=int, how=str)


def is_warning(line: Line) -> bool:
    """Return whether a line is a warning, as this library writes it."""
    return line.get("event") == "warning" and _holds(line, attempt=int, text=str)


def _previous(start: Line) -> Line | None:
    found = start.get("previous")
    return found if isinstance(found, dict) and _holds(found, attempt=int, how=str) else None


def _holds(line: Line, **kinds: type) -> bool:
    return [*map(type, map(line.get, kinds))] == [*kinds.values()]
