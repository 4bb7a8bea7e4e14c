"""Broken: a learned temperature is stepped by hand, outside of the model and the optimizer."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

torch.manual_seed(0)
x = torch.randn(48, 8)
y = x[:, :4].argmax(1)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = nn.Linear(8, 4)
log_temperature = torch.zeros((), requires_grad=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

state = RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader)
for epoch in state.epochs(5):
    for inputs, labels in state.batches():
        loss = nn.functional.cross_entropy(model(inputs) / log_temperature.exp(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            log_temperature -= 0.05 * log_temperature.grad
        log_temperature.grad = None
        if state.batch == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}, temperature {log_temperature.exp():.3f}")
    state.save()
state.close()
