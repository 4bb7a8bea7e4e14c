"""Counters, the best value and a queue of tensors in state.vars, from which the script decides."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

torch.manual_seed(0)
x = torch.randn(48, 6)
y = x.square().sum(1, keepdim=True)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

with RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader) as state:
    mine = state.vars
    mine.setdefault("updates", 0)
    mine.setdefault("lowest", float("inf"))
    mine.setdefault("recent", [])
    for epoch in state.epochs(5):
        for inputs, targets in state.batches():
            mine["updates"] += 1
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * min(1.0, mine["updates"] / 10)
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            (loss / torch.stack([loss.detach(), *mine["recent"]]).mean()).backward()
            optimizer.step()
            mine["lowest"] = min(mine["lowest"], loss.item())
            mine["recent"] = [*mine["recent"], loss.detach()][-4:]
            if state.batch == 0:
                print(f"epoch {epoch}: loss {loss.item():.4f}, lowest {mine['lowest']:.4f}")
        state.save()
