"""Broken: the backbone's parameters join the optimizer after load, which then does not fit the checkpoint."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

torch.manual_seed(0)
x = torch.randn(48, 5)
y = (x[:, 0] * x[:, 1] > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
backbone = nn.Sequential(nn.Linear(5, 24), nn.ReLU())
head = nn.Linear(24, 2)
model = nn.Sequential(backbone, head)
optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)

state = RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader)
optimizer.add_param_group({"params": backbone.parameters(), "lr": 1e-3})
for epoch in state.epochs(5):
    for inputs, labels in state.batches():
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if state.batch == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    state.save()
state.close()
