"""Broken: the warm-up counts updates in a variable of the script."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

BASE, WARMUP = 0.02, 16

torch.manual_seed(0)
x = torch.randn(48, 3)
y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].exp()], dim=1)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(3, 24), nn.ReLU(), nn.Linear(24, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=BASE)

state = RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader)
updates = 0
for epoch in state.epochs(5):
    for inputs, targets in state.batches():
        updates += 1
        for group in optimizer.param_groups:
            group["lr"] = BASE * min(1.0, updates / WARMUP)
        loss = nn.functional.huber_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if state.batch == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}, lr {group['lr']:.4f}")
    state.save()
state.close()
