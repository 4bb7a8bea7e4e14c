"""The pages of the frameworks with loops of the script's own: both sides of each change end alike."""

from __future__ import annotations

import gc
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from places import DOCS
from torch.optim.optimizer import register_optimizer_step_post_hook

PAGES = {"accelerate": "accelerate", "fabric": "lightning_fabric"}


def change(page: str) -> list[str]:
    """Return the lines of the change that a page begins with."""
    text = (DOCS / "integrations" / f"{page}.md").read_text()
    found = re.search(r"^```diff\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert found
    return found[1].splitlines()


def side(page: str, without: str) -> str:
    return "\n".join(line[1:] for line in change(page) if not line.startswith(without))


class Stopped(Exception):
    """What ends a training in the middle of a batch."""


def weights(script: str, steps: int | None = None) -> list[torch.Tensor]:
    """Run a script, to its end or until an optimizer has stepped so often; return the weights."""
    done, names = 0, dict[str, Any]()

    def count(*_: object) -> None:
        nonlocal done
        done += 1
        if done == steps:
            raise Stopped

    hook = register_optimizer_step_post_hook(count)
    try:
        with suppress(Stopped):
            exec(compile(script, "page", "exec"), names)
        return [weight.detach().clone() for weight in names["model"].parameters()]
    finally:
        hook.remove()
        names.clear()
        gc.collect()


@pytest.fixture(autouse=True)
def _one_accelerator() -> Any:
    states = pytest.importorskip("accelerate").state
    yield
    states.AcceleratorState._reset_state(True)
    states.GradientState._reset_state()


@pytest.mark.quick(2)
@pytest.mark.parametrize("page", PAGES)
def test_both_sides_of_a_change_end_alike_though_one_is_stopped_twice(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(PAGES[page])
    monkeypatch.chdir(tmp_path)
    plain = weights(side(page, "+"))
    for steps in (5, 4):
        weights(side(page, "-"), steps)
    resumed = weights(side(page, "-"))

    assert all(map(torch.equal, resumed, plain))


@pytest.mark.parametrize("page", PAGES)
def test_a_pages_change_is_two_changed_lines_and_two_new_ones(page: str) -> None:
    signs = [line[0] for line in change(page)]

    assert (signs.count("-"), signs.count("+")) == (2, 4)
