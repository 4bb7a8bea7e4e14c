"""Broken: each epoch shuffles the list of files that the one before has left."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from resumable import RunState


class Files(Dataset):
    def __init__(self, names):
        self.names = names

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        number = int(self.names[index].split("-")[1])
        return torch.tensor([number / 48, (number % 7) / 7, 1.0]), float(number % 2)


random.seed(0)
torch.manual_seed(0)
files = [f"shard-{number}" for number in range(48)]
loader = DataLoader(Files(files), batch_size=8)
model = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
criterion = nn.BCEWithLogitsLoss()

state = RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader)
for epoch in state.epochs(5):
    random.shuffle(files)
    for x, y in state.batches():
        loss = criterion(model(x).squeeze(1), y.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if state.batch == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    state.save()
state.close()
