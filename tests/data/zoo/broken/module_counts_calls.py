"""Broken: a layer anneals its temperature by a plain count of its calls, which is no buffer."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState


class Gate(nn.Module):
    """Softer at first, harder with every call."""

    def __init__(self, width):
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(width))
        self.calls = 0

    def forward(self, x):
        if self.training:
            self.calls += 1
        temperature = max(0.2, 0.95**self.calls)
        return x * torch.sigmoid(self.logits / temperature)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = Gate(8)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.gate(x))


torch.manual_seed(0)
x = torch.randn(48, 8)
y = x[:, :2].sum(1, keepdim=True)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader)
for epoch in state.epochs(5):
    for inputs, targets in state.batches():
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    state.save()
state.close()
