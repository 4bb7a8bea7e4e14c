"""What goes wrong in one process becomes the same named error in all that live, within the timeout."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import Any

import gloo
import pytest
import torch

from resumable import Ranks, ResumableError, Run, RunState, version

TIMEOUT = 4.0


def train(rank: int, run_dir: Path, trouble: str, whom: int, pause: float) -> Any:
    """Make six steps; the fourth brings trouble to one rank, after a first checkpoint that is durable."""
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    it_is_me = rank == whom
    if trouble == "another version" and it_is_me:
        version.__version__ = "0.0.1"
    try:
        with RunState.load(
            run_dir,
            model=model,
            optimizer=optimizer,
            ranks=Ranks(timeout=TIMEOUT),
            keep=2 if trouble == "another argument" and it_is_me else 3,
        ) as state:
            for step in state.steps(8):
                model(torch.ones(3)).sum().backward()
                optimizer.step()
                if step == 1:
                    state.save().wait()
                if step == 3:
                    meet(trouble, it_is_me, state)
                time.sleep(pause)
    except ResumableError as exc:
        return type(exc).__name__, exc.problem
    return "no error", ""


def meet(trouble: str, it_is_me: bool, state: RunState) -> None:
    if trouble == "saves alone":
        if it_is_me:
            state.save()
        return
    if it_is_me:
        if trouble == "raises":
            raise ZeroDivisionError("division by zero")
        if trouble == "is killed":
            gloo.kill_myself()
        if trouble == "is stopped":
            gloo.stop_myself()
        if trouble == "is late":
            time.sleep(2 * TIMEOUT)
        if trouble == "is elsewhere":
            state._position._step_in_hand += 1
        if trouble.endswith("in mid-save"):
            act = gloo.kill_myself if "killed" in trouble else gloo.stop_myself
            # The first flush of a save is that of a file in the stage
            os.fsync = lambda fd: act()  # type: ignore[assignment]
        if trouble == "has a full disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
    handle = state.save()
    if trouble == "has a full disk":
        try:
            handle.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


QUICK = [
    ("saves alone", 0, "RanksDiffer", "rank 0 called save() at step 4"),
    ("saves alone", 1, "RanksDiffer", "rank 1 called save() at step 4"),
    ("is elsewhere", 1, "RanksDiffer", "step 4"),
    ("has a full disk", 0, "SaveFailed", "could not be written"),
    ("has a full disk", 1, "SaveFailed", "could not be written"),
    ("another version", 1, "RanksDiffer", "resumable is"),
    ("another argument", 1, "RanksDiffer", "keep is 3 on rank 0 and 2 on rank 1"),
]
SLOW = [
    (trouble, whom, "RankLost", said)
    for whom in (0, 1)
    for trouble, said in [
        ("raises", "ZeroDivisionError"),
        ("is killed", ""),
        ("is stopped", ""),
        ("is late", "which runs, at epoch 0"),
        ("is killed in mid-save", ""),
        ("is stopped in mid-save", ""),
    ]
]


@pytest.mark.proves("never a hang")
@pytest.mark.parametrize(("trouble", "whom", "kind", "said"), QUICK)
@pytest.mark.quick(8)
@pytest.mark.sampled(3)
def test_all_ranks_raise_the_same_error(
    tmp_path: Path, trouble: str, whom: int, kind: str, said: str
) -> None:
    check(tmp_path, 2, trouble, whom, kind, said)


@pytest.mark.proves("never a hang")
@pytest.mark.heavy
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.nightly), 4])
@pytest.mark.parametrize(("trouble", "whom", "kind", "said"), SLOW)
@pytest.mark.sampled(5)
def test_all_living_ranks_raise_the_same_error(
    tmp_path: Path, size: int, trouble: str, whom: int, kind: str, said: str
) -> None:
    check(tmp_path, size, trouble, whom, kind, said)


def check(tmp_path: Path, size: int, trouble: str, whom: int, kind: str, said: str) -> None:
    run_dir = tmp_path / "run"

    found = gloo.run(size, train, run_dir, trouble, whom, 0.3, folder=tmp_path, limit=12 * TIMEOUT)

    living = {rank: one for rank, one in enumerate(found) if one.value}
    gone = {"raises", "is killed", "is stopped", "is killed in mid-save", "is stopped in mid-save"}
    assert living.keys() == {*range(size)} - ({whom} if trouble in gone else set())
    assert {one.value[0] for one in living.values()} == {kind}
    assert all(said in one.value[1] for one in living.values()), [one.value for one in living.values()]
    assert len({one.value[1] for one in living.values()}) == 1 or not said
    assert all(one.seconds < 3 * TIMEOUT + 3 for one in living.values())
    intact = Run(run_dir).checkpoints()
    for checkpoint in intact:
        checkpoint.verify()
    if kind != "RanksDiffer" or "another" not in trouble:
        assert [checkpoint.about.step for checkpoint in intact][:1] == [2]
        again = gloo.run(size, train, run_dir, "none", 0, 0.0, folder=tmp_path, limit=30)
        assert [one.value for one in again] == [("no error", "")] * size, [one.printed for one in again]
        assert "resumed" in again[0].printed
