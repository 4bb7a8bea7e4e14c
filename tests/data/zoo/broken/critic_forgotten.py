"""Broken: of a GAN only the generator and its optimizer are given."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

torch.manual_seed(0)
angle = torch.rand(48) * 6.283
loader = DataLoader(TensorDataset(torch.stack([angle.cos(), angle.sin()], dim=1)), batch_size=8, shuffle=True)
generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
opt_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
softplus = nn.functional.softplus

state = RunState.load("runs/exp", model=generator, optimizer=opt_g, loader=loader)
for epoch in state.epochs(5):
    for (real,) in state.batches():
        fake = generator(torch.randn(len(real), 4))
        loss_d = softplus(-critic(real)).mean() + softplus(critic(fake.detach())).mean()
        opt_d.zero_grad()
        loss_d.backward()
        opt_d.step()

        loss_g = softplus(-critic(fake)).mean()
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
        if state.batch == 5:
            print(f"epoch {epoch}: D {loss_d.item():.3f}, G {loss_g.item():.3f}")
    state.save()
state.close()
