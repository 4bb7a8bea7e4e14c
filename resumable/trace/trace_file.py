"""Trace files: the records of two trainings' boundaries, written, read and compared."""

from __future__ import annotations

import json
import os
import re
import stat
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import FormatTooNew, UsageError
from ..files import jsonl
from ..files.strict_json import Json

FORMAT = 1
RANDOM = "random"
"""The part with the process's random generators, by name."""
CLOSED = "closed"
"""The reason of a record at the end of a training."""
_HEAD = '{"at":'
_PIECE = 1 << 16
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class At(NamedTuple):
    """A boundary: its counters are equal in two trainings that do the same."""

    kind: str
    """What has ended: "batch", "step" or "epoch"; "outside" if none of our loops was running."""
    epoch: int
    batch: int
    step: int

    def __str__(self) -> str:
        if self.kind not in ("batch", "epoch"):
            return f"step {self.step}"
        place = f"epoch {self.epoch}" + (f", batch {self.batch}" if self.kind == "batch" else "")
        return f"step {self.step} ({place})"


@dataclass(frozen=True, slots=True)
class Record:
    """The record of one boundary."""

    at: At
    why: str
    """"boundary"; "start" or "resumed" where a process begins, and "first" at its first batch; "restored"
    where the training went back; "closed" at its end."""
    batches: Sequence[str] = ()
    """Hashes of the batches that were handed out since the last record."""
    noted: Mapping[str, Json] = field(default_factory=dict)
    """Values that the script has noted since, such as the loss."""
    parts: Mapping[str, Json] = field(default_factory=dict)
    """By part: its hash, or each of its values and tensors by name."""
    more: Mapping[str, Any] = field(default_factory=dict)


class Difference(NamedTuple):
    """A value that differs at one boundary."""

    at: At
    part: str
    """The part, or "batches" or "noted"."""
    name: str
    before: Json
    after: Json


def to_line(record: Record) -> str:
    """Return the record as one line of JSON."""
    kind, epoch, batch, step = record.at
    # By hand, which is faster: this is done at every boundary.
    place = f'"kind":"{kind}","epoch":{epoch},"batch":{batch},"step":{step}'
    batches = ',"batches":["' + '","'.join(record.batches) + '"]' if record.batches else ""
    rest = {"noted": record.noted, "parts": record.parts, **record.more}
    more = "".join(f',"{key}":{_text(value)}' for key, value in rest.items() if value)
    return f'{_HEAD}{{{place}}},"why":"{record.why}"{batches}{more}}}'


def _text(value: Any) -> str:
    try:
        return _encode(value)
    except ValueError:
        # JSON has no nan and no infinities.
        return _encode(jsonl.plain(value))


