"""The benchmark of saving and loading makes its table; what it measures is no test's business."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

CONTENDERS = ("resumable", "torch.save", "safetensors", "torchsnapshot")


@pytest.mark.nightly
def test_the_table_names_every_contender_and_every_goal(tmp_path: Path) -> None:
    tiny = ["--quick", "--size", "1", "--rounds", "1", "--small", "10", "--sizes", "2"]
    # tests/docs/test_bench_ratios.py has the others.
    tiny += ["--scenarios", "alone", "saves", "lost", "pauses", "frozen", "small", "sizes"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *tiny, "--out", "out", "--only", *CONTENDERS],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out" / "cpu.json").read_text())
    for name in CONTENDERS:
        # One that is not installed is reported with its reason.
        assert f"\n| {name} " in done.stdout or f"\n- {name}: not measured: " in done.stdout
    assert result["contenders"]["resumable"]["exact"] == [1.0]
    assert "resumable" not in result["errors"]
    assert "| until durable / raw write: 100 MB " in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.nightly
def test_the_table_of_several_processes_has_every_figure_and_no_failure(tmp_path: Path) -> None:
    tiny = ["--quick", "--rounds", "1", "--many", "10", "--width", "64", "--wide", "64"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.ranks", *tiny, "--out", "out"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out" / "ranks-cpu.json").read_text())
    assert result["errors"] == {}
    assert result["figures"]["few tensors: messages"]['2 ranks, write="all"']["messages"][0] > 0
    assert "2 ranks, write=" in done.stdout
    assert "not told" not in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
