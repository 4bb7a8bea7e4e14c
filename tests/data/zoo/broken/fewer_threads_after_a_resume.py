"""Broken: the script uses fewer threads after a resume, so sums are added in another order."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

torch.manual_seed(0)
x = torch.randn(40, 4000)
y = x[:, :10].sum(1, keepdim=True)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = nn.Sequential(nn.LayerNorm(4000), nn.Linear(4000, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

state = RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader)
torch.set_num_threads(1 if state.resumed else 2)  # a machine is shared after a preemption
for epoch in state.epochs(5):
    for inputs, targets in state.batches():
        loss = (model(inputs) - targets).square().mean() + 1e-6 * sum(p.norm() for p in model.parameters())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if state.batch == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    state.save()
state.close()
