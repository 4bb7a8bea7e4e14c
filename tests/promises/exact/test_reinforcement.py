"""Environments, replay buffers and metrics in variables come back, or the loop is told that they do not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import ticked
from forks import Forks
from places import DOCS

from resumable import Run

SCRIPTS = ticked.read("reinforcement.txt")


@pytest.mark.heavy
@pytest.mark.proves("exact")
@pytest.mark.sampled(6)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_loop_of_reinforcement_learning_is_exact_or_told(name: str, tmp_path: Path) -> None:
    ticked.check(name, *SCRIPTS[name], tmp_path)


@pytest.mark.heavy
@pytest.mark.proves("exact")
def test_the_recipe_ends_as_if_it_had_not_been_killed(forks: Forks, tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    page = (DOCS / "recipes" / "reinforcement.md").read_text()
    script, _ = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    ends = []
    for name, at in (("whole", ()), ("killed", (30, 40))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(script)
        life = forks.kill_and_resume("train.py", folder=tmp_path / name, at=at)
        newest = Run(tmp_path / name / "runs/dqn").checkpoints()[-1]
        newest.verify()
        found = [bytes(newest.read()[f"{part}.safetensors"]) for part in ("model", "optimizer")]
        ends.append((life.out.splitlines()[-1], *found))
        assert "ResumableWarning" not in life.err

    assert ends[0] == ends[1]
