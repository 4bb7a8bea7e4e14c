"""The scripts of the frameworks' pages, killed in processes of their own: they end as those without us."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from places import DOCS, ROOT, SUPPORT

NEEDS = {"accelerate": "accelerate", "fabric": "lightning_fabric", "lightning": "lightning.pytorch"}
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGKILL)
BEGINNING = "import torch\n\ntorch.manual_seed(0)\n"
END = """
import hashlib

model = globals().get("model") or autoencoder
optimizer = globals().get("optimizer") or model.optimizers()
states = [value for state in optimizer.optimizer.state.values() for value in state.values()]
tensors = [*model.state_dict().values(), *states]
print("ends with", hashlib.sha256(b"".join(one.cpu().numpy().tobytes() for one in tensors)).hexdigest())
"""


def side(page: str, without: str) -> str:
    """Return one side of the change that a page begins with, as a script of some steps."""
    text = (DOCS / "integrations" / f"{page}.md").read_text()
    found = re.search(r"^```diff\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert found
    lines = [line[1:] for line in found[1].splitlines() if not line.startswith(without)]
    return BEGINNING + "\n".join(lines).replace('every="10 min"', "every=2") + END


class Starts:
    """Starts a script again and again, each time as a process of its own."""

    def __init__(self, script: str, folder: Path) -> None:
        folder.mkdir()
        (folder / "page.py").write_text(script)
        self._log = folder / "log"
        command = [sys.executable, str(SUPPORT / "forked_starts.py"), str(folder / "page.py")]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": env}
        self._starts: subprocess.Popen[str] = subprocess.Popen(command, cwd=folder, **pipes)  # type: ignore[call-overload]

    def __enter__(self) -> Starts:
        return self

    def __exit__(self, *_: object) -> None:
        self._starts.communicate()

    def start(self, kill: tuple[int, float, int] | None = None) -> int:
        assert self._starts.stdin
        assert self._starts.stdout
        order = {"arguments": [], "environment": {}, "kill": kill, "log": str(self._log)}
        print(json.dumps(order), file=self._starts.stdin, flush=True)
        return int(self._starts.stdout.readline())

    def result(self) -> str:
        assert self.start() == 0, self._log.read_text()
        found = re.search(r"ends with (\w+)", self._log.read_text())
        assert found
        return found[1]


@pytest.mark.heavy
@pytest.mark.parametrize("page", NEEDS)
def test_the_script_of_a_page_that_is_killed_ends_as_the_one_without_us(page: str, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS[page])
    dice = random.Random(page)
    with Starts(side(page, "+"), tmp_path / "plain") as plain:
        expected = plain.result()
    with Starts(side(page, "-"), tmp_path / "left alone") as left_alone:
        assert left_alone.result() == expected
    with Starts(side(page, "-"), tmp_path / "killed") as killed:
        for number in SIGNALS:
            code = killed.start((dice.randint(2, 3), dice.uniform(0, 2), int(number)))
            assert code == (128 + number if number is signal.SIGTERM else -number)
        assert killed.result() == expected
