"""Where no optimizer tells of its steps, each batch of the outermost loop is a step."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from resumable import Run, RunState


class Plain:
    """An optimizer without hooks."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = [*model.parameters()]

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters:
                parameter -= 0.125 * parameter.grad
                parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {}


def numbers(length: int = 12) -> DataLoader[Any]:
    return DataLoader(torch.arange(float(length)), batch_size=2, shuffle=True)


def _train(run: Path, stop: int | None, *, is_given: bool, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = Plain(model)
    given = {"optimizer": optimizer} if is_given else {}
    with RunState.load(run, model=model, loader=numbers(), progress=False, **given, **options) as state:
        for _ in state.epochs(2):
            for batch in state.batches():
                model(batch[:, None] * torch.rand(1)).square().mean().div(100).backward()
                optimizer.step()
                if state.step == stop:
                    os.kill(os.getpid(), signal.SIGTERM)
        return model.weight.item(), state.step, state.samples


@pytest.mark.parametrize("is_given", [True, False])
def test_a_training_without_hooks_saves_every_few_batches(run_dir: Path, is_given: bool) -> None:
    expected = _train(run_dir, None, is_given=is_given, every="5 steps", keep=None)

    steps = [found.about.step for found in Run(run_dir).checkpoints()]
    assert steps == [5, 10, 12]
    assert expected[1:] == (12, 24)


@pytest.mark.parametrize("is_given", [True, False])
def test_a_training_without_hooks_answers_a_signal_after_the_batch(run_dir: Path, is_given: bool) -> None:
    expected = _train(run_dir / "whole", None, is_given=is_given)
    for stop in (2, 7):
        with pytest.raises(SystemExit):
            _train(run_dir / "parts", stop, is_given=is_given)
        newest = Run(run_dir / "parts").checkpoints()[-1].about
        assert (newest.step, newest.epoch, newest.batch) == (stop + 1, stop // 6, stop % 6 + 1)
    assert _train(run_dir / "parts", None, is_given=is_given) == expected


def test_a_save_in_the_body_counts_the_batch_in_hand(run_dir: Path) -> None:
    for start in range(3):
        with RunState.load(run_dir, loader=numbers(8)) as state:
            assert state.step == start
            for _ in state.batches():
                assert state.step == start
                state.save()
                break
            assert state.step == start + 1


def test_batches_of_an_inner_loop_are_no_steps(run_dir: Path) -> None:
    loader = {"outer": numbers(8), "inner": numbers(6)}
    with RunState.load(run_dir, loader=loader) as state:
        for _ in state.batches("outer"):
            for _ in state.batches("inner"):
                pass
            break
        assert state.step == 1


def test_batches_of_two_loops_side_by_side_count_once(run_dir: Path) -> None:
    with RunState.load(run_dir, loader={"a": numbers(8), "b": numbers(8)}) as state:
        for _ in zip(state.batches("a"), state.batches("b"), strict=True):
            pass
        assert state.step == 4


def test_batches_of_loops_one_after_the_other_all_count(run_dir: Path) -> None:
    with RunState.load(run_dir, loader={"a": numbers(8), "b": numbers(6)}) as state:
        for _ in state.epochs(2):
            for name in ("a", "b"):
                for _ in state.batches(name):
                    pass
        assert state.step == 14


def test_a_body_of_steps_is_one_step_whatever_it_loads(run_dir: Path) -> None:
    for total in (3, 5, 7):
        with RunState.load(run_dir, loader=numbers(20)) as state:
            batches = iter(state.batches())
            for _ in state.steps(total):
                next(batches)
                state.save()
            del batches
            assert state.step == total


def test_batches_that_are_left_out_are_no_steps(run_dir: Path) -> None:
    losses = iter([1.0, math.nan, 1.0, 1.0])
    with RunState.load(run_dir, loader=numbers(8)) as state:
        for _ in state.batches():
            if state.spiked(next(losses)):
                continue
            state.save()
        assert (state.step, state.batch) == (3, 4)
