"""Broken: the loss of the last batch is read after the loop, and a resume right after that batch has none."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

torch.manual_seed(0)
x = torch.randn(40, 4)
y = (x[:, 0] + x[:, 1] > x[:, 2]).long()
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

state = RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader, minimize="loss")
for epoch in state.epochs(6):
    for inputs, labels in state.batches():
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    state.save(loss=loss.item())
    print(f"epoch {epoch}: loss {loss.item():.4f}")
state.close()
