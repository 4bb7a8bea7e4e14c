"""The examples, each killed with SIGKILL twice, resumed, and compared with a run that was never stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from resumable import Run

ROOT = Path(__file__).parent.parent


def start(example: str, run_dir: Path, kill_at: str | None = None) -> None:
    """Run an example; kill it as soon as it prints a line that begins with `kill_at`."""
    command = [sys.executable, str(ROOT / "examples" / example), str(run_dir)]
    # (of two threads on two busy cores one waits for the other most of the time)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as child:
        assert child.stdout
        for line in child.stdout:
            if kill_at and line.startswith(kill_at):
                child.kill()
                return
    assert child.returncode == 0
    assert kill_at is None


def content(run_dir: Path) -> dict[str, bytes]:
    newest = Run(run_dir).checkpoints()[-1]
    # Not ranks/: a script that seeds only torch draws from Python and NumPy as each process likes.
    return {name: bytes(data) for name, data in newest.read().items() if not name.startswith("ranks/")}


@pytest.mark.heavy
@pytest.mark.parametrize("example", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_an_example_that_is_killed_twice_ends_with_the_same_bits(example: str, tmp_path: Path) -> None:
    start(example, tmp_path / "straight")
    start(example, tmp_path / "killed", kill_at="epoch 2")
    start(example, tmp_path / "killed", kill_at="epoch 5")
    start(example, tmp_path / "killed")

    assert content(tmp_path / "killed") == content(tmp_path / "straight")
    for found in Run(tmp_path / "killed").checkpoints():
        found.verify()
