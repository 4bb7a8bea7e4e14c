"""Broken: a log counts its lines beside its open file, and the rate falls with that count."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState


class Log:
    def __init__(self, path):
        self.file = open(path, "a")  # noqa: SIM115
        self.lines = 0

    def write(self, text):
        self.lines += 1
        print(text, file=self.file, flush=True)


torch.manual_seed(0)
x = torch.randn(48, 5)
y = x.square().sum(1, keepdim=True)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
log = Log("log.txt")

state = RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader)
for epoch in state.epochs(5):
    for inputs, targets in state.batches():
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (1 + 0.1 * log.lines)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.write(f"{epoch} {loss.item():.4f}")
    state.save()
state.close()
