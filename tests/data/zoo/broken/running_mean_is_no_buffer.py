"""Broken: a layer normalises by a running mean that is an attribute and not a buffer."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState


class Centre(nn.Module):
    def __init__(self, width, momentum=0.1):
        super().__init__()
        self.momentum = momentum
        self.running_mean = torch.zeros(width)

    def forward(self, x):
        if self.training:
            self.running_mean = self.running_mean.lerp(x.detach().mean(0), self.momentum)
        return x - self.running_mean


torch.manual_seed(0)
x = torch.randn(56, 6) + 3
y = (x[:, 0] > 3).long()
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = nn.Sequential(Centre(6), nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

with RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader) as state:
    for epoch in state.epochs(5):
        for inputs, labels in state.batches():
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if state.batch == 0:
                print(f"epoch {epoch}: loss {loss.item():.4f}")
        state.save()
