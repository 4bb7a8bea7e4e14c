"""Broken: set_epoch is called for the next epoch only, so a resumed one begins with that of epoch 0."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from resumable import RunState


class Pairs(Dataset):
    def __init__(self, n):
        self.x = torch.randn(n, 3)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.x[index].prod()


class EpochSampler(Sampler):
    def __init__(self, data):
        self.data = data
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        step = 2 * self.epoch + 1
        return (index * step % len(self.data) for index in range(len(self.data)))

    def __len__(self):
        return len(self.data)


torch.manual_seed(1)
data = Pairs(64)
sampler = EpochSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

state = RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader)
for epoch in state.epochs(4):
    for x, y in state.batches():
        loss = nn.functional.mse_loss(model(x).squeeze(1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if state.batch == 0:
            print(f"epoch {epoch}: {loss.item():.5f}")
    sampler.set_epoch(epoch + 1)
    state.save()
state.close()
