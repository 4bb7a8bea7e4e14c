"""Accelerate's accumulation in loops over `state.batches()`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from resumable import ResumableWarning, RunState

accelerate = pytest.importorskip("accelerate")

EPOCHS, BATCHES, WINDOW = 2, 10, 4


@pytest.fixture(autouse=True)
def _one_accelerator() -> Iterator[None]:
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    yield
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


class Training:
    """What the script makes at each start."""

    def __init__(self, dataset: Dataset[Any] | None = None) -> None:
        torch.manual_seed(0)
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=WINDOW)
        dataset = dataset or TensorDataset(torch.randn(2 * BATCHES - 1, 3))
        self.loader = DataLoader(dataset, batch_size=2, shuffle=not isinstance(dataset, IterableDataset))
        model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        made = self.accelerator.prepare(model, optimizer, scheduler)
        self.model, self.optimizer, self.scheduler = made

    def parts(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return {**parts, "loader": self.loader}

    def body(self, batch: torch.Tensor) -> None:
        # Mid-window, this must not clear what is accumulated
        self.optimizer.zero_grad()
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.model(batch).square().mean())
            self.optimizer.step()
            self.scheduler.step()

    def weights(self) -> list[torch.Tensor]:
        return [weight.detach().clone() for weight in self.model.parameters()]


def plain() -> list[torch.Tensor]:
    training = Training()
    loader = training.accelerator.prepare(training.loader)
    for _ in range(EPOCHS):
        for (batch,) in loader:
            training.body(batch)
    return training.weights()


def ours(run_dir: Path, *stops: int) -> list[torch.Tensor]:
    for stop in (*stops, None):
        training = Training()
        with RunState.load(run_dir, **training.parts()) as state:
            for epoch in state.epochs(EPOCHS):
                for (batch,) in state.batches():
                    training.body(batch)
                    if epoch * BATCHES + state.batch == stop:
                        state.save().wait()
                        break
                else:
                    continue
                break
            assert training.accelerator.gradient_state.dataloader_references == [None]
    return training.weights()


@pytest.mark.parametrize("stops", [(), (1, 5), (3, 8), (9, 12), (7, 18)])
def test_accumulation_makes_the_steps_of_the_plain_prepared_script(run_dir: Path, stops: Any) -> None:
    assert all(map(torch.equal, ours(run_dir, *stops), plain()))


def test_accelerates_own_count_is_put_back_and_its_remainder_is_known(run_dir: Path) -> None:
    ours(run_dir, 5)
    training = Training()
    with RunState.load(run_dir, **training.parts()) as state:
        training.accelerator.step = 0
        gradients = training.accelerator.gradient_state
        for (_,) in state.batches():
            assert gradients.remainder == 1
            assert gradients.end_of_dataloader == (state.batch == BATCHES - 1)
    assert not gradients.in_dataloader


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(6, 3))


def test_a_loader_without_a_length_is_warned_of(run_dir: Path) -> None:
    training = Training(Endless())
    with RunState.load(run_dir, **training.parts()) as state:
        with pytest.warns(ResumableWarning, match="loader has no length, so Accelerate does not know"):
            batches = iter(state.batches())
        assert sum(1 for _ in batches) == 3
