"""Broken: the noise has a generator of its own, which RunState was not given."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

torch.manual_seed(0)
clean = torch.sin(torch.linspace(0, 20, 48 * 8)).reshape(48, 8)
loader = DataLoader(TensorDataset(clean), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
noise = torch.Generator().manual_seed(11)

state = RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader)
for epoch in state.epochs(5):
    for (target,) in state.batches():
        noisy = target + 0.3 * torch.randn(target.shape, generator=noise)
        loss = nn.functional.mse_loss(model(noisy), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if state.batch == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    state.save()
state.close()
