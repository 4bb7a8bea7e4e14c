"""Broken: the batches of a loader that was not given come from itertools.cycle, which begins again."""

import itertools

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

torch.manual_seed(0)
x = torch.rand(56, 2)
y = torch.hypot(x[:, 0], x[:, 1]).unsqueeze(1)
batches = itertools.cycle(DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True))
model = nn.Sequential(nn.Linear(2, 32), nn.SiLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

with RunState.load("runs/exp", model=model, optimizer=optimizer) as state:
    for step in state.steps(40):
        inputs, targets = next(batches)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 10 == 0:
            state.save()
            print(f"step {step + 1}: {loss.item():.5f}")
