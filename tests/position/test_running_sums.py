"""Sums in variables of the script, which a resume in mid-epoch begins from 0 again."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from resumable import RunState

Script = Callable[[RunState, Callable[[Any], torch.Tensor]], None]


def floats(state: RunState, step: Callable[[Any], torch.Tensor]) -> None:
    for _ in state.epochs(2):
        running, count = 0.0, 0
        for batch in state.batches():
            running += step(batch).item()
            count += 1
        state.save(loss=running / count)


def tensors(state: RunState, step: Callable[[Any], torch.Tensor]) -> None:
    for _ in state.epochs(2):
        running = torch.zeros(())
        for batch in state.batches():
            running += step(batch)
        state.save(loss=running.item())


def lists(state: RunState, step: Callable[[Any], torch.Tensor]) -> None:
    for _ in state.epochs(2):
        losses: list[float] = []
        for batch in state.batches():
            losses.append(step(batch).item())
        state.save(loss=sum(losses))


def two(state: RunState, step: Callable[[Any], torch.Tensor]) -> None:
    for _ in state.epochs(2):
        running, squares = 0.0, 0.0
        for batch in state.batches():
            loss = step(batch).item()
            running += loss
            squares += loss**2
        state.save(loss=running, squares=squares)


def comprehension(state: RunState, step: Callable[[Any], torch.Tensor]) -> None:
    for _ in state.epochs(2):
        losses = [step(batch).item() for batch in state.batches()]
        state.save(loss=sum(losses))


def means(state: RunState, step: Callable[[Any], torch.Tensor]) -> None:
    for _ in state.epochs(2):
        running = 0.0
        for batch in state.batches():
            loss = step(batch)
            running += loss.item()
            state.mean(loss=loss)
        state.save(**state.means)


def counter(state: RunState, step: Callable[[Any], torch.Tensor]) -> None:
    for _ in state.epochs(2):
        count, rank = 0, 0
        for batch in state.batches():
            step(batch)
            count += 1  # noqa: SIM113
        state.save(loss=float(rank))


def no_metric(state: RunState, step: Callable[[Any], torch.Tensor]) -> None:
    for _ in state.epochs(2):
        running = 0.0
        for batch in state.batches():
            running += step(batch).item()
        state.save()


def start(run_dir: Path, script: Script, stop: int, scheduler: Any = None) -> list[str]:
    """Run until a save in the batch `stop` of all, and return what was warned of."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = {"model": model, "optimizer": optimizer, "loader": DataLoader(torch.ones(4, 1))}  # type: ignore[arg-type]
    if scheduler:
        parts["scheduler"] = scheduler(optimizer)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with RunState.load(run_dir, progress=False, **parts) as state:

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
                script(state, step)
            except KeyboardInterrupt:
                return []
    return [str(one.message) for one in seen]


@pytest.mark.parametrize("stops", [(0,), (0, 1), (2,), (4, 6)], ids=str)
@pytest.mark.parametrize(
    ("script", "name"),
    [
        (floats, "'running'"),
        (tensors, "'running'"),
        (lists, "'losses'"),
        (comprehension, "the comprehension over the batches"),
    ],
)
def test_a_metric_of_a_sum_that_began_again_is_warned_of(
    run_dir: Path, script: Script, name: str, stops: tuple[int, ...]
) -> None:
    for stop in stops:
        start(run_dir, script, stop)
    (text,) = start(run_dir, script, -1)

    assert f"resumed in the middle, so that {name} covers only the rest" in text


def test_two_sums_are_warned_of_in_one_sentence(run_dir: Path) -> None:
    start(run_dir, two, 1)
    (text,) = start(run_dir, two, -1)

    assert "so that 'running', 'squares' cover only the rest" in text


def test_a_plateau_that_may_see_the_sum_is_warned_of_too(run_dir: Path) -> None:
    start(run_dir, no_metric, 1, ReduceLROnPlateau)
    (text,) = start(run_dir, no_metric, -1, ReduceLROnPlateau)

    assert "so that 'running' covers only the rest" in text


@pytest.mark.parametrize(("script", "name"), [(tensors, "'running'"), (lists, "'losses'")])
def test_it_is_where_no_batch_was_left(run_dir: Path, script: Script, name: str) -> None:
    start(run_dir, script, 3)
    (text,) = start(run_dir, script, -1)

    assert f"so that {name} covers only the rest" in text


@pytest.mark.parametrize("script", [means, counter, no_metric])
def test_what_decides_nothing_is_not_warned_of(run_dir: Path, script: Script) -> None:
    start(run_dir, script, 1)

    assert start(run_dir, script, -1) == []


@pytest.mark.parametrize("script", [floats, lists])
def test_nothing_is_warned_of_at_an_epochs_end_nor_in_the_epoch_after(run_dir: Path, script: Script) -> None:
    assert start(run_dir, script, 99) == []
    assert start(run_dir, script, 99) == []
