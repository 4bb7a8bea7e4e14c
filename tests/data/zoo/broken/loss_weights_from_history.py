"""Broken: two losses are weighted by how they fell before, from a list that only the script has."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

torch.manual_seed(0)
x = torch.randn(48, 6)
data = TensorDataset(x, x.sum(1), x.prod(1))
loader = DataLoader(data, batch_size=8, shuffle=True)
trunk = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 2))
optimizer = torch.optim.Adam(trunk.parameters(), lr=5e-3)
history = []


def losses_of(inputs, total, product):
    out = trunk(inputs)
    return torch.stack([(out[:, 0] - total).square().mean(), (out[:, 1] - product).square().mean()])


def weights():
    """The slower a loss falls, the more it weighs."""
    if len(history) < 2:
        return torch.ones(2)
    return 2 * torch.softmax(history[-1] / history[-2] / 0.5, dim=0)


state = RunState.load("runs/exp", model=trunk, optimizer=optimizer, loader=loader)
for epoch in state.epochs(6):
    weight = weights()
    for inputs, total, product in state.batches():
        losses = losses_of(inputs, total, product)
        optimizer.zero_grad()
        (weight * losses).sum().backward()
        optimizer.step()
    with torch.no_grad():
        history.append(losses_of(*data.tensors))
    state.save()
    print(f"epoch {epoch}: weights {weight.tolist()}")
state.close()
