"""Broken: the first batch of every process seeds torch, also where a run continues."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState


class Masking:
    """Hides a part of each sample; sets itself up when it is needed first."""

    def __init__(self):
        self.is_ready = False

    def __call__(self, batch):
        if not self.is_ready:
            torch.manual_seed(2024)
            self.is_ready = True
        return batch * (torch.rand_like(batch) > 0.25)


torch.manual_seed(0)
x = torch.randn(48, 12)
loader = DataLoader(TensorDataset(x), batch_size=8, shuffle=True)
mask = Masking()
autoencoder = nn.Sequential(nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 12))
optimizer = torch.optim.Adam(autoencoder.parameters(), lr=0.01)

state = RunState.load("runs/exp", model=autoencoder, optimizer=optimizer, loader=loader)
for epoch in state.epochs(5):
    for (batch,) in state.batches():
        loss = (autoencoder(mask(batch)) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if state.batch == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    state.save()
state.close()
