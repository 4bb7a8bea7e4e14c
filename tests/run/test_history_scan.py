"""A start finds in a long history what parsing each line finds, in damaged and hostile lines too."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from resumable import Boundary
from resumable.files import jsonl
from resumable.files.jsonl import Line
from resumable.run import history, history_scan
from resumable.run.directory import Run
from resumable.run.history_scan import Scan, scan
from resumable.run.history_writer import History
from resumable.run.manifest import Manifest
from resumable.run.policy import Took

HERE = {"host": "node7", "pid": 4711, "boot": "b1"}
COUNT = 1000


def about(number: int, parent: int | None) -> Manifest:
    place = {"boundary": Boundary.BATCH, "epoch": 1, "batch": 2, "step": number, "samples": 64}
    empty: dict[str, Any] = {name: {} for name in ("files", "parts", "built", "environment")}
    times = {"run_id": "a1b2", "saved": "2026-01-01T00:00:00+00:00", "best": None}
    metrics = {"loss": 0.5, "acc": -1e-05, "très": float("nan")}
    return Manifest(number=number, parent=parent, metrics=metrics, **place, **times, **empty)  # type: ignore[arg-type]


@pytest.fixture
def run(run_dir: Path) -> Iterator[Run]:
    """A run with a start and a save in its history."""
    run = Run(run_dir)
    run.acquire()
    found = History(run)
    found.begin({**HERE, "allowed": ["model.*"]}, None)
    wrote = {"way": "direct", "disk": 12, "size": 70_000_000, "seconds": 0.31}
    rule = {"seconds": 84.0, "reason": "1 % of 8400 s"}
    found.saved(about(1, None), "every 1 %", interval=rule, took=Took(0.1, 2.5), wrote=wrote)
    yield run
    run.release()


@pytest.fixture
def lines(run: Run) -> list[Line]:
    """The lines of that history, and the saves that follow."""
    known = history.read(run.path)
    saves = [{**known[-1], "number": number, "parent": number - 1} for number in range(2, COUNT + 1)]
    return [*known, *saves]


def joined(lines: list[Line]) -> bytes:
    return b"".join(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in lines)


def parsed(data: bytes) -> Scan:
    found = Scan()
    for line in jsonl.parsed(data):
        found.line(line)
    return found


def same(data: bytes) -> bool:
    found, expected = scan(data), parsed(data)
    starts_and_ends = [one for one in expected.others if history.is_start(one) or history.is_end(one)]
    assert [one for one in found.others if history.is_start(one) or history.is_end(one)] == starts_and_ends
    assert (found.parents, found.superseded, found.last) == (
        expected.parents,
        expected.superseded,
        expected.last,
    )
    assert [*map(json.loads, found.noted)] == [*map(json.loads, expected.noted)]
    kept = [(one.took(), one.warned()) for one in (found, expected)]
    return kept[0] == kept[1]


def test_a_long_history_says_what_parsing_each_line_says(lines: list[Line]) -> None:
    lines[500]["superseded"] = True
    del lines[501]["wrote"]
    lines += [{**lines[0], "attempt": 2}, {**lines[300], "attempt": None}, {**lines[301], "durable": None}]
    lines += [{**lines[302], "durable": 9}, {"event": "end", "attempt": 2, "how": "closed"}]

    found = scan(joined(lines))

    assert same(joined(lines))
    assert (len(found.parents), found.last[1], found.took()) == (COUNT, COUNT, (0.1, 9))
    assert found.superseded == {lines[500]["number"]}


@pytest.mark.parametrize("seed", range(2))
def test_damaged_bytes_are_found_as_by_parsing(lines: list[Line], seed: int) -> None:
    draw, data = random.Random(seed), []
    for text in joined(lines).splitlines():
        at, new = draw.randrange(len(text)), bytes([draw.choice([draw.randrange(256), *b'0"{},:e.\\'])])
        change: Callable[[bytes], bytes] = draw.choice(
            [
                lambda text, at=at, new=new: text[:at] + new + text[at + 1 :],
                lambda text, at=at, new=new: text[:at] + new + text[at:],
                lambda text, at=at: text[:at] + text[at + 1 :],
                lambda text, at=at: text[:at],
                lambda text: text,
            ]
        )
        data.append(change(text))

    assert same(b"\n".join(data))
    assert 0 < len(scan(b"\n".join(data)).parents) < COUNT


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        *((b'"epoch": 1', b'"epoch": 01'), (b'"size": 0', b'"size": 1e999'), (b'"size": 0', b'"size": NaN')),
        *((b'"durable": 2.5', b'"durable": -2.5'), (b'"durable": 2.5', b'"durable": 1e300')),
        (b'"number": 9,', b'"number": 9, "number": 8,'),
        (b'"number": 9,', b'"number": 9000000000000000000000,'),
        (b'"event": "save", "attempt": 1, "number": 9,', b'"event": "s\\u0061ve", "n\\u0075mber": 9,'),
        *((b"every 1 %", b"every \x01 %"), (b"every 1 %", b"every \xed\xa0\x80 %")),
    ],
)
def test_a_hostile_line_is_taken_as_by_parsing(lines: list[Line], old: bytes, new: bytes) -> None:
    texts = joined(lines).split(b"\n")
    at = next(at for at, text in enumerate(texts) if b'"number": 9,' in text)
    texts[-2], texts[at] = texts[at], texts[-2]
    texts[-2] = texts[-2].replace(old, new)
    assert new in texts[-2]

    assert same(b"\n".join(texts))


def test_a_long_history_tells_what_was_allowed(run: Run, lines: list[Line]) -> None:
    (run.path / history.NAME).write_bytes(joined(lines))

    assert history_scan.allowed(run.path) == ["model.*"]


def test_one_that_cannot_be_read_says_nothing_of_what_was_allowed(tmp_path: Path) -> None:
    (tmp_path / history.NAME).mkdir()

    assert history_scan.allowed(tmp_path) == []
