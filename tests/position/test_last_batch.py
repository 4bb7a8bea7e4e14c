"""At an epoch's last batch: what saves by itself there, and what a resume there finds."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import gloo
import pytest
import torch
from grouped import grouped
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from resumable import Run, RunState

LENGTH = 4
"""Batches in an epoch."""


class Training:
    """One weight, its optimizer and a loader of four batches; each is new."""

    def __init__(self, run_dir: Path, loader: Any = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.loader = DataLoader(range(LENGTH)) if loader is None else loader  # type: ignore[arg-type]
        self.state = RunState.load(
            run_dir,
            model=self.model,
            optimizer=self.optimizer,
            loader=self.loader,
            keep=None,
            **grouped(**options),
        )

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = self.model(batch.float().reshape(-1, 1)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def places(run_dir: Path) -> list[tuple[int, int]]:
    """Return epoch and batch of each checkpoint."""
    return [(found.about.epoch, found.about.batch) for found in Run(run_dir).checkpoints()]


def behind(run_dir: Path, epoch: int = 0) -> None:
    """Leave a checkpoint behind the last batch of an epoch, and one before it at the batch before."""
    training = Training(run_dir)
    with training.state as state:
        for _ in state.epochs(epoch + 1):
            for batch in state.batches():
                training.step(batch)
                if state.epoch == epoch and state.batch >= LENGTH - 2:
                    state.save().wait()
            if state.epoch == epoch:
                break


# What saves by itself.


class Stream(IterableDataset[int]):
    """Four numbers, whose count nobody knows."""

    def __iter__(self) -> Any:
        return iter(range(LENGTH))


def test_automatic_saves_at_a_last_batch_stand_at_the_epochs_end(run_dir: Path) -> None:
    training = Training(run_dir, every=LENGTH)

    with training.state as state:
        for _ in state.epochs(3):
            for batch in state.batches():
                training.step(batch)

    assert places(run_dir) == [(1, 0), (2, 0), (3, 0)]


def test_of_a_loader_without_a_length_the_epoch_before_tells_it(run_dir: Path) -> None:
    training = Training(run_dir, DataLoader(Stream(), batch_size=None), every=LENGTH)

    with training.state as state:
        for _ in state.epochs(3):
            for batch in state.batches():
                training.step(torch.tensor(batch))

    assert places(run_dir) == [(0, 4), (2, 0), (3, 0)]


def test_a_save_of_the_script_in_the_rest_of_the_body_is_the_only_one(run_dir: Path) -> None:
    training = Training(run_dir, every=LENGTH)

    with training.state as state:
        for _ in state.epochs(2):
            for batch in state.batches():
                training.step(batch)
            state.save(loss=1)

    assert places(run_dir) == [(1, 0), (2, 0)]


def stopped(run_dir: Path, epoch: int, *, durable: float = 0.1) -> tuple[int, int]:
    """Stop a training by a signal in the last batch of an epoch; return where it was saved."""
    training = Training(run_dir)
    training.state._saving.save_cost.expect(0.0, durable)

    def train() -> None:
        for _ in state.epochs(3):
            for batch in state.batches():
                training.step(batch)
                if (state.epoch, state.batch) == (epoch, LENGTH - 1):
                    os.kill(os.getpid(), signal.SIGTERM)

    with training.state as state, pytest.raises(SystemExit):
        train()
    return places(run_dir)[-1]


def test_a_signal_in_a_last_batch_waits_for_the_rest_of_the_body(run_dir: Path) -> None:
    assert stopped(run_dir, 1) == (2, 0)
    assert stopped(run_dir, 2) == (2, 4)  # This process has seen no end of an epoch


def test_a_signal_in_a_last_batch_is_answered_there_where_waiting_may_fail(run_dir: Path) -> None:
    assert stopped(run_dir / "first", 0) == (0, 4)
    assert stopped(run_dir / "slow", 1, durable=20) == (1, 4)


def in_step(rank: int, run_dir: Path, lengths: list[int], every: int) -> list[tuple[int, int]]:
    """Train one epoch, of so many batches on each rank."""
    training = Training(run_dir, DataLoader(range(lengths[rank])), every=every, timeout=20)  # type: ignore[arg-type]
    with training.state as state:
        for _ in state.epochs(1):
            for batch in state.batches():
                training.step(batch)
    return places(run_dir)


@pytest.mark.parametrize(
    ("lengths", "every", "expected"), [([4, 4], 4, [(1, 0)]), ([4, 3], 3, [(0, 3)])], ids=["even", "uneven"]
)
@pytest.mark.quick(2)
def test_several_processes_wait_only_if_all_are_at_their_last_batch(
    tmp_path: Path, lengths: list[int], every: int, expected: list[tuple[int, int]]
) -> None:
    found = gloo.run(2, in_step, tmp_path / "run", lengths, every, folder=tmp_path)

    assert [(one.value, one.error) for one in found] == 2 * [(expected, None)]


# What torch warns of.


def test_a_resume_at_the_first_last_batch_does_not_warn_of_the_scheduler(run_dir: Path) -> None:
    for _ in range(3):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        loader = DataLoader(torch.ones(2, 1))  # type: ignore[arg-type]
        with RunState.load(run_dir, **parts, loader=loader) as state:  # type: ignore[arg-type]
            for _ in state.epochs(1):
                for batch in state.batches():
                    optimizer.zero_grad()
                    model(batch).sum().backward()
                    optimizer.step()
                    state.save().wait()
                if state.resumed:
                    with warnings.catch_warnings():
                        warnings.simplefilter("error")
                        scheduler.step()
                break

    assert scheduler.get_last_lr() == [0.25]


def test_torch_still_warns_of_a_scheduler_whose_optimizer_never_stepped(run_dir: Path) -> None:
    optimizers, schedulers = {}, {}
    for name in ("used", "idle"):
        optimizers[name] = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
        schedulers[name] = torch.optim.lr_scheduler.StepLR(optimizers[name], 1, 0.5)

    for _ in range(2):
        with RunState.load(run_dir, optimizer=optimizers, scheduler=schedulers) as state:
            for _ in state.steps(1):
                optimizers["used"].step()
            state.save()

    with pytest.warns(UserWarning, match="before `optimizer.step"):
        schedulers["idle"].step()
