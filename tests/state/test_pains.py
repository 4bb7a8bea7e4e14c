"""What goes wrong in hand-written checkpoints, and must not here; each test's name is the pain."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset, random_split

from resumable import ResumableWarning, Run, RunState, StateMismatch


class Training:
    """A model with everything that is forgotten easily; each is made from another seed."""

    def __init__(self, run_dir: Path, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.ema = AveragedModel(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=1)
        self.state = RunState.load(
            run_dir,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            extra={"ema": self.ema},
            **options,
        )

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(4, 2)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.ema.update_parameters(self.model)
        return loss.item()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return copies of all tensors that there are."""
        found = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        found |= {f"ema.{name}": value for name, value in self.ema.state_dict().items()}
        for number, moments in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{number}.{key}": value for key, value in moments.items()}
        return {name: value.clone() for name, value in found.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_save_holds_what_was_there_when_it_was_called(run_dir: Path) -> None:
    training = Training(run_dir)
    for _ in range(2):
        training.step()
        then = training.tensors()
        training.state.save()
        with torch.no_grad():
            for tensor in [*training.model.state_dict().values(), *training.ema.state_dict().values()]:
                tensor.zero_()
            for moments in training.optimizer.state.values():
                for value in moments.values():
                    value.zero_()
        training.state.restore("newest")
        assert same(training.tensors(), then)


def early_stopping(run_dir: Path, legs: int) -> list[Any]:
    """Train until the patience is over, in so many legs; return what was decided."""
    losses = [3.0, 2.0, 2.5, 2.4, 2.3, 2.2, 1.0]
    decided: list[Any] = []
    for leg in range(legs):
        training = Training(run_dir, seed=leg, minimize="loss")
        state = training.state
        for step in state.steps(len(losses)):
            training.step()
            training.scheduler.step(losses[step])
            is_better = state.best is None or losses[step] < state.best
            state.vars["bad"] = 0 if is_better else state.vars.get("bad", 0) + 1
            decided.append((step, state.best, state.vars["bad"], training.optimizer.param_groups[0]["lr"]))
            state.save(loss=losses[step])
            if state.vars["bad"] == 4 or (step % 2 and leg < legs - 1):
                break
        state.close()
    return decided


def test_patience_plateau_and_best_count_on_after_resumes(tmp_path: Path) -> None:
    never_stopped = early_stopping(tmp_path / "once", legs=1)

    assert early_stopping(tmp_path / "thrice", legs=3) == never_stopped
    assert [bad for _, _, bad, _ in never_stopped] == [0, 0, 1, 2, 3, 4]


def test_a_resume_writes_into_the_weights_that_are_there(run_dir: Path) -> None:
    Training(run_dir).state.save()
    training = Training(run_dir, seed=1)
    places = [tensor.data_ptr() for tensor in training.model.state_dict().values()]

    for _ in range(2):
        training.state.restore("newest")

    assert [tensor.data_ptr() for tensor in training.model.state_dict().values()] == places


def test_a_resume_of_an_unchanged_script_warns_of_nothing(run_dir: Path) -> None:
    for _ in range(3):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        state = RunState.load(
            run_dir,
            model=model,
            optimizer=optimizer,
            scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
            scaler=torch.amp.GradScaler("cpu"),
            loader=DataLoader(torch.arange(4.0), collate_fn=lambda batch: batch, shuffle=True),
            extra={"config": {"kind": object.__name__}},
        )
        optimizer.step()
        state.save()
        state.close()

    assert Run(run_dir).numbers() == [1, 2, 3]


def test_a_cell_of_a_notebook_that_runs_again_continues(run_dir: Path) -> None:
    fed: list[float] = []

    def cell() -> None:
        state = RunState.load(run_dir, loader=DataLoader(torch.arange(4.0), None))
        for _ in state.epochs(1):
            for batch in state.batches():
                fed.append(batch.item())
                state.save()
                if len(fed) in (1, 3):
                    raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            cell()
    cell()

    assert fed == [0, 1, 2, 3]


def split(seed: int) -> DataLoader[Any]:
    training, _ = random_split(TensorDataset(torch.arange(10.0)), [7, 3], torch.Generator().manual_seed(seed))
    return DataLoader(training, 2)


def save_after(run_dir: Path, loader: DataLoader[Any], batches: int) -> None:
    state = RunState.load(run_dir, loader=loader, every=None)
    for number, _ in state.enumerate(start=1):
        if number == batches:
            state.save()
    if batches > len(loader):
        state.save()
    state.close()


def test_a_split_that_is_drawn_again_is_named_and_does_not_leak(run_dir: Path) -> None:
    save_after(run_dir, split(0), 1)
    save_after(run_dir, split(0), 2)

    with pytest.raises(StateMismatch, match=r"loader.split: \w+ in the checkpoint, \w+ in the code"):
        RunState.load(run_dir, loader=split(1))
    save_after(run_dir, split(0), 9)
    with pytest.warns(ResumableWarning, match=r"will change bits  loader\.split  \w+  -> \w+  the code's"):
        RunState.load(run_dir, loader=split(1))


def test_set_up_code_that_draws_before_the_loop_does_not_move_the_run(run_dir: Path) -> None:
    drawn = []
    for extra_draws in (0, 1, 5):
        state = RunState.load(run_dir)
        [(random.random(), torch.rand(1)) for _ in range(extra_draws)]
        for _ in state.steps(9):
            drawn.append((random.random(), torch.rand(1).item()))
            state.save()
            break
        state.close()

    random.seed(0), torch.manual_seed(0)
    assert drawn == [(random.random(), torch.rand(1).item()) for _ in range(3)]


def test_a_complete_training_that_is_started_again_changes_nothing(run_dir: Path) -> None:
    ends = []
    for seed in range(3):
        training = Training(run_dir, seed)
        for _ in training.state.epochs(2):
            training.step()
            training.state.save()
        training.state.close()
        ends.append(training.tensors())

    assert same(ends[0], ends[1])
    assert same(ends[0], ends[2])
    assert Run(run_dir).numbers() == [1, 2]
