"""Correct, after pytorch/examples mnist_forward_forward: the negatives are drawn after load."""

import torch
from torch import nn

from resumable import RunState

torch.manual_seed(1)
x = torch.randn(40, 6)
layer = nn.Linear(6, 12)
optimizer = torch.optim.Adam(layer.parameters(), lr=0.03)
state = RunState.load("runs/exp", model=layer, optimizer=optimizer)
x_neg = x[torch.randperm(len(x))] + 0.3 * torch.randn_like(x)
for epoch in state.epochs(24):
    good, bad = layer(x).relu().square().mean(1), layer(x_neg).relu().square().mean(1)
    noise = 1 + 0.01 * torch.randn(1)
    loss = nn.functional.softplus(torch.cat([2 - good, bad - 2])).mean() * noise
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
state.close()
