"""Two processes of Lightning's strategy "ddp": stopped by signals, they end with the same bits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT, SUPPORT

pytest.importorskip("lightning.pytorch")

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]


def start(run: str | Path, batch: int = 999, signal: str = "SIGTERM") -> tuple[int, list[str], str]:
    """Start the training; return its exit code, what its ranks end with, and all that it prints."""
    command = [sys.executable, str(SUPPORT / "lightning_processes.py"), str(run), str(batch), signal]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{SUPPORT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=200)
    printed = done.stdout + done.stderr
    return done.returncode, sorted(re.findall(r"rank \d: \w{16}", printed)), printed


def test_two_processes_that_are_stopped_twice_end_with_the_same_bits(run_dir: Path) -> None:
    _, plain, printed = start("none")
    assert len(plain) == 2, printed

    code, ended, printed = start(run_dir, 4, "SIGTERM")
    assert (code, ended) == (143, []), printed
    code, ended, printed = start(run_dir, 5, "SIGKILL")
    assert (code, ended) == (-9, []), printed
    code, ended, printed = start(run_dir)

    assert (code, ended) == (0, plain), printed
