"""A start that reads from the last summary on writes the history that one that reads it all writes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resumable import Boundary
from resumable.files.large_files import Content
from resumable.run import checkpoint, history, history_summary
from resumable.run.directory import Run
from resumable.run.history_scan import scan_end
from resumable.run.history_writer import History
from resumable.run.manifest import Manifest
from resumable.run.policy import Took

HERE = {"host": "node7", "pid": 4711, "boot": "b1"}


def about(number: int, parent: int | None) -> Manifest:
    place = {"boundary": Boundary.BATCH, "epoch": 1, "batch": 2, "step": number, "samples": 64}
    empty: dict[str, Any] = {name: {} for name in ("files", "parts", "built", "environment")}
    times = {"run_id": "a1b2", "saved": "2026-01-01T00:00:00+00:00", "best": None, "metrics": {}}
    return Manifest(number=number, parent=parent, **place, **times, **empty)  # type: ignore[arg-type]


def commit(run: Run, number: int, parent: int | None) -> Manifest:
    checkpoint.commit(run.folder, about(number, parent), {"model.safetensors": Content(b"weights")})
    run.added(about(number, parent))
    return run.open(number).about


def save(found: History, run: Run, number: int, parent: int | None) -> None:
    wrote = {"way": "direct", "disk": "sda", "size": number, "seconds": 0.5}
    found.saved(commit(run, number, parent), "called", took=Took(0.25, float(number)), wrote=wrote)


@pytest.fixture
def trained(run_dir: Path) -> Run:
    """A run whose first process has saved 1 to 5, and closed it."""
    run = Run(run_dir)
    run.acquire()
    found = History(run)
    found.begin(HERE, None)
    for number in range(1, 6):
        save(found, run, number, number - 1 or None)
    found.ended("closed", epoch=1, batch=2, step=5)
    return run


def change(run: Run, how: Callable[[list[bytes]], list[bytes]]) -> None:
    path = run.path / history.NAME
    path.write_bytes(b"".join(how(path.read_bytes().splitlines(keepends=True))))


def begun(run: Run, came_from: int | None = 5) -> History:
    found = History(run)
    found.begin(HERE, came_from)
    return found


def without_summaries(run: Run) -> list[dict[str, Any]]:
    lines = history.read(run.path)
    return [{key: line[key] for key in line if key not in ("known", "unknown", "time")} for line in lines]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("highest", value) for value in (-1, "9", 1 << 60)),
        *(("took", [0.1, -1]), ("stands_on", True), ("last", 2.5), ("more", 1)),
    ],
)
def test_a_summary_that_is_not_as_it_is_written_is_not_used(trained: Run, key: str, value: Any) -> None:
    line = history.read(trained.path)[-1]
    line[history_summary.KEY][key] = value
    change(trained, lambda lines: [*lines[:-1], json.dumps(line).encode() + b"\n"])

    assert scan_end(trained.path).before is None or key != "more"
    assert begun(trained).highest == 5


def test_a_summary_of_earlier_versions_is_used(trained: Run) -> None:
    line = history.read(trained.path)[-1]
    line[history_summary.KEY]["skipped"] = [[4, "no rest"]]
    change(trained, lambda lines: [json.dumps(line).encode() + b"\n"])

    assert begun(trained).highest == 5


@pytest.mark.parametrize("seed", range(6))
def test_any_training_writes_the_same_history_without_summaries(tmp_path: Path, seed: int) -> None:
    short, whole = (written(Run(tmp_path / name), seed, name == "short") for name in ("short", "whole"))

    assert without_summaries(short) == without_summaries(whole)


def written(run: Run, seed: int, uses_summaries: bool) -> Run:
    """Return a run after a few processes that save, go back, lose checkpoints, are killed or end."""
    draw, number, at = random.Random(seed), 0, None
    run.acquire()
    for _ in range(8):
        if not uses_summaries and history.exists(run.path):
            change(run, lambda lines: [line.replace(b'"known"', b'"unknown"') for line in lines])
        there = run.numbers()
        at = draw.choice([there[-1], there[-1], at, *there]) if there else None
        at = at if at in there else None
        found = begun(run, at)
        number = max(number, found.highest)
        for what in draw.choices("sssrdl", k=5):
            if what == "s":
                number += 1
                save(found, run, number, at)
                at = number
            elif what == "r" and run.numbers():
                at = draw.choice(run.numbers())
                found.went_back(at, "best")
            elif what == "d" and len(run.numbers()) > 2:
                run.remove(draw.sample(run.numbers()[:-1], 1))
            elif what == "l" and draw.random() < 0.3:
                number += 1
                commit(run, number, at)
                at = number
                break
        else:
            if draw.random() < 0.6:
                found.ended("closed", epoch=1, batch=2, step=number)
    run.release()
    return run
