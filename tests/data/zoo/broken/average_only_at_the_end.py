"""Broken: the averaged weights are what is published in the end, and a resume begins them again."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

torch.manual_seed(0)
x = torch.linspace(-2, 2, 48).unsqueeze(1)
loader = DataLoader(TensorDataset(x, x**3 - x), batch_size=8, shuffle=True)
net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
averaged = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.95))

with RunState.load("runs/exp", model=net, optimizer=optimizer, loader=loader) as state:
    for epoch in state.epochs(5):
        for inputs, targets in state.batches():
            loss = nn.functional.mse_loss(net(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            averaged.update_parameters(net)
        state.save()

with torch.no_grad():
    print(f"loss of the average: {nn.functional.mse_loss(averaged(x), x**3 - x):.5f}")
