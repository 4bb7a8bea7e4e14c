"""Sums in variables of the script, which a resume in mid-epoch begins from 0 again."""

from __future__ import annotations

import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from resumable import RunState

LOOP = "\nfor x in state.batches():\n    "
NUMBER = (
    f"running, count = 0.0, 0{LOOP}running += step(x).item(); count += 1\nstate.save(loss=running / count)"
)
TENSOR = f"running = torch.zeros(()){LOOP}running += step(x)\nstate.save(loss=running.item())"
LIST = f"losses = []{LOOP}losses.append(step(x).item())\nstate.save(loss=sum(losses))"
TWO = f"a, b = 0.0, 0.0{LOOP}loss = step(x).item(); a += loss; b += loss**2\nstate.save(loss=a, b=b)"
COMPREHENSION = "losses = [step(x).item() for x in state.batches()]\nstate.save(loss=sum(losses))"
MEAN = f"sum = 0.0{LOOP}loss = step(x); sum += loss.item(); state.mean(loss=loss)\nstate.save(**state.means)"
COUNT = f"count, rank = 0, 0{LOOP}step(x); count += 1\nstate.save(loss=float(rank))"
NO_METRIC = f"running = 0.0{LOOP}running += step(x).item()\nstate.save()"


def start(run_dir: Path, body: str, stop: int = -1, scheduler: Any = None) -> list[str]:
    """Run two epochs of this body, or until a save in the batch `stop` of all; return what was warned of."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = {"model": model, "optimizer": optimizer, "loader": DataLoader(torch.ones(4, 1))}  # type: ignore[arg-type]
    parts |= {"scheduler": scheduler(optimizer)} if scheduler else {}
    scope: dict[str, Any] = {"__name__": __name__, "torch": torch}
    exec(f"def main(state, step):\n  for _ in state.epochs(2):\n{textwrap.indent(body, '    ')}", scope)
    with (
        warnings.catch_warnings(record=True) as seen,
        RunState.load(run_dir, progress=False, **parts) as state,
    ):
        warnings.simplefilter("always")

        def step(batch: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch).sum()
            loss.backward()
            optimizer.step()
            if 4 * state.epoch + state.batch == stop:
                state.save().wait()
                raise KeyboardInterrupt
            return loss.detach()

        try:
            scope["main"](state, step)
        except KeyboardInterrupt:
            return []
    return [str(one.message) for one in seen]


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("body", "stops", "told"),
    [
        (NUMBER, (0,), "'running' covers"),
        (NUMBER, (4, 6), "'running' covers"),
        (TENSOR, (0, 1), "'running' covers"),
        (TENSOR, (3,), "'running' covers"),
        (LIST, (2,), "'losses' covers"),
        (LIST, (3,), "'losses' covers"),
        (COMPREHENSION, (0, 1), "the comprehension over the batches covers"),
    ],
)
def test_a_metric_of_a_sum_that_began_again_is_warned_of(
    run_dir: Path, body: str, stops: tuple[int, ...], told: str
) -> None:
    for stop in stops:
        start(run_dir, body, stop)
    (text,) = start(run_dir, body)

    assert f"resumed in the middle, so that {told} only the rest" in text


def test_two_sums_are_warned_of_in_one_sentence(run_dir: Path) -> None:
    start(run_dir, TWO, 1)
    (text,) = start(run_dir, TWO)

    assert "so that 'a', 'b' cover only the rest" in text


def test_a_plateau_that_may_see_the_sum_is_warned_of_too(run_dir: Path) -> None:
    start(run_dir, NO_METRIC, 1, ReduceLROnPlateau)
    (text,) = start(run_dir, NO_METRIC, scheduler=ReduceLROnPlateau)

    assert "so that 'running' covers only the rest" in text


@pytest.mark.parametrize(
    ("body", "stop"), [(MEAN, 1), (COUNT, 1), (NO_METRIC, 1), (NUMBER, 99), (LIST, 99)], ids=str
)
@pytest.mark.quick(2)
def test_a_sum_that_decides_nothing_or_is_whole_is_not_warned_of(run_dir: Path, body: str, stop: int) -> None:
    start(run_dir, body, stop)

    assert start(run_dir, body) == []
