"""Broken: the batches come from an iterator made by hand, so nobody knows where it stood."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

torch.manual_seed(0)
x = torch.rand(56, 2)
y = torch.hypot(x[:, 0], x[:, 1]).unsqueeze(1)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(2, 32), nn.SiLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

state = RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader)
iterator = iter(loader)
for step in state.steps(30):
    try:
        inputs, targets = next(iterator)
    except StopIteration:
        iterator = iter(loader)
        inputs, targets = next(iterator)
    loss = nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if (step + 1) % 10 == 0:
        state.save()
        print(f"step {step + 1}: {loss.item():.5f}")
state.close()
