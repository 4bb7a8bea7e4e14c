"""Gradients on their way to a later step are state too."""

from __future__ import annotations

from pathlib import Path

import compare
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState, Trace


def trace_of(run_dir: Path) -> Path:
    """Return where a training writes its trace, beside its run."""
    return run_dir.with_suffix(".jsonl")


def two_rates(run_dir: Path, stop: int | None) -> list[torch.Tensor]:
    """Train an embedding of sparse gradients each second batch, and a layer each batch."""
    torch.manual_seed(0)
    table, layer = nn.Embedding(6, 3, sparse=True), nn.Linear(3, 1)
    optimizers = {
        "layer": torch.optim.SGD(layer.parameters(), lr=0.1),
        "table": torch.optim.SparseAdam(table.parameters(), lr=0.1),
    }
    loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=1, shuffle=True)
    models = {"table": table, "layer": layer}
    parts = {"model": models, "optimizer": optimizers, "loader": loader}
    with RunState.load(run_dir, **parts, trace=Trace(trace_of(run_dir), every=1)) as state:
        for _ in state.epochs(2):
            for (batch,) in state.batches():
                layer(table(batch)).square().sum().backward()
                optimizers["layer"].step()
                optimizers["layer"].zero_grad()
                if state.batch % 2:
                    optimizers["table"].step()
                    optimizers["table"].zero_grad()
                if state.samples + 1 == stop:
                    state.save()
                    return []
    return [*table.parameters(), *layer.parameters()]


@pytest.mark.quick(6)
@pytest.mark.parametrize("first", [1, 2, 5, 6, 9])
def test_each_optimizer_has_a_window_of_its_own_also_for_sparse_gradients(run_dir: Path, first: int) -> None:
    expected = two_rates(run_dir / "straight", None)
    two_rates(run_dir / "stopped", first)
    two_rates(run_dir / "stopped", first + 1)

    resumed = two_rates(run_dir / "stopped", None)

    are_equal = all(torch.equal(a, b) for a, b in zip(expected, resumed, strict=True))
    assert are_equal, compare.first_of_traces(*(trace_of(run_dir / name) for name in ("straight", "stopped")))


def test_going_back_leaves_no_gradient_behind(run_dir: Path) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with RunState.load(run_dir, model=model, optimizer=optimizer) as state:
        state.save()
        for _ in range(2):
            model(torch.ones(1)).backward()
            state.restore("newest")

            assert all(parameter.grad is None for parameter in model.parameters())
