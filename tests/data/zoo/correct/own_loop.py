"""A loop of the script's own over epochs, where only save() and load() are used."""

import torch
from torch import nn

from resumable import RunState

torch.manual_seed(0)
x = torch.randn(48, 5)
y = x.abs().sum(1, keepdim=True)
model = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)

state = RunState.load("runs/exp", model=model, optimizer=optimizer, scheduler=scheduler, minimize="loss")
epoch = state.vars.get("epoch", 0)
while epoch < 8:
    for chosen in torch.randperm(len(x)).split(16):
        loss = nn.functional.mse_loss(model(x[chosen]), y[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    scheduler.step()
    epoch += 1
    state.vars["epoch"] = epoch
    state.save(loss=loss.item())
    print(f"epoch {epoch}/8: {loss.item():.4f}")
state.close()
