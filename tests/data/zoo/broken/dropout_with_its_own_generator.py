"""Broken: a layer of the model draws its masks from a generator that is an attribute of the layer."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState


class SeededDropout(nn.Module):
    def __init__(self, p, seed):
        super().__init__()
        self.p = p
        self.masks = torch.Generator().manual_seed(seed)

    def forward(self, x):
        if not self.training:
            return x
        keep = torch.rand(x.shape, generator=self.masks) >= self.p
        return x * keep / (1 - self.p)


torch.manual_seed(0)
x = torch.randn(48, 6)
y = x.abs().max(dim=1).values.unsqueeze(1)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), SeededDropout(0.2, seed=9), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)

with RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader) as state:
    for epoch in state.epochs(5):
        model.train()
        for inputs, targets in state.batches():
            loss = nn.functional.smooth_l1_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            loss = nn.functional.smooth_l1_loss(model(x), y)
        state.save()
        print(f"epoch {epoch}: loss {loss:.4f}")
