"""Broken: a local count says when the accumulated gradients are applied, and a resume begins it at 0."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

ACCUMULATE = 4

torch.manual_seed(0)
x = torch.randn(56, 5)
y = x.cos().sum(1, keepdim=True)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)  # 7 batches: no whole number of windows
model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

state = RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader)
pending = 0
for epoch in state.epochs(6):
    for inputs, targets in state.batches():
        loss = nn.functional.mse_loss(model(inputs), targets) / ACCUMULATE
        loss.backward()
        pending += 1
        if pending == ACCUMULATE:
            optimizer.step()
            optimizer.zero_grad()
            pending = 0
        if state.batch == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    state.save()
state.close()
