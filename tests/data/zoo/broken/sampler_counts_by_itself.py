"""Broken: the sampler counts its epochs itself, and begins at 0 in each process."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from resumable import RunState


class SeededSampler(Sampler):
    """Another order each epoch, by the seed and the number of the epoch."""

    def __init__(self, length, seed=0):
        self.length = length
        self.seed = seed
        self.rounds = 0

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.rounds)
        self.rounds += 1
        return iter(torch.randperm(self.length, generator=generator).tolist())

    def __len__(self):
        return self.length


torch.manual_seed(0)
x = torch.randn(48, 5)
y = x.square().sum(1, keepdim=True)
sampler = SeededSampler(len(x))
loader = DataLoader(TensorDataset(x, y), batch_size=8, sampler=sampler)
model = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

state = RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader)
for _ in state.epochs(5):
    for inputs, targets in state.batches():
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    state.save()
state.close()
