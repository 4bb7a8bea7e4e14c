"""Broken: a generator function gives a noise level for each batch, and begins again in each process."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState


def levels(first, decay):
    level = first
    while True:
        yield level
        level *= decay


torch.manual_seed(0)
x = torch.randn(48, 6)
y = (x.sum(1) > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
noise_levels = levels(0.5, 0.9)

state = RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader)
for epoch in state.epochs(5):
    for inputs, labels in state.batches():
        noisy = inputs + next(noise_levels) * torch.randn_like(inputs)
        loss = nn.functional.cross_entropy(model(noisy), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if state.batch == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    state.save()
state.close()
