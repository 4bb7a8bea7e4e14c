"""Broken: images are mirrored by Python's generator, and nobody has seeded that."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

torch.manual_seed(0)
images = torch.randn(48, 1, 8, 8)
labels = (images[:, :, :, :4].mean((1, 2, 3)) > 0).long()
loader = DataLoader(TensorDataset(images, labels), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

state = RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader)
for epoch in state.epochs(5):
    for x, y in state.batches():
        if random.random() < 0.5:
            x = x.flip(-1)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if state.batch == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    state.save()
state.close()
