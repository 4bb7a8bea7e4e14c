"""Two processes of Lightning's strategy "ddp": stopped by signals, they end with the same bits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from forks import Forks, Life
from places import ROOT, SUPPORT

pytest.importorskip("lightning.pytorch")

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]


def start(forks: Forks, run: str | Path, batch: int = 999, name: str = "SIGTERM") -> tuple[Life, list[str]]:
    """Start the training; return how it ended, and what its ranks end with. Rank 1 is a Python of its own."""
    command = [SUPPORT / "lightning_processes.py", run, batch, name]
    environment = {"PYTHONPATH": f"{ROOT}:{SUPPORT}"}
    warm = forks.preload("lightning.pytorch")
    life = warm.run(command, Path.cwd(), environment=environment, deadline=200)
    return life, sorted(re.findall(r"rank \d: \w{16}", life.out))


def test_two_processes_that_are_stopped_twice_end_with_the_same_bits(run_dir: Path, forks: Forks) -> None:
    life, plain = start(forks, "none")
    assert len(plain) == 2, life

    life, ended = start(forks, run_dir, 4, "SIGTERM")
    assert (life.code, ended) == (143, []), life
    life, ended = start(forks, run_dir, 5, "SIGKILL")
    assert (life.code, ended) == (-9, []), life
    life, ended = start(forks, run_dir)

    assert (life.code, ended) == (0, plain), life
