"""A script with a Trainer, killed and started again: what it ends with, without and with `resume`."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from forks import Forks, Life, Stop
from places import ROOT, SUPPORT

pytest.importorskip("transformers")

SCRIPT = SUPPORT / "killed_trainer.py"
STEPS = 30


class Script:
    """Starts the script, each time in a process of its own."""

    def __init__(self, folder: Path, forks: Forks) -> None:
        self._folder, self._forks = folder, forks.preload(str(SCRIPT))

    def start(self, name: str, way: str, stop: Stop | None = None) -> Life:
        (self._folder / name).mkdir(exist_ok=True)
        command = [SCRIPT, self._folder / name, way]
        environment = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(SUPPORT)])}
        return self._forks.begin(command, self._folder, environment=environment, stop=stop).ended()

    def result(self, name: str, way: str) -> Any:
        self.start(name, way).checked()
        return json.loads((self._folder / name / "result.json").read_text())


@pytest.fixture
def script(tmp_path: Path, forks: Forks) -> Script:
    return Script(tmp_path, forks)


@pytest.mark.heavy
@pytest.mark.parametrize("seed", [0, 1])
def test_a_killed_trainer_ends_as_the_script_without_resume_does(script: Script, seed: int) -> None:
    dice = random.Random(seed)
    for number in (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        stop = Stop(dice.randint(4, 6), dice.uniform(0, 0.02), number)
        life = script.start("killed", "resumed", stop)
        assert life.code == (128 + number if number is signal.SIGTERM else -number), life.err

    plain = script.result("plain", "plain")
    assert script.result("killed", "resumed") == plain
    assert script.result("left alone", "resumed") == plain
    assert plain["counted"][0] == STEPS
