"""An index of long runs, in the user's cache: what their manifests and their history said when last read.

It is checked, never believed. A checkpoint counts as known while its manifest and its files have the stamps
of the last time, and a beginning of the history while its bytes have the same hash. Everything else is read
again. Nothing is ever written into a run.
"""

from __future__ import annotations

import binascii
import contextlib
import itertools
import os
import time
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import xxhash

from ..boundary import Boundary
from ..errors import ResumableError
from ..files import disk, jsonl
from ..files.jsonl import Line
from ..files.strict_json import Json
from ..run import history, manifest
from ..run.directory import Run
from ..run.manifest import Manifest
from . import stamps
from .stamps import Look

LONG = 25
"""How many of the newest checkpoints are always opened; a shorter run has no index."""


class Facts(NamedTuple):
    """What a manifest says, as far as a list of checkpoints shows it, and the files of the checkpoint."""

    epoch: int
    batch: int
    step: int
    samples: int
    size: int
    elsewhere: int
    is_first_part: int
    boundary: str
    saved: str
    parent: int | None
    metrics: Mapping[str, Json]
    inodes: Sequence[int]
    sizes: Sequence[int]
    """Those of its files; none if one is missing or has another size."""
    paths: tuple[str, ...]
    """The files, relative to its folder."""


class Saves(NamedTuple):
    """What a history says about saves, and its other lines."""

    parents: Mapping[int, int | None]
    superseded: Collection[int]
    why: Mapping[int, tuple[str | None, Json]]
    """Why each was made, and the interval that its rule had chosen."""
    last: Mapping[int | None, int]
    """The last save of each attempt."""
    others: Sequence[Line]


def facts_of(about: Manifest, files: Mapping[tuple[int, int], int]) -> Facts:
    """Return the facts of a manifest; `files` are the sizes of its files by device and inode."""
    return Facts(
        *(about.epoch, about.batch, about.step, about.samples, about.size, len(about.elsewhere)),
        *(int(about.is_first_part), about.boundary.value, about.saved, about.parent),
        {name: jsonl.plain(value) for name, value in about.metrics.items()},
        [inode for _, inode in files],
        [*files.values()],
        tuple(about.files),
    )


class Index:
    """The index of one run.

    >>> index = Index(Run("runs/exp"))
    >>> index.known(index.look(["000001-step-00000001"]))
    {}
    """

    def __init__(self, run: Run) -> None:
        self._folder = run.folder
        place = os.fsencode(os.path.realpath(run.path))
        self._path = disk.cache() / "index" / f"{xxhash.xxh3_128_hexdigest(place)}.json"
        self._body: dict[str, Any] = {}
        # Anything may stand there: then it is of no use, and the next one takes its place.
        with contextlib.suppress(OSError, ValueError, ResumableError):
            self._body = manifest.unseal(disk.read_small(self._path.parent, self._path.name))
        self._history = _NO_HISTORY
        self._unread, self._is_torn = 0, False

    def look(self, names: Sequence[str]) -> Look:
        """Begin to look whether these checkpoints have changed, in a second process."""
        wanted, files = {*names}, dict[str, tuple[str, ...]]()
        with contextlib.suppress(*_NOT_OURS):
            table = self._body["checkpoints"]
            there = _texts(table["name"])
            files = dict(zip(there, _layouts(table, len(there)), strict=True))
        return Look(self._folder, {name: paths for name, paths in files.items() if name in wanted})

    def known(self, look: Look) -> dict[str, Facts]:
        """Return the facts of those checkpoints that have not changed since they were indexed."""
        known: dict[str, Facts] = {}
        with contextlib.suppress(*_NOT_OURS):
            table = self._body["checkpoints"]
            there = _texts(table["name"])
            stamp = dict(zip(there, _counts(table["stamp"], len(there)), strict=True))
            known = dict(zip(there, _facts(table, len(there)), strict=True))
        seen = look.result()
        return {name: one for name, one in known.items() if seen.get(name) == stamp[name]}

    def saves(self, data: bytes) -> Saves:
        """Return what a history says, of which only the lines after a known beginning are parsed."""
        known = _NO_HISTORY
        with contextlib.suppress(*_NOT_OURS):
            body = self._body["history"]
            if xxhash.xxh3_128_hexdigest(data[: body["length"]]) == body["digest"]:
                known = _unpacked_history(body)
        # A torn last line is removed by the next process that writes.
        self._unread, self._is_torn = len(data) - known.length, data[-1:] not in b"\n"
        self._history = _longer(known, data) if self._unread else known
        return _saves(self._history)

    def update(self, facts: Mapping[str, Facts], read: int) -> None:
        """Write it again, if much had to be `read` that it did not know."""
        if self._is_torn or (read < _WORTH_IT and self._unread < _WORTH_IT * 1000):
            return
        kept = {name: one for name, one in facts.items() if one.sizes and not one.elsewhere}
        top, until = f"{self._folder}{os.sep}", time.time_ns() - _COARSEST_TIME
        each = ((name, stamps.of(top + name, one.paths, until)) for name, one in kept.items())
        seen = {name: stamp for name, stamp in each if stamp != stamps.MISSING}
        # Without a place to write to, the next list takes as long as this one; and so it does if a file holds
        # what fits no index, such as a count of 100 digits.
        with contextlib.suppress(OSError, OverflowError, ValueError, ResumableError):
            table = _table(seen, [facts[name] for name in seen])
            self._path.parent.mkdir(parents=True, exist_ok=True)
            disk.replace(
                self._path, manifest.seal({"checkpoints": table, "history": _packed_history(self._history)})
            )


