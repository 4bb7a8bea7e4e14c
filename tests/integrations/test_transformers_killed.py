"""A script with a Trainer, killed and started again: what it ends with, without and with `resume`."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from places import ROOT, SUPPORT

pytest.importorskip("transformers")

STEPS = 30


class Script:
    """Starts the script, each time in a process of its own."""

    def __init__(self, folder: Path, starts: subprocess.Popen[str]) -> None:
        self._folder, self._starts = folder, starts

    def start(self, name: str, way: str, kill: tuple[int, float, int] | None = None) -> int:
        (self._folder / name).mkdir(exist_ok=True)
        order: dict[str, Any] = {"arguments": [str(self._folder / name), way], "environment": {}}
        order |= {"kill": kill, "log": str(self._folder / "log")}
        assert self._starts.stdin
        assert self._starts.stdout
        print(json.dumps(order), file=self._starts.stdin, flush=True)
        return int(self._starts.stdout.readline())

    def result(self, name: str, way: str) -> Any:
        assert self.start(name, way) == 0, (self._folder / "log").read_text()
        return json.loads((self._folder / name / "result.json").read_text())


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    command = [sys.executable, str(SUPPORT / "forked_starts.py"), str(SUPPORT / "killed_trainer.py")]
    paths = os.pathsep.join([str(ROOT), str(SUPPORT)])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": env}
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as starts:  # type: ignore[call-overload]
        yield Script(tmp_path, starts)


@pytest.mark.heavy
@pytest.mark.parametrize("seed", [0, 1])
def test_a_killed_trainer_ends_as_the_script_without_resume_does(script: Script, seed: int) -> None:
    dice = random.Random(seed)
    for number in (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        kill = (dice.randint(4, 6), dice.uniform(0, 20), int(number))
        code = 128 + number if number is signal.SIGTERM else -number
        assert script.start("killed", "resumed", kill) == code

    plain = script.result("plain", "plain")
    assert script.result("killed", "resumed") == plain
    assert script.result("left alone", "resumed") == plain
    assert plain["counted"][0] == STEPS
