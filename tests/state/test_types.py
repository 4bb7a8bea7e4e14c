"""What a type checker sees of the public API: mistakes, and the type of the batches."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

SCRIPT = """
import torch
from resumable import Preempt, Ranks, Remote, RunState, Trace

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters())

def train(state: RunState) -> None:
    for _ in state.batches(): pass

with RunState.load("runs/exp", model=model, optimizer=optimizer, resume="best", trace=Trace("a")) as plain:
    train(plain)
with RunState.load("runs/exp", loader=[torch.ones(1)], keep={"newest": 3}, every=["1 %", 500]) as state:
    for batch in state.batches(): reveal_type(batch)
    for number in state.batches([1.0]): reveal_type(number)
"""
MISTAKES = {
    "model=optimizer": "Module",
    "optimizer=model": "Optimizer",
    "every=object()": "every",
    "keep={'newset': 3}": "KeepRules",
    "remote=Remote('s3://b', push='newst')": "Literal['best', 'newest', 'all']",
    "preempt=Preempt(on_preempt='exti')": "Literal['exit', 'raise']",
    "preempt=Preempt(signals=['SIGTREM'])": "'SIGTERM'",
    "ranks=Ranks(write='al')": "Literal['one', 'all']",
    "trace=3": "Trace",
}


@pytest.mark.heavy
def test_mistakes_are_found_and_right_scripts_are_not(tmp_path: Path) -> None:
    calls = "".join(f"RunState.load('runs/exp', {mistake})\n" for mistake in MISTAKES)
    (tmp_path / "script.py").write_text(SCRIPT + calls)

    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env={"MYPYPATH": str(ROOT)}, capture_output=True, text=True)

    first = SCRIPT.count("\n") + 1
    errors = dict(re.findall(r"script\.py:(\d+): error: (.*)", done.stdout))
    assert sorted(map(int, errors)) == [*range(first, first + len(MISTAKES))], done.stdout
    for line, told in enumerate(MISTAKES.values(), first):
        assert told in errors[str(line)]
    assert re.findall(r'Revealed type is "(.*)"', done.stdout) == ["torch._tensor.Tensor", "float"]
