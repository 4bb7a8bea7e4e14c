"""`resumable demo`, as a new user runs it, and what it would say if the two runs were not equal."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from resumable import Run
from resumable.cli import demo
from resumable.cli.app import main


@pytest.mark.nightly  # CI runs the demo itself
def test_the_demo_is_killed_twice_in_mid_epoch_and_ends_with_equal_digests(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "resumable", "demo", "--dir", "demo"]

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
    first, second = re.findall(r"digest ([0-9a-f]{32})", done.stdout)
    assert first == second
    assert re.findall(r"killed \(SIGKILL\) at step (\d+)", done.stdout) == ["29", "44"]
    # A line may be broken at each space.
    told = " ".join(done.stdout.split())
    assert len(re.findall(r"resumed \S+ from checkpoint \d+: epoch \d, batch \d+/16", told)) == 2
    for name in ("straight", "killed"):
        for found in Run(tmp_path / "demo" / name).checkpoints():
            found.verify()


def test_the_demo_says_so_when_the_digests_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    digests = iter(["a", None, None, "b"])
    monkeypatch.setattr(demo, "_start", lambda *_, **__: next(digests))

    assert main(["demo"]) == 1
    assert "NOT equal" in capsys.readouterr().out


def test_the_demo_prints_json_alone_on_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    digests = iter(["a", None, None, "a"])
    monkeypatch.setattr(demo, "_start", lambda *_, **__: next(digests))

    assert main(["demo", "--json"]) == 0

    told = capsys.readouterr()
    assert json.loads(told.out) == {"straight": "a", "killed": "a", "equal": True, "dir": None}
    assert "never stopped" in told.err
