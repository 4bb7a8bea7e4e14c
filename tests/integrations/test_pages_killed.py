"""The scripts of the frameworks' pages, killed in processes of their own: they end as those without us."""

from __future__ import annotations

import random
import re
import signal
from pathlib import Path

import pytest
from forks import Forks, Life, Stop
from places import DOCS

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


def result(life: Life) -> str:
    found = re.search(r"ends with (\w+)", life.checked().out)
    assert found
    return found[1]


@pytest.mark.heavy
@pytest.mark.parametrize("page", NEEDS)
def test_the_script_of_a_page_that_is_killed_ends_as_the_one_without_us(
    page: str, tmp_path: Path, forks: Forks
) -> None:
    pytest.importorskip(NEEDS[page])
    dice = random.Random(page)
    scripts = {"plain": side(page, "+"), "left alone": side(page, "-"), "killed": side(page, "-")}
    for name, script in scripts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "page.py").write_text(script)
    warm = forks.preload(str(tmp_path / "killed" / "page.py"))
    stops = [Stop(dice.randint(2, 3), dice.uniform(0, 0.002), number) for number in SIGNALS]

    for stop in stops:
        life = warm.begin(["page.py"], tmp_path / "killed", stop=stop).ended()
        assert life.code == (128 + stop.signal if stop.signal is signal.SIGTERM else -stop.signal), life.err

    ends = {name: result(warm.run(["page.py"], tmp_path / name)) for name in scripts}
    assert len({*ends.values()}) == 1, ends
