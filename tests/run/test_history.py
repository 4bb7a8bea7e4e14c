"""The history of a run: each save is in it once, what was left behind is marked, an end is known or not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forks import Forks

from resumable import Boundary, CannotRead, ResumableWarning, RunState
from resumable.files.large_files import Content
from resumable.run import checkpoint, history
from resumable.run.directory import Run
from resumable.run.history_writer import History
from resumable.run.manifest import Manifest
from resumable.run.policy import Took

HERE = {"host": "node7", "pid": 4711, "boot": "b1"}
ABOUT = Manifest(
    number=0,
    parent=None,
    run_id="a1b2",
    saved="2026-01-01T00:00:00+00:00",
    boundary=Boundary.BATCH,
    epoch=1,
    batch=2,
    step=0,
    samples=64,
    metrics={"loss": 0.5},
    best=None,
    files={},
    parts={},
    built={},
    environment={},
)


def commit(run: Run, number: int, parent: int | None, **facts: Any) -> None:
    about = replace(ABOUT, number=number, parent=parent, step=10 * number, **facts)
    checkpoint.commit(run.folder, about, {"model.safetensors": Content(b"weights %d" % number)})
    run.added(about)


def save(found: History, run: Run, number: int, parent: int | None) -> None:
    commit(run, number, parent)
    found.saved(run.open(number).about, "called")


def superseded(run: Run) -> dict[int, bool]:
    saves = [line for line in history.read(run.path) if history.is_save(line)]
    assert len({line["number"] for line in saves}) == len(saves)
    return {line["number"]: line["superseded"] for line in saves}


def events(run: Run) -> list[str]:
    return [line["event"] for line in history.read(run.path)]


@pytest.fixture
def run(run_dir: Path) -> Iterator[Run]:
    """A run without checkpoints, that is ours."""
    run = Run(run_dir)
    run.acquire()
    yield run
    for number in run.numbers():
        run.open(number).verify()
    run.release()


@pytest.fixture
def trained(run: Run) -> Run:
    """A run whose first process has saved 1, 2 and 3, one after the other, and closed it."""
    found = History(run)
    found.begin(HERE, None)
    for number in (1, 2, 3):
        save(found, run, number, number - 1 or None)
    found.ended("closed", epoch=1, batch=2, step=30)
    return run


def test_a_start_a_save_and_an_end_say_what_happened(run: Run) -> None:
    found = History(run)

    assert found.begin({**HERE, "argv": ["train.py"]}, None) == 1
    commit(run, 1, None, metrics={"loss": float("nan")})
    rule = {"seconds": 84.0, "reason": "1 % of 8400 s"}
    found.saved(run.open(1).about, "every 1 %", interval=rule, took=Took(0.0123456, 1.5, 0.25))
    found.ended("SIGTERM", epoch=1, batch=2, step=10)

    start, saved, end = history.read(run.path)
    assert (start["event"], start["host"], start["argv"]) == ("start", "node7", ["train.py"])
    assert (start["from"], start["previous"]) == (None, None)
    assert saved == {
        **{"event": "save", "attempt": 1, "number": 1, "parent": None, "time": ABOUT.saved},
        **{"epoch": 1, "batch": 2, "step": 10, "samples": 64, "metrics": {"loss": "nan"}, "size": 9},
        **{"why": "every 1 %", "interval": rule, "lost": 0.0123, "durable": 1.5, "held": 0.25},
        "superseded": False,
    }
    assert (end["attempt"], end["how"], end["epoch"], end["batch"], end["step"]) == (1, "SIGTERM", 1, 2, 10)


def test_a_resume_from_the_newest_supersedes_nothing_and_only_appends(trained: Run) -> None:
    path = trained.path / history.NAME
    before, inode = path.read_bytes(), path.stat().st_ino

    for attempt in (2, 3):
        assert History(trained).begin(HERE, 3) == attempt

    assert path.read_bytes().startswith(before)
    assert path.stat().st_ino == inode
    assert superseded(trained) == {1: False, 2: False, 3: False}


def test_a_resume_from_an_older_one_marks_what_came_after_it(trained: Run) -> None:
    found = History(trained)
    found.begin(HERE, 1)
    save(found, trained, 4, 1)
    again = History(trained)
    again.begin(HERE, 4)
    save(again, trained, 5, 4)

    assert superseded(trained) == {1: False, 2: True, 3: True, 4: False, 5: False}
    steps = [line["step"] for line in history.read(trained.path) if line.get("superseded") is False]
    assert steps == [10, 40, 50]


def test_going_back_inside_a_process_marks_and_says_so(run: Run) -> None:
    found = History(run)
    found.begin(HERE, None)
    save(found, run, 1, None)
    save(found, run, 2, 1)
    found.went_back(1, "best")
    save(found, run, 3, 1)

    assert superseded(run) == {1: False, 2: True, 3: False}
    assert events(run) == ["start", "save", "save", "restore", "save"]
    assert (history.read(run.path)[3]["from"], history.read(run.path)[3]["what"]) == (1, "best")


def test_going_back_to_an_abandoned_branch_takes_it_up_again(trained: Run) -> None:
    found = History(trained)
    found.begin(HERE, 2)
    save(found, trained, 4, 2)
    found.went_back(3, "3")

    assert superseded(trained) == {1: False, 2: False, 3: False, 4: True}


def test_a_start_from_another_runs_checkpoint_supersedes_all(trained: Run) -> None:
    History(trained).begin(HERE, None)

    assert superseded(trained) == {1: True, 2: True, 3: True}


def test_the_saves_before_an_unknown_parent_stay_as_they_were(trained: Run) -> None:
    path = trained.path / history.NAME
    lines = [line for line in path.read_text().splitlines() if '"number": 2,' not in line]
    path.write_text("".join(f"{line}\n" for line in lines))
    shutil.rmtree(trained.path_of(2) or "")

    History(trained).begin(HERE, 3)

    assert superseded(trained) == {1: False, 3: False}


def test_a_save_number_that_is_used_again_has_one_line(trained: Run) -> None:
    shutil.rmtree(trained.path_of(3) or "")

    found = History(trained)
    found.begin(HERE, 2)
    save(found, trained, 3, 2)
    assert superseded(trained) == {1: False, 2: False, 3: False}
    found.went_back(2, "2")

    assert superseded(trained) == {1: False, 2: False, 3: True}
    assert [line["attempt"] for line in history.read(trained.path) if line.get("number") == 3] == [2]


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from test_history import *
run = Run({run!r})
run.acquire()
found = History(run)
found.begin(HERE, {came_from})
save(found, run, {number}, {came_from})
commit(run, {number} + 1, {number})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.heavy
def test_a_save_that_a_killed_process_did_not_note_is_added(run: Run, forks: Forks) -> None:
    run.release()
    for number, came_from in ((1, None), (3, 2)):
        place = {"tests": str(Path(__file__).parent), "run": str(run.path)}
        script = KILLED.format(**place, number=number, came_from=came_from)
        life = forks.run(["-c", script], run.path, environment={"PYTHONPATH": os.pathsep.join(sys.path)})
        assert life.code == -signal.SIGKILL, life.err
    run.acquire()
    History(run).begin(HERE, 4)

    assert superseded(run) == {1: False, 2: False, 3: False, 4: False}
    saves = [line for line in history.read(run.path) if line["event"] == "save"]
    assert [(line["attempt"], line["why"]) for line in saves] == [
        (1, "called"),
        (1, None),
        (2, "called"),
        (2, None),
    ]
    assert history.read(run.path)[-1]["previous"]["last"] == 4


def test_a_history_that_is_gone_is_made_again_from_the_checkpoints(trained: Run) -> None:
    (trained.path / history.NAME).unlink()
    next((trained.path_of(2) or trained.path).glob("manifest.json")).write_bytes(b"{}")

    assert History(trained).begin(HERE, 3) == 1

    assert superseded(trained) == {1: False, 3: False}
    assert [line["attempt"] for line in history.read(trained.path)] == [None, None, 1]
    shutil.rmtree(trained.path_of(2) or "")


def test_what_others_wrote_into_it_stays_and_is_not_taken_for_ours(trained: Run) -> None:
    path = trained.path / history.NAME
    strange = [
        {"event": "note", "text": "lr was too high"},
        {"event": "save", "number": "7", "parent": None, "attempt": 1, "superseded": False},
        {"event": "save", "number": 8, "parent": [], "attempt": 1, "superseded": False},
        {"event": "start", "attempt": 9, "time": "yesterday", "previous": 3},
        {"event": "start", "attempt": 9, "time": None},
        {"event": "start", "attempt": "9", "time": "2026-01-01T00:00:00+00:00"},
        {"event": "end", "attempt": 1, "how": None},
    ]
    path.write_text(path.read_text() + "".join(json.dumps(line) + "\n" for line in strange))

    assert History(trained).begin(HERE, 1) == 2

    assert [line for line in history.read(trained.path) if line in strange] == strange
    assert [found["ended"] for found in history.attempts(history.read(trained.path))] == ["closed", None]


@pytest.mark.parametrize(
    ("then", "now", "how"),
    [
        ({}, {}, "killed or crashed (no exit recorded)"),
        ({"boot": None}, {}, "killed or crashed (no exit recorded)"),
        (
            {},
            {"boot": "b2"},
            "killed or crashed (no exit recorded); the machine was started again since, or ",
        ),
        (
            {},
            {"boot": "b2", "host": "node8"},
            "killed or crashed (no exit recorded); it was on node7, the next ",
        ),
    ],
)
def test_a_start_without_an_end(run: Run, then: dict[str, Any], now: dict[str, Any], how: str) -> None:
    save_by_the_first = History(run)
    save_by_the_first.begin({**HERE, **then}, None)
    save(save_by_the_first, run, 1, None)
    History(run).begin({**HERE, **now}, 1)

    previous = history.read(run.path)[-1]["previous"]
    assert (previous["attempt"], previous["last"]) == (1, 1)
    assert previous["how"].startswith(how)
    assert len(previous["how"]) < len(how) + 60


def test_attempts_say_of_each_start_how_it_ended_if_anybody_knows(trained: Run) -> None:
    found = History(trained)
    found.begin(HERE, 3)
    save(found, trained, 4, 3)
    History(trained).begin({**HERE, "pid": 4712}, 4)

    told = history.attempts(history.read(trained.path))

    assert [(one["attempt"], one["pid"], one["from"], one["last"]) for one in told] == [
        (1, 4711, None, 3),
        (2, 4711, 3, 4),
        (3, 4712, 4, None),
    ]
    assert [one["ended"] for one in told] == [
        "closed",
        "killed or crashed (no exit recorded)",
        None,
    ]


def test_an_end_is_noted_once_and_nothing_after_it(run: Run) -> None:
    found = History(run)
    found.begin(HERE, None)
    found.ended("ValueError: " + "x" * 5000)
    found.ended("closed")
    found.went_back(1, "best")
    save(found, run, 1, None)

    assert events(run) == ["start", "end"]
    assert len(history.read(run.path)[-1]["how"]) == 1000


def test_a_checkpoint_that_a_start_cannot_read_is_left_to_the_next_start(run: Run) -> None:
    commit(run, 1, None)
    found = run.open(1).path / "manifest.json"
    found.rename(run.path / "kept")
    History(run).begin(HERE, None)
    assert events(run) == ["start"]

    (run.path / "kept").rename(found)
    History(run).begin(HERE, 1)
    assert superseded(run) == {1: False}


def test_a_history_that_cannot_be_written_loses_nothing(trained: Run) -> None:
    path, aside = trained.path / history.NAME, trained.path / "aside"
    found = History(trained)
    found.begin(HERE, 3)
    path.rename(aside)
    path.mkdir()
    with pytest.warns(ResumableWarning, match=r"history.jsonl cannot be written: Is a directory\. The train"):
        save(found, trained, 4, 3)
    save(found, trained, 5, 4)
    found.went_back(4, "4")
    save(found, trained, 6, 4)
    path.rmdir()
    aside.rename(path)
    found.went_back(2, "2")
    found.ended("closed")

    assert superseded(trained) == {1: False, 2: False, 3: True, 4: True, 5: True, 6: True}
    expected = ["start", *["save"] * 3, "end", "start", "save", "save", "restore", "save", "restore", "end"]
    assert events(trained) == expected


def test_one_that_cannot_be_read_is_left_alone_and_named(run: Run) -> None:
    target = run.path.parent / "elsewhere"
    target.write_bytes(b"")
    (run.path / history.NAME).symlink_to(target)
    found = History(run)

    with pytest.warns(ResumableWarning, match="history.jsonl cannot be read"):
        assert found.begin(HERE, None) is None
    save(found, run, 1, None)
    found.ended("closed")

    assert target.read_bytes() == b""
    with pytest.raises(CannotRead, match="mend the cause, or move the file away"):
        history.read(run.path)


def test_a_circle_of_parents_ends() -> None:
    assert history.abandoned({1: 3, 2: 1, 3: 2, 4: 1}, 3, before=[]) == {4}


# A real run.


def train(run_dir: Path, steps: int) -> None:
    with RunState.load(run_dir, keep=None) as state:
        for step in state.steps(steps):
            state.save()
            if step == 2 and not state.vars:
                state.restore(1)
                state.vars["went back"] = True
        if state.step == 5:
            raise ValueError("boom")


def test_a_training_notes_starts_saves_restores_and_ends(run_dir: Path) -> None:
    train(run_dir, 4)
    with pytest.raises(ValueError, match="boom"):
        train(run_dir, 5)
    train(run_dir, 6)

    run, lines = Run(run_dir), history.read(run_dir)
    assert events(run) == [
        *("start", "loop", "save", "save", "save", "restore", "save", "save", "save", "end"),
        *("start", "loop", "save", "end", "start", "loop", "save", "end"),
    ]
    assert superseded(run) == {number: number in (2, 3) for number in range(1, 9)}
    assert [(one["from"], one["last"], one["ended"]) for one in history.attempts(lines)] == [
        (None, 6, "closed"),
        (6, 7, "ValueError: boom"),
        (7, 8, "closed"),
    ]
    previous = [line["previous"] for line in lines if line["event"] == "start"]
    assert [then and then["how"] for then in previous] == [None, "closed", "ValueError: boom"]
    assert all(line["durable"] > 0 and line["why"] == "called" for line in lines if line["event"] == "save")
    assert [line["from"] for line in lines if line["event"] == "restore"] == [1]
    assert [line["steps"] for line in lines if line["event"] == "loop"] == [4, 5, 6]


def test_what_a_rule_chose_is_noted_with_the_save_and_outlives_the_process(run_dir: Path) -> None:
    for _ in range(2):
        with RunState.load(run_dir, every="1 %") as state:
            for _ in state.steps(state.step + 2):
                state.save()

    chosen = [line["interval"] for line in history.read(run_dir) if line["event"] == "save"]
    assert chosen[0]["reason"].startswith("no save has been measured yet")
    assert [one["reason"].startswith("a save costs ") for one in chosen[2:]] == [True, True]