def _table(seen: Mapping[str, int], rows: Sequence[Facts]) -> dict[str, Json]:
    # Packed: JSON takes ten times as long to read as the rest of the list.
    names = dict.fromkeys(name for facts in rows for name in facts.metrics)
    layouts = {paths: at for at, paths in enumerate(dict.fromkeys(facts.paths for facts in rows))}
    return {
        "name": _joined(seen),
        "stamp": _packed("q", seen.values()),
        **{name: _packed("q", [getattr(facts, name) for facts in rows]) for name in _COUNTS},
        "boundary": _packed("q", [_BOUNDARIES.index(facts.boundary) for facts in rows]),
        "saved": _joined(facts.saved for facts in rows),
        "parent": _packed("q", [_NONE if facts.parent is None else facts.parent for facts in rows]),
        "metrics": {name: _packed_metric([facts.metrics.get(name) for facts in rows]) for name in names},
        "files": _packed("q", [len(facts.inodes) for facts in rows]),
        "inodes": _packed("Q", [inode for facts in rows for inode in facts.inodes]),
        "sizes": _packed("q", [size for facts in rows for size in facts.sizes]),
        "layouts": [[*paths] for paths in layouts],
        "layout": _packed("q", [layouts[facts.paths] for facts in rows]),
    }


def _facts(table: Mapping[str, Any], count: int) -> Iterator[Facts]:
    files = _counts(table["files"], count)
    ends = [*itertools.accumulate(files, initial=0)]
    places = [*map(slice, ends, ends[1:])]
    inodes, sizes = _unpacked("Q", table["inodes"], ends[-1]), _counts(table["sizes"], ends[-1])
    columns = (
        *(_counts(table[name], count) for name in _COUNTS),
        map(_BOUNDARIES.__getitem__, _counts(table["boundary"], count)),
        _texts(table["saved"]),
        (None if parent == _NONE else parent for parent in _counts(table["parent"], count)),
        _metrics(table["metrics"], count),
        map(inodes.__getitem__, places),
        map(sizes.__getitem__, places),
        _layouts(table, count),
    )
    return map(Facts._make, zip(*columns, strict=True))


def _layouts(table: Mapping[str, Any], count: int) -> list[tuple[str, ...]]:
    layouts = [tuple(map(str, paths)) for paths in table["layouts"]]
    return [layouts[at] for at in _counts(table["layout"], count)]


def _packed_metric(values: Sequence[Json]) -> Json:
    # What is no finite number stands beside the numbers.
    odd = [[at, value] for at, value in enumerate(values) if not isinstance(value, float)]
    return {"numbers": _packed("d", [v if isinstance(v, float) else 0.0 for v in values]), "odd": odd}


def _metrics(table: Mapping[str, Any], count: int) -> Iterator[Mapping[str, Json]]:
    columns: dict[str, list[Any]] = {}
    for name, column in table.items():
        columns[name] = _unpacked("d", column["numbers"], count)
        for at, value in column["odd"]:
            columns[name][at] = _ODD[value]
    for row in zip(*columns.values(), strict=True) if columns else itertools.repeat((), count):
        found = dict(zip(columns, row, strict=True))
        yield {name: value for name, value in found.items() if value is not None} if None in row else found


