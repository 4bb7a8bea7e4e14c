"""Broken: what anneals the loss is in a named tuple, which each epoch makes from the last one."""

from typing import NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState


class Settings(NamedTuple):
    smoothing: float = 0.2
    epochs: int = 0


torch.manual_seed(0)
x = torch.randn(56, 6)
y = (x.prod(1) > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
settings = Settings()

with RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader) as state:
    for epoch in state.epochs(10):
        for inputs, labels in state.batches():
            loss = nn.functional.cross_entropy(model(inputs), labels, label_smoothing=settings.smoothing)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if state.batch == 0:
                print(f"epoch {epoch}: {loss.item():.4f}")
        settings = Settings(settings.smoothing * 0.8, settings.epochs + 1)
        state.save()