def open_to_add(path: Path) -> int:
    """Open a trace to append lines, and create it if necessary; an incomplete last line is removed."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # NONBLOCK: a pipe without a reader must not hang the training.
        fd = os.open(path, flags, 0o666)
    except OSError as exc:
        raise UsageError(
            f"the trace {path} cannot be written: {exc.strerror or exc}.",
            fix="give the path of a file in a folder that can be written.",
        ) from exc
    try:
        _refuse_others(path, fd)
        os.ftruncate(fd, _end_of_lines(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _refuse_others(path: Path, fd: int) -> None:
    head = _HEAD.encode()
    is_file = stat.S_ISREG(os.fstat(fd).st_mode)
    if not is_file or not head.startswith(os.pread(fd, len(head), 0)):
        raise UsageError(
            f"{path} is {'a file' if is_file else 'no file, or one'} with something else than a trace.",
            fix="give the path of a trace, or of a file that is not there yet.",
        )


def _end_of_lines(fd: int) -> int:
    """Return where the last whole line ends."""
    end = os.fstat(fd).st_size
    while end:
        begin = max(0, end - _PIECE)
        found = os.pread(fd, end - begin, begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0


def read(path: str | Path) -> list[Record]:
    """Return the records of a trace, in the order of the training; an incomplete line is ignored.

    A fresh start drops the records before it. A resume or a restore drops those of the boundaries that the
    training then repeats.
    """
    records: list[Record] = []
    for number, line in enumerate(_lines(path), 1):
        record = _record(path, number, line)
        if record.why == "start":
            records = []
        elif record.why in ("resumed", "restored"):
            # Only from the end: a loop over other data may count its batches from 0 again.
            while records and _is_beyond(records[-1].at, record.at):
                records.pop()
        records.append(record)
    return records


def begins(path: str | Path) -> list[str]:
    """Return how each process that wrote the trace began: "start" or "resumed"."""
    return [found[1] for line in _lines(path) if (found := _BEGINS.search(line, 0, _NEAR))]


BEGIN = ("start", "resumed")
_BEGINS = re.compile(rf'"why":"({"|".join(BEGIN)})"')
_NEAR = 200


def _is_beyond(at: At, begun: At) -> bool:
    # Outside of our loops, the batch is not known.
    is_known = begun.kind != "outside"
    return (at.step, at.epoch, at.batch * is_known) > (begun.step, begun.epoch, begun.batch)


def _lines(path: str | Path) -> Iterator[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.endswith("\n"):
                    yield line
    except OSError as exc:
        raise UsageError(
            f"{path} cannot be read: {exc.strerror or exc}.",
            fix="give the path of a trace, which RunState.load(..., trace=PATH) writes.",
        ) from exc


def _record(path: str | Path, number: int, line: str) -> Record:
    try:
        found = json.loads(line)
        at = At(**found.pop("at"))
        about = {key: found.pop(key) for key in ("why", "batches", "noted", "parts") if key in found}
        record = Record(at, **about, more=found)
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        raise UsageError(
            f"{path}: line {number} is no record of a trace.",
            fix="give a file that RunState.load(..., trace=PATH) has written.",
        ) from exc
    if found.get("format", FORMAT) != FORMAT:
        raise FormatTooNew(
            f"{path} is a trace of format {found['format']}; this version of resumable reads {FORMAT}.",
            fix="upgrade resumable, in the way that you installed it.",
        )
    return record


def differences(one: Record, other: Record) -> list[Difference]:
    """Return the differences of two records of one boundary, in the order in which a training meets them.

    A value that only one of them has is not compared.
    """
    return [*_differences(one, other)]


def _differences(one: Record, other: Record) -> Iterator[Difference]:
    if one.batches != other.batches:
        yield Difference(one.at, "batches", "", [*one.batches], [*other.batches])
    yield from _unequal(one.at, "noted", one.noted, other.noted)
    for part in one.parts:
        then, now = one.parts[part], other.parts.get(part)
        if isinstance(then, dict) and isinstance(now, dict):
            yield from _unequal(one.at, part, then, now, is_whole=True)
        elif now is not None and _is_other(then, now):
            yield Difference(one.at, part, "", then, now)


def _unequal(
    at: At, part: str, one: Mapping[str, Json], other: Mapping[str, Json], *, is_whole: bool = False
) -> Iterator[Difference]:
    for name in dict.fromkeys([*one, *other]) if is_whole else one.keys() & other.keys():
        if _is_other(one.get(name), other.get(name)):
            yield Difference(at, part, name, one.get(name), other.get(name))


def _is_other(one: Json, other: Json) -> bool:
    # As JSON: in Python 1 equals True, and nan does not equal itself.
    return one is not other and json.dumps(_known(one), sort_keys=True) != json.dumps(
        _known(other), sort_keys=True
    )


def _known(value: Json) -> Json:
    # The place of a tensor's sample in its file is no difference.
    return {k: v for k, v in value.items() if k != "sample"} if isinstance(value, dict) else value


def first_difference(one: Sequence[Record], other: Sequence[Record]) -> list[Difference]:
    """Return the differences at the first boundary at which two trainings differ, if there is one."""
    return next((found for pair in pairs(one, other) if (found := differences(*pair))), [])


def pairs(one: Sequence[Record], other: Sequence[Record]) -> Iterator[tuple[Record, Record]]:
    """Yield the two records of each boundary that both trainings have reached."""
    there: dict[object, deque[Record]] = {}
    for record in other:
        there.setdefault((record.at, record.why), deque()).append(record)
    for record in one:
        # Two loops over different data in one epoch have equal counters: then the order decides.
        if met := there.get((record.at, record.why)):
            yield record, met.popleft()


def path_of(given: str | os.PathLike[str], rank: int) -> Path:
    """Return the path of a rank's trace: those of other ranks are beside rank 0's."""
    path = Path(given)
    return path if not rank else path.with_name(f"{path.stem}-rank{rank:05}{path.suffix}")
