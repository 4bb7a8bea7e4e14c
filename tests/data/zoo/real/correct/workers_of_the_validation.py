"""Correct, in the shape of timm: the workers of the validation are started once in each process."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

torch.manual_seed(0)
x = torch.randn(160, 6)
y = (x[:, 0] > 0).long()
loader = DataLoader(TensorDataset(x[:128], y[:128]), batch_size=8, shuffle=True)
val_loader = DataLoader(
    TensorDataset(x[128:], y[128:]), batch_size=16, num_workers=1, persistent_workers=True
)
model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

with RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader) as state:
    for epoch in state.epochs(4):
        model.train()
        for inputs, labels in state.batches():
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            total = sum(nn.functional.cross_entropy(model(a), b).item() for a, b in val_loader)
        state.save(loss=total)