class _History(NamedTuple):
    """A beginning of a history: a column for each field of its saves, and its other lines."""

    number: list[int]
    parent: list[int | None]
    attempt: list[int | None]
    superseded: list[int]
    why: list[str | None]
    interval: list[Json]
    others: list[Line]
    length: int
    digest: str


def _longer(known: _History, data: bytes) -> _History:
    lines = jsonl.parsed(data[known.length :])
    saves = [line for line in lines if history.is_save(line)]
    rest = [line for line in lines if line.get("event") != "save"]
    return _History(
        [*known.number, *(line["number"] for line in saves)],
        [*known.parent, *(line.get("parent") for line in saves)],
        [*known.attempt, *(line.get("attempt") for line in saves)],
        [*known.superseded, *(int(line["superseded"]) for line in saves)],
        [*known.why, *(_if(str, line.get("why")) for line in saves)],
        [*known.interval, *(_if(dict, line.get("interval")) for line in saves)],
        [*known.others, *rest],
        len(data),
        xxhash.xxh3_128_hexdigest(data),
    )


def _if(kind: type, value: Json) -> Any:
    return value if isinstance(value, kind) else None


def _packed_history(found: _History) -> dict[str, Json]:
    words = [*dict.fromkeys(found.why)]
    counts = {
        "number": found.number,
        **{name: [_NONE if n is None else n for n in getattr(found, name)] for name in ("parent", "attempt")},
        "superseded": found.superseded,
        "why": [*map({word: at for at, word in enumerate(words)}.__getitem__, found.why)],
    }
    return {
        **{name: _packed("q", column) for name, column in counts.items()},
        "words": words,
        "interval": [[at, one] for at, one in enumerate(found.interval) if one is not None],
        "others": found.others,
        "length": found.length,
        "digest": found.digest,
    }


def _unpacked_history(body: Mapping[str, Any]) -> _History:
    number = _counts(body["number"])
    count, words = len(number), [word if type(word) is str else None for word in body["words"]]
    parent, attempt = (
        [None if n == _NONE else n for n in _counts(body[key], count)] for key in ("parent", "attempt")
    )
    interval: list[Json] = [None] * count
    for at, one in body["interval"]:
        interval[at] = one
    others = [line for line in body["others"] if type(line) is dict]
    why = [words[at] for at in _counts(body["why"], count)]
    superseded = _counts(body["superseded"], count)
    return _History(
        number, parent, attempt, superseded, why, interval, others, body["length"], body["digest"]
    )


def _saves(found: _History) -> Saves:
    superseded = dict(zip(found.number, found.superseded, strict=True))
    return Saves(
        dict(zip(found.number, found.parent, strict=True)),
        {number for number, is_superseded in superseded.items() if is_superseded},
        dict(zip(found.number, zip(found.why, found.interval, strict=True), strict=True)),
        dict(zip(found.attempt, found.number, strict=True)),
        found.others,
    )


def _packed(kind: str, values: Iterable[Any]) -> str:
    return binascii.b2a_base64(array(kind, values).tobytes(), newline=False).decode()


def _unpacked(kind: str, packed: str, count: int | None = None) -> list[Any]:
    found = array(kind, binascii.a2b_base64(packed))
    if count is not None and len(found) != count:
        raise ValueError(f"{len(found)} values stand where {count} belong")
    return found.tolist()


def _counts(packed: str, count: int | None = None) -> list[int]:
    return _unpacked("q", packed, count)


def _joined(texts: Iterable[str]) -> str:
    # No escapes, which take JSON ten times as long to read.
    return " ".join(texts)


def _texts(joined: str) -> list[str]:
    return joined.split(" ") if joined else []


# Reading this many checkpoints, or kilobytes of a history, takes longer than writing the index.
_WORTH_IT = 100
# The coarsest file systems count time in steps of two seconds.
_COARSEST_TIME = 3_000_000_000
_NONE = -1
_COUNTS = ("epoch", "batch", "step", "samples", "size", "elsewhere", "is_first_part")
_BOUNDARIES = [one.value for one in Boundary]
_ODD = {None: None, "nan": "nan", "inf": "inf", "-inf": "-inf"}
_NO_HISTORY = _History([], [], [], [], [], [], [], 0, "")
# What an index raises that holds something else.
_NOT_OURS = (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError)
