"""scripts/bench sees what has become worse, and keeps quiet about noise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

from benchmarks import compare, quick
from benchmarks.compare import BETTER, MISSING, SAME, WORSE
from benchmarks.goals import GOALS
from benchmarks.scenarios import Result

QUIET = [1.00, 1.01, 0.99, 1.02, 0.98]
NOISY = [1.0, 1.3, 0.7, 1.4, 0.6]
HERE = {"processor": "one of two cores"}


def times(ratios: list[float], factor: float) -> list[float]:
    return [factor * ratio for ratio in ratios]


def run_of(**ratios: list[float]) -> dict[str, Any]:
    return {"ratios": ratios, "errors": {}, "machine": HERE}


@pytest.mark.parametrize(
    ("now", "verdict"),
    [
        (times(QUIET, 1.2), WORSE),
        (times(QUIET, 0.8), BETTER),
        (times(QUIET, 1.04), SAME),
        (times(QUIET, 0.96), SAME),
        (times(NOISY, 1.2), SAME),
        (times(NOISY, 1.8), WORSE),
        ([], MISSING),
    ],
)
def test_only_what_the_noise_does_not_explain_is_reported(now: list[float], verdict: str) -> None:
    (row,) = compare.compare({"load": QUIET}, {"load": now})

    assert row.verdict == verdict


def test_what_is_worse_is_named_and_fails_the_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    stored = run_of(load=QUIET, save=QUIET)

    assert quick.report(stored, run_of(load=QUIET, save=times(QUIET, 1.5))) == 1

    (line,) = [line for line in capsys.readouterr().out.splitlines() if WORSE in line]
    assert line.split()[1:8:2] == ["save", "1.000", "1.500", "5%"]


def test_a_ratio_that_could_not_be_measured_fails_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    now = run_of(save=QUIET) | {"errors": {"resumable": {"load": "OSError: no space left"}}}

    assert quick.report(run_of(load=QUIET, save=QUIET), now) == 1
    shown = capsys.readouterr().out
    assert MISSING in shown
    assert "resumable: load: OSError: no space left" in shown


def result_of(ours: float) -> Result:
    """Return a result in which everything takes 1 s, and `ours` takes of this library."""
    columns = {*("call", "lost", "durable", "load", "tensors_call", "tensors_durable", "tensors_load")}
    columns |= {"parameters_call", "parameters_durable", "parameters_load"}
    setups = ("0 workers, nothing drawn", "0 workers, numbers drawn", "2 workers, numbers drawn")
    start = {"load": [ours], "import": [ours], "import_alone": [ours], "torch": [1.0], "torch_load": [1.0]}
    return Result(
        {"size": 1493, "contenders": ["resumable", "torch.save"]},
        contenders={
            "resumable": {column: [ours] for column in columns},
            "torch.save": {column: [1.0] for column in columns},
        },
        limits={"write: buffered": [1.0], "write: paced": [9.0], "read: 1 thread": [1.0]},
        listing={"load_many": [ours], "load_few": [1.0], "save_many": [ours], "save_few": [1.0]},
        sizes={size: {"resumable": [ours], "write: buffered": [1.0]} for size in ("100", "6000")},
        fresh={"load": [ours], "read: 1 thread": [1.0]},
        batches={
            f"{setup}, {loop}": {"batch": [seconds], "main": [seconds]}
            for setup in setups
            for loop, seconds in {"ours": ours, "plain": 1.0}.items()
        },
        start=dict.fromkeys(("alone", "fresh", "resume"), start),
        busy={"2": {"ratio": [ours]}},
    )


@pytest.mark.parametrize("what", quick.RATIOS)
def test_a_library_that_takes_twice_as_long_is_seen(what: str) -> None:
    before, after = (quick.RATIOS[what](result_of(ours)) for ours in (1.0, 2.0))

    (row,) = compare.compare({what: before}, {what: after})

    assert (row.stored, row.now, row.verdict) == (1.0, 2.0, WORSE)


SPEED = [
    goal
    for goal in GOALS
    if not goal.what.startswith(("peak", "90 %", "torch.load", "training time lost / best"))
]


@pytest.mark.parametrize("goal", SPEED, ids=lambda goal: goal.what)
def test_a_goal_is_missed_by_a_library_that_is_too_slow(goal: Any) -> None:
    fast, slow = (goal.value(result_of(seconds)) for seconds in (0.001, 3.0))

    assert (goal.is_met(fast), goal.is_met(slow)) == (True, False)


RUN = """
from dataclasses import replace
from benchmarks import quick
tiny = replace(quick.SETTINGS, size=1, rounds=1, small=10, checkpoints=3, others=(1,))
quick.main(["--store", "--stored", "stored.json"], tiny)
"""


@pytest.mark.nightly
def test_a_run_measures_every_ratio_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    stored = json.loads((tmp_path / "stored.json").read_text())
    assert stored["errors"] == {}
    # Of so small a state a save may take no time from the training, which is no ratio.
    assert {*quick.RATIOS} - {*stored["ratios"]} <= {"training time lost / torch.save"}
    assert "processor" in stored["machine"]
    assert [path.name for path in tmp_path.iterdir()] == ["stored.json"]
