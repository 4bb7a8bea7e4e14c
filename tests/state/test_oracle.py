"""scripts/oracle lists what is no longer exact."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

SCRIPT = """\
import sys
import torch
from resumable import RunState

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with RunState.load(sys.argv[1], model=model, optimizer=optimizer) as state:
    for _ in state.steps(6):
        optimizer.zero_grad()
        model(torch.randn(3, 2)).square().mean().backward()
        optimizer.step()
print(model.weight.tolist())
"""
NEVER_RESUMES = """
import functools, itertools, os, sys

_load, _runs = sys.modules[__name__].RunState.load, itertools.count()
_lost = functools.wraps(_load)(lambda run, **given: _load(f"{run}-{os.getpid()}-{next(_runs)}", **given))
sys.modules[__name__].RunState.load = _lost
"""


def oracle(*arguments: object) -> tuple[int, str]:
    command = [sys.executable, ROOT / "scripts" / "oracle", "--seeds", "0-1", *arguments]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, done.stdout


@pytest.mark.heavy
def test_the_oracle_finds_no_difference_between_a_version_and_itself(tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(SCRIPT)

    assert oracle(script) == (0, "checkout: 3 exact\noracle, of what is not exact: none\n")


@pytest.mark.heavy
def test_the_oracle_lists_what_a_broken_version_loses(tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(SCRIPT)
    package = shutil.copytree(ROOT / "resumable", tmp_path / "broken" / "resumable")
    with (package / "__init__.py").open("a") as file:
        file.write(NEVER_RESUMES)

    code, printed = oracle(script, "--checkout", tmp_path / "broken")

    assert code == 1
    assert f"{script}: exact, now silent" in printed
    assert "seed 0: exact, now silent" in printed
    assert printed.startswith("checkout: 3 silent\noracle, of what is not exact: 3 exact\n")
