"""A random projection is drawn after load: it is the one of the first start."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

torch.manual_seed(0)
x = torch.randn(40, 10)
loader = DataLoader(TensorDataset(x), batch_size=8, shuffle=True)
student = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.Adam(student.parameters(), lr=0.01)

state = RunState.load("runs/exp", model=student, optimizer=optimizer, loader=loader)
projection = torch.randn(10, 4) / 10**0.5
for epoch in state.epochs(6):
    for (batch,) in state.batches():
        loss = nn.functional.mse_loss(student(batch), torch.tanh(batch @ projection))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if state.batch == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    state.save()
state.close()
