"""How far a run has come, and what has become of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..files import lock
from ..files.jsonl import Line
from ..files.strict_json import Json
from ..run import history
from ..run.directory import Run

Row = Mapping[str, Any]


def of(run: Run, lines: Sequence[Line], saves: Sequence[Row], attempts: Sequence[Row]) -> dict[str, Json]:
    """Return the state of a run, the seconds that it was trained, what is done and how much is planned."""
    done, planned = _done(lines, saves), _planned(lines)
    known = [one["seconds"] for one in attempts if one["seconds"] is not None]
    return {
        "state": _state(run, attempts[-1] if attempts else None, done, planned),
        "seconds": sum(known) if known else None,
        "done": done,
        "planned": planned,
    }


def _done(lines: Sequence[Line], saves: Sequence[Row]) -> dict[str, Json] | None:
    ends = (line for line in reversed(lines) if line.get("event") in ("save", "end"))
    last: Row | None = next(ends, None)
    if last is None or last.get("event") == "save" or not _is_place(last):
        last = max(saves, key=lambda save: save["number"], default=None)
    return {key: last[key] for key in _PLACE} if last and _is_place(last) else None


def _planned(lines: Sequence[Line]) -> dict[str, Json] | None:
    last: Line = next((line for line in reversed(lines) if line.get("event") == "loop"), {})
    found = {key: last[key] for key in ("epochs", "steps") if _is_count(last.get(key))}
    return found or None


def is_complete(done: Row | None, planned: Row | None) -> bool:
    """Return whether the outermost loop has done all that it was to do.

    >>> is_complete({"epoch": 3, "batch": 0, "step": 24}, {"epochs": 3})
    True
    """
    if not done or not planned:
        return False
    return all(done[key.removesuffix("s")] >= total for key, total in planned.items())


def _state(run: Run, last: Row | None, done: Row | None, planned: Row | None) -> str:
    if last is None:
        return "unknown" if done else "empty"
    if how := last["ended"]:
        if how in history.CLOSED:
            return "unfinished" if planned and not is_complete(done, planned) else "finished"
        return "stopped" if how.startswith("SIG") or how == "max_time" else "crashed"
    if lock.holder(run.path / ".lock"):
        return "running"
    return "crashed" if last["host"] == _host() else "running or crashed"


def _host() -> str:
    # Imported late: commands that only read answer sooner.
    import socket

    return socket.gethostname()


def _is_place(row: Row) -> bool:
    return all(_is_count(row.get(key)) for key in _PLACE)


def _is_count(value: Json) -> bool:
    return type(value) is int and 0 <= value < 1 << 53


_PLACE = ("epoch", "batch", "step")
