"""Broken: the scheduler is made after load, so it sets the learning rate back to its start."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

EPOCHS = 5

torch.manual_seed(0)
x = torch.randn(48, 4)
y = (x @ torch.tensor([2.0, -1.0, 0.5, 1.0])).unsqueeze(1)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

state = RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader)
total = EPOCHS * len(loader)
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / total))
)
for epoch in state.epochs(EPOCHS):
    for inputs, targets in state.batches():
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if state.batch == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}, lr {scheduler.get_last_lr()[0]:.4f}")
    state.save()
state.close()
