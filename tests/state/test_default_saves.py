"""What is saved if the script says nothing: at the end of the loops and at close()."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gloo
import pytest
import torch
from forks import Forks
from torch import nn
from torch.utils.data import DataLoader

from resumable import ResumableWarning, Run, RunState
from resumable.run import history
from resumable.saving import autosave


@pytest.fixture(autouse=True)
def _all_warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*says which checkpoint is the best")
        yield


class Training:
    """A training that draws random numbers, loaded from a run."""

    def __init__(self, run_dir: Path, **options: Any) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.3), nn.Linear(4, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        loader = DataLoader(torch.arange(12.0).view(6, 2), shuffle=True)  # type: ignore[arg-type]
        parts = {"model": self.model, "optimizer": self.optimizer, "loader": loader}
        self.state: RunState = RunState.load(run_dir, **{**parts, **options})

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(3, 2)).square().mean().backward()
        self.optimizer.step()

    def weights(self) -> list[torch.Tensor]:
        return [weight.detach().clone() for weight in self.model.parameters()]


def epochs(run_dir: Path, total: int, **options: Any) -> list[torch.Tensor]:
    training = Training(run_dir, **options)
    for _ in training.state.epochs(total):
        for _ in training.state.batches():
            training.step()
    training.state.close()
    return training.weights()


def by_hand(run_dir: Path, total: int) -> list[torch.Tensor]:
    training = Training(run_dir, loader=None)
    for _ in range(training.state.step, total):
        training.step()
    training.state.close()
    return training.weights()


def steps(run_dir: Path) -> list[int]:
    return [one.about.step for one in Run(run_dir).checkpoints()]


@pytest.mark.parametrize("train", [epochs, by_hand])
def test_a_script_that_never_saves_continues_bit_for_bit_from_its_end(run_dir: Path, train: Any) -> None:
    straight = train(run_dir / "straight", 4)

    for total in (1, 3):
        train(run_dir / "stopped", total)
    assert all(map(torch.equal, train(run_dir / "stopped", 4), straight))


def test_the_end_of_the_loop_is_saved_also_without_close(run_dir: Path) -> None:
    training = Training(run_dir)
    for _ in training.state.steps(3):
        training.step()

    assert steps(run_dir) == [3]
    training.state.close()
    assert steps(run_dir) == [3]


def test_every_none_saves_nothing_by_itself(run_dir: Path) -> None:
    epochs(run_dir, 2, every=None)

    assert not run_dir.exists() or not Run(run_dir).numbers()


def test_after_save_and_break_nothing_more_is_saved(run_dir: Path) -> None:
    for _ in range(3):
        training = Training(run_dir)
        for _ in training.state.batches():
            training.step()
            training.state.save()
            break
        training.state.close()

    assert steps(run_dir) == [1, 2, 3]
    assert [one.about.batch for one in Run(run_dir).checkpoints()] == [1, 2, 3]


def test_return_from_within_the_loops_saves_the_place(run_dir: Path) -> None:
    def train() -> None:
        training = Training(run_dir)
        with training.state as state:
            for _ in state.epochs(2):
                for _ in state.batches():
                    training.step()
                    if state.batch % 2:
                        return

    train(), train()
    assert steps(run_dir) == [2, 4]


def test_an_error_that_was_caught_is_no_place_to_save_at(run_dir: Path) -> None:
    training = Training(run_dir)
    with contextlib.suppress(RuntimeError):
        for _ in training.state.batches():
            training.step()
            raise RuntimeError

    with pytest.warns(ResumableWarning, match="left before its end, and what was trained since the last"):
        training.state.close()
    assert steps(run_dir) == []


def test_an_error_that_ends_the_script_saves_nothing(run_dir: Path) -> None:
    training = Training(run_dir, loader=None)

    with contextlib.suppress(RuntimeError), training.state:
        training.step()
        raise RuntimeError
    assert steps(run_dir) == []


def test_best_weights_put_back_at_the_end_are_not_saved_as_the_newest(run_dir: Path) -> None:
    training = Training(run_dir, minimize="loss")
    for step in training.state.steps(3):
        training.step()
        training.state.save(loss=step)
    training.state.restore("best", only="model")
    training.state.close()

    assert steps(run_dir) == [1, 2, 3]


def test_a_metric_that_no_save_gives_is_told_at_the_first_epochs_end(run_dir: Path) -> None:
    training = Training(run_dir, maximize="acc")
    loop = training.state.epochs(2)
    next(loop)

    with pytest.warns(ResumableWarning, match=r"maximize='acc' .* no save has given acc so far"):
        next(loop)
    training.state.close()


def test_a_metric_that_no_save_gives_is_told_at_close(run_dir: Path) -> None:
    training = Training(run_dir, loader=None, minimize="loss")
    training.step()

    with pytest.warns(ResumableWarning, match=r"Give it with save\(loss=\.\.\.\)"):
        training.state.close()


def test_a_metric_that_is_given_is_not_asked_for(run_dir: Path) -> None:
    for total in (1, 2):
        training = Training(run_dir, minimize="loss")
        for _ in training.state.epochs(total):
            training.state.save(loss=float("nan"))
        training.state.close()


def test_a_loop_of_ones_own_that_is_not_saved_for_long_is_told(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(run_dir, loader=None)
    training.step(), training.step()
    now = time.monotonic() + 601
    monkeypatch.setattr(autosave.time, "monotonic", lambda: now)

    with pytest.warns(ResumableWarning, match=r"save only in loops over state\.epochs"):
        training.step()
    training.state.close()


def test_epochs_over_data_of_ones_own_that_are_left_early_are_not_saved(run_dir: Path) -> None:
    training = Training(run_dir, loader=None)
    for _ in training.state.epochs(3):
        training.step()
        break

    with pytest.warns(ResumableWarning, match="left before its end"):
        training.state.close()
    assert steps(run_dir) == []


def test_an_evaluation_that_fails_does_not_end_the_epoch(run_dir: Path) -> None:
    training = Training(run_dir)
    with contextlib.suppress(RuntimeError):
        for _ in training.state.epochs(3):
            for _ in training.state.batches():
                training.step()
            raise RuntimeError

    with pytest.warns(ResumableWarning, match="left before its end"):
        training.state.close()
    assert steps(run_dir) == []


def test_a_break_at_the_end_of_an_epoch_saves_it(run_dir: Path) -> None:
    training = Training(run_dir)
    for _ in training.state.epochs(3):
        for _ in training.state.batches():
            training.step()
        break
    training.state.close()

    assert [(one.about.epoch, one.about.step) for one in Run(run_dir).checkpoints()] == [(1, 6)]


def test_steps_of_another_optimizer_are_saved_too(run_dir: Path) -> None:
    models = {"first": nn.Linear(1, 1), "other": nn.Linear(1, 1)}
    optimizers = {name: torch.optim.SGD(model.parameters()) for name, model in models.items()}
    with RunState.load(run_dir, model=models, optimizer=optimizers):
        models["other"](torch.ones(1)).backward()
        optimizers["other"].step()

    assert len(Run(run_dir).checkpoints()) == 1


def test_epochs_without_an_optimizer_are_saved_at_their_end(run_dir: Path) -> None:
    with RunState.load(run_dir) as state:
        for _ in state.epochs(2):
            pass

    assert [one.about.epoch for one in Run(run_dir).checkpoints()] == [2]


def test_a_training_in_an_except_block_is_saved_at_its_end(run_dir: Path) -> None:
    try:
        raise ImportError
    except ImportError:
        training = Training(run_dir, loader=None)
        training.step()
        training.state.close()

    assert steps(run_dir) == [1]


def test_a_script_that_exits_without_an_error_is_saved_and_closed(run_dir: Path) -> None:
    training = Training(run_dir, loader=None)
    with contextlib.suppress(SystemExit), training.state:
        training.step()
        raise SystemExit(0)

    assert steps(run_dir) == [1]
    assert history.read(run_dir)[-1]["how"] == "closed"


def uneven(rank: int, run_dir: Path) -> int:
    training = Training(run_dir, loader=DataLoader(torch.arange(3.0 + rank).view(-1, 1)))  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in training.state.batches():
            training.step()
        training.state.close()
    return sum("different numbers of batches" in str(one.message) for one in told)


def test_processes_that_stand_at_different_batches_warn_and_end(tmp_path: Path) -> None:
    ended = gloo.run(2, uneven, tmp_path / "run", folder=tmp_path)

    assert [one.value for one in ended] == [1, 1], ended
    assert not Run(tmp_path / "run").numbers()


@pytest.mark.heavy
def test_a_run_that_was_not_closed_says_what_was_lost(tmp_path: Path, forks: Forks) -> None:
    script = """
import torch
from resumable import RunState
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters())
state = RunState.load("run", model=model, optimizer=optimizer, loader=[0, 1])
for _ in state.batches():
    model(torch.ones(1)).backward(), optimizer.step()
"""
    errors = forks.run(["-c", script], tmp_path).checked().err

    assert "run was not closed, and what was trained since the last save is in no checkpoint" in errors
