"""A run as a whole, as JSON: its saves, what happened to it, and what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..errors import CannotRead, CheckpointDamaged, CheckpointNotFound, FormatTooNew
from ..files.jsonl import Line, plain
from ..files.strict_json import Json
from ..run import checkpoint, history, policy
from ..run.checkpoint import Checkpoint
from ..run.directory import Run
from ..run.manifest import Manifest
from . import standing
from .trees import described

Row = dict[str, Any]
Verify = Callable[[Checkpoint], None]
"""Raises CheckpointDamaged."""


def overview(run: Run, verify: Verify | None = None) -> dict[str, Json]:
    """Return all facts about a run; `verify` checks each checkpoint, otherwise only file sizes are checked.

    Every save has what the history says about it; those that were kept also have what is on the disk.

    >>> found = overview(Run("runs/none"))
    >>> found["saves"], found["newest"], found["problem"]
    ([], None, None)
    """
    lines, problem = history_of(run)
    here = kept(run, verify)
    newest = next((one.about for one in reversed(here) if one.about and not one.problem), None)
    remote = history.remote(lines)
    saves, attempts = _saves(here, lines, newest, remote), _attempts(lines, here)
    stands = standing.of(run, lines, saves, attempts)
    events = [*_events(lines, saves), *_unrecorded_end(str(stands["state"]), saves, attempts)]
    best = newest and newest.best
    found = {
        "run": str(run),
        "run_id": newest and newest.run_id,
        "checked": "bytes" if verify else "sizes",
        "problem": problem and problem.problem,
        "newest": newest and newest.number,
        "best": best and best.number,
        "goal": best and {"metric": best.goal.metric, "maximize": best.goal.maximize, "value": best.value},
        "size": sum({key: size for one in here for key, size in one.files.items()}.values()),
        "size_unshared": sum(size for one in here for size in one.files.values()),
        "remote": remote,
        "saves": saves,
        "events": sorted(events, key=lambda event: event["time"] or ""),
        "attempts": attempts,
        **stands,
    }
    return {key: plain(value) for key, value in found.items()}


class Kept:
    """A checkpoint on the disk: its manifest and its files, and what is wrong with them."""

    def __init__(self, run: Run, number: int, verify: Verify | None = None) -> None:
        self.number = number
        self.path: str | None = None
        self.about: Manifest | None = None
        self.problem: str | None = None
        self.files: dict[tuple[int, int], int] = {}
        """Their sizes; empty if one is missing or has another size."""
        self.own = 0
        """The bytes of the files that no other checkpoint of the run has."""
        try:
            found = run.open(number)
            self.path, self.about = str(found.path), found.about
            self.files = {checkpoint.identity(one): one.st_size for one in found.look().values()}
            if verify:
                verify(found)
        except (CheckpointDamaged, CheckpointNotFound, FormatTooNew) as exc:
            self.problem = exc.problem


def kept(run: Run, verify: Verify | None = None) -> list[Kept]:
    """Return the checkpoints on the disk, oldest first."""
    each = (Kept(run, number, verify) for number in run.numbers())
    # One that is missing may have been pruned meanwhile by the training.
    found = [one for one in each if not one.problem or run.path_of(one.number)]
    links = Counter(key for one in found for key in one.files)
    for one in found:
        one.own = sum(size for key, size in one.files.items() if links[key] == 1)
    return found


def history_of(run: Run) -> tuple[list[Line], CannotRead | None]:
    """Return the lines of the history, and why it cannot be read."""
    try:
        return history.read(run.path), None
    except CannotRead as exc:
        # The checkpoints can be read without it.
        return [], exc


def _saves(
    here: Sequence[Kept], lines: Sequence[Line], newest: Manifest | None, remote: Mapping[str, str] | None
) -> list[Row]:
    rows = {line["number"]: _of_history(line) for line in lines if history.is_save(line)}
    there = history.pushed(lines).get(remote["url"], set()) if remote else set()
    for one in here:
        row = rows.get(one.number) or _of_history({"number": one.number})
        known = {"here": True, "own": one.own if one.files else None, "problem": one.problem}
        rows[one.number] = row | _of_manifest(one.about) | known
    parents = {number: row["parent"] for number, row in rows.items()}
    left = history.left_behind(lines, parents, newest.number if newest else None)
    for number, row in rows.items():
        row["abandoned"], row["pushed"] = number in left, number in there
    return [rows[number] for number in sorted(rows)]


def _of_history(line: Line) -> Row:
    """Return what the history says about a save; a line may hold anything."""
    metrics = line.get("metrics")
    values = metrics.items() if isinstance(metrics, dict) else ()
    return {
        "number": line["number"],
        "parent": line.get("parent"),
        "attempt": line.get("attempt"),
        "time": _text(line.get("time")),
        **{key: _count(line.get(key)) for key in ("epoch", "batch", "step", "samples", "size")},
        "metrics": {name: value for name, value in values if _is_number(value)},
        "why": _text(line.get("why")),
        "held": _seconds(line.get("held")),
        "durable": _seconds(line.get("durable")),
        "here": False,
        "own": None,
        "problem": None,
    }


def _of_manifest(about: Manifest | None) -> Row:
    if about is None:
        return {}
    return {
        "parent": about.parent,
        "time": about.saved,
        "epoch": about.epoch,
        "batch": about.batch,
        "step": about.step,
        "samples": about.samples,
        "size": about.size,
        "metrics": dict(about.metrics),
    }


def _events(lines: Sequence[Line], saves: Sequence[Row]) -> Iterator[Row]:
    """Yield what happened to the training between its saves, each with its position then."""
    at = {row["number"]: row for row in saves}
    words = {attempt["attempt"]: attempt for attempt in history.attempts(lines)}
    for line in lines:
        event, attempt = line.get("event"), line.get("attempt")
        came_from = line.get("from")
        who = {"attempt": attempt, "time": _text(line.get("time"))}
        if event == "start" and attempt in words and type(came_from) is int:
            # Only this line may know how the attempt before ended.
            yield {
                "kind": "resume",
                **who,
                "number": came_from,
                **_place(at.get(came_from, {})),
                "how": None,
            }
        elif event == "restore" and type(came_from) is int:
            yield {"kind": "back", **who, "number": came_from, **_place(at.get(came_from, {})), "how": None}
        elif event == "end" and attempt in words:
            yield from _end(_text(line.get("how")), who, None, line)
    said = {line.get("attempt") for line in lines if line.get("event") == "end"}
    for attempt, word in words.items():
        if attempt not in said and word["ended"]:
            last = at.get(word["last"], {})
            who = {"attempt": attempt, "time": last.get("time")}
            yield from _end(word["ended"], who, word["last"], last)


def _unrecorded_end(state: str, saves: Sequence[Row], attempts: Sequence[Row]) -> Iterator[Row]:
    """Yield the end of the last attempt, if it was killed or has crashed and no later one says so."""
    if state == "crashed" and not attempts[-1]["ended"]:
        last = next((save for save in saves if save["number"] == attempts[-1]["last"]), {})
        who = {"attempt": attempts[-1]["attempt"], "time": last.get("time") or _text(attempts[-1]["time"])}
        yield from _end(history.NO_EXIT, who, attempts[-1]["last"], last)


def _end(how: str | None, who: Row, number: int | None, place: Mapping[str, Any]) -> Iterator[Row]:
    if how and how not in history.CLOSED:
        kind = "preempted" if how.startswith("SIG") or how == "max_time" else "failed"
        yield {"kind": kind, **who, "number": number, **_place(place), "how": how}


def _place(row: Mapping[str, Any]) -> Row:
    return {key: _count(row.get(key)) for key in ("epoch", "batch", "step")}


def _attempts(lines: Sequence[Line], here: Sequence[Kept]) -> list[Row]:
    starts = {line["attempt"]: line for line in lines if line.get("event") == "start" and "attempt" in line}
    owner = {line["number"]: line.get("attempt") for line in lines if history.is_save(line)}
    environments = {owner.get(one.number): one.about.environment for one in here if one.about}
    times: dict[Any, list[float]] = {}
    for line in lines:
        then = policy.moment(line["time"]) if isinstance(line.get("time"), str) else None
        times.setdefault(line.get("attempt"), []).extend([then] if then is not None else [])
    found: list[Row] = []
    for about in history.attempts(lines):
        number = about["attempt"]
        changed = starts[number].get("changed")
        more = {
            "saves": sum(attempt == number for attempt in owner.values()),
            "seconds": max(times[number]) - min(times[number]) if times.get(number) else None,
            "environment": dict(environments[number]) if number in environments else None,
            "changed": [row for row in changed if isinstance(row, dict)] if isinstance(changed, list) else [],
            "settings": _settings(starts[number].get("settings")),
        }
        found.append(about | more)
    return found


def _settings(told: Json) -> dict[str, str] | None:
    if not isinstance(told, dict):
        return None
    return {name: value if isinstance(value, str) else described(value) for name, value in told.items()}


def _text(value: Json) -> str | None:
    return value if isinstance(value, str) else None


def _count(value: Json) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 53 else None


def _seconds(value: Json) -> float | None:
    return value if _is_number(value) and not isinstance(value, str) and value >= 0 else None


def _is_number(value: Json) -> bool:
    return (type(value) in (int, float) and abs(value) < 1e300) or value in ("nan", "inf", "-inf")
