"""Broken, after pytorch/examples siamese_network: the dataset draws pairs by random, which is not seeded."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from resumable import RunState


class Pairs(Dataset):
    def __init__(self):
        self.data = torch.randn(40, 6)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        other = random.randrange(len(self.data))
        return self.data[index], self.data[other], torch.tensor([float(index % 2 == other % 2)])


torch.manual_seed(1)
model = nn.Linear(6, 4)
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
loader = DataLoader(Pairs(), batch_size=8, shuffle=True)
with RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader) as state:
    for _ in state.epochs(4):
        for one, other, is_same in state.batches():
            distance = (model(one) - model(other)).square().mean(1, keepdim=True)
            loss = nn.functional.mse_loss(torch.exp(-distance), is_same)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        state.save()
