"""The script of docs/integrations/lightning.md, before and after its change."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from places import DOCS
from torch.optim.optimizer import register_optimizer_step_post_hook

pl = pytest.importorskip("lightning.pytorch")

from lightning_training import Stopped, assert_same  # noqa: E402

from resumable import Run  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:.*`tensorboardX` has been removed"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]
PAGE = (DOCS / "integrations" / "lightning.md").read_text()
CHANGE, BEST = (re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.S | re.M)[0] for kind in ("diff", "py"))


def side(sign: str) -> str:
    """Return one side of the change: without the lines that have the sign."""
    return "\n".join(line[1:] for line in CHANGE.splitlines() if not line.startswith(sign))


def trained(script: str, stop: int | None = None) -> dict[str, Any]:
    """Run a script, stopped after so many steps; return its weights."""
    torch.manual_seed(0)
    steps = 0

    def count(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == stop:
            raise Stopped

    hook = register_optimizer_step_post_hook(count)
    names: dict[str, Any] = {"__name__": "script"}
    try:
        exec(compile(script, "script.py", "exec"), names)
    finally:
        hook.remove()
    return dict(names["autoencoder"].state_dict())


def test_the_page_changes_two_lines() -> None:
    assert [line[0] for line in CHANGE.splitlines() if line[:1] in "+-" and line] == ["+", "-", "+"]


@pytest.mark.heavy
def test_the_pages_script_stopped_twice_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain, ours = trained(side("+")), side("-").replace('every="10 min"', "every=3")

    for stop in (7, 19):
        with pytest.raises(Stopped):
            trained(ours, stop)

    assert_same(trained(ours), plain)


@pytest.mark.heavy
def test_the_page_loads_the_best_weights_after_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ours = side("-").replace('every="10 min"', 'every=3, maximize="train_loss", keep=None')

    weights = trained(f"{ours}\n{BEST}")
    checkpoints = [one.about for one in Run("runs/exp").checkpoints()]
    values = {one.number: one.metrics["train_loss"] for one in checkpoints if one.metrics}
    best = max(values, key=lambda number: (values[number], -number))

    assert best != checkpoints[-1].number
    by_number = BEST.replace("runs/exp/best", str(Run("runs/exp").open(best).path))
    assert_same(weights, trained(f"{ours}\n{by_number}"))
    assert not torch.equal(weights["encoder.0.weight"], trained(ours)["encoder.0.weight"])
