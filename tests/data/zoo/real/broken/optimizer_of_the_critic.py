"""Broken, after pytorch/examples dcgan: the optimizer of the discriminator is not given."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

torch.manual_seed(3)
loader = DataLoader(TensorDataset(torch.randn(48, 2) * 0.5 + 1), batch_size=8, shuffle=True)
net_g = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
net_d = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
criterion = nn.BCEWithLogitsLoss()
optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-3, betas=(0.5, 0.999))

state = RunState.load("runs/exp", model={"G": net_g, "D": net_d}, optimizer=optimizer_g, loader=loader)
for epoch in state.epochs(5):
    for (real,) in state.batches():
        fake = net_g(torch.randn(len(real), 4))
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        net_d.zero_grad()
        (criterion(net_d(real), ones) + criterion(net_d(fake.detach()), zeros)).backward()
        optimizer_d.step()
        net_g.zero_grad()
        criterion(net_d(fake), ones).backward()
        optimizer_g.step()
    state.save()
state.close()
