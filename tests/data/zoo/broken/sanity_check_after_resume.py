"""Broken: after a resume the first batch is looked at in training mode, and dropout draws for that."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

torch.manual_seed(0)
x = torch.randn(40, 6)
y = (x > 0).float().mean(1, keepdim=True)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

state = RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader)
is_unchecked = state.resumed
for epoch in state.epochs(6):
    for inputs, targets in state.batches():
        if is_unchecked:
            with torch.no_grad():
                print(f"loss after the resume: {nn.functional.mse_loss(model(inputs), targets):.4f}")
            is_unchecked = False
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    state.save()
state.close()
