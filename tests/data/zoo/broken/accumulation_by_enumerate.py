"""Broken: enumerate tells which batch it is, and counts from 0 again where an epoch continues."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

torch.manual_seed(0)
x = torch.randn(56, 6)
y = (x.prod(1) > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

with RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader) as state:
    for epoch in state.epochs(10):
        for i, (inputs, labels) in enumerate(state.batches()):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            if (i + 1) % 3 == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
            if state.batch == 0:
                print(f"epoch {epoch}: {loss.item():.4f}")
        state.save()
