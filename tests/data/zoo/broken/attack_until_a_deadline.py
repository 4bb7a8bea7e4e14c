"""Broken: the adversary searches for as long as its time lasts, so it gets as far as the machine is fast."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

BUDGET = 0.02


def attack(model, x, y):
    """Walk uphill until the budget is spent."""
    x = x.clone()
    deadline = time.perf_counter() + BUDGET
    while time.perf_counter() < deadline:
        x.requires_grad_(True)
        (slope,) = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), x)
        x = (x + 0.001 * slope.sign()).detach()
    return x


torch.manual_seed(0)
inputs = torch.randn(48, 10)
labels = (inputs[:, 0] > inputs[:, 1]).long()
loader = DataLoader(TensorDataset(inputs, labels), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

with RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader) as state:
    for epoch in state.epochs(5):
        for x, y in state.batches():
            loss = nn.functional.cross_entropy(model(attack(model, x, y)), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if state.batch == 0:
                print(f"epoch {epoch}: {loss.item():.4f}")
        state.save()
