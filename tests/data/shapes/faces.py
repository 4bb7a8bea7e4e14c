"""A GAN in the shape of the DCGAN tutorial: two networks, two optimizers, curves, pictures of one noise."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

torch.manual_seed(999)
nz = 8
dataloader = DataLoader(TensorDataset(torch.rand(48, 16)), batch_size=8, shuffle=True)
net_g = nn.Sequential(nn.Linear(nz, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 16))
net_d = nn.Sequential(nn.Linear(16, 16), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(16, 1))
criterion = nn.BCEWithLogitsLoss()
fixed_noise = torch.randn(4, nz)
real_label, fake_label = 1.0, 0.0
optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-4, betas=(0.5, 0.999))
state = RunState.load(
    "runs/exp",
    model={"G": net_g, "D": net_d},
    optimizer={"G": optimizer_g, "D": optimizer_d},
    loader=dataloader,
)

img_list, g_losses, d_losses = [], [], []
iters = state.step
lost = []
for epoch in state.epochs(2):
    for i, data in state.enumerate():
        net_d.zero_grad()
        real = data[0]
        label = torch.full((len(real),), real_label)
        err_d_real = criterion(net_d(real).view(-1), label)
        err_d_real.backward()
        d_x = net_d(real).mean().item()
        noise = torch.randn(len(real), nz)
        fake = net_g(noise)
        label.fill_(fake_label)
        err_d_fake = criterion(net_d(fake.detach()).view(-1), label)
        err_d_fake.backward()
        err_d = err_d_real + err_d_fake
        optimizer_d.step()

        net_g.zero_grad()
        label.fill_(real_label)
        err_g = criterion(net_d(fake).view(-1), label)
        err_g.backward()
        optimizer_g.step()
        if i % 3 == 0:
            print(f"[{epoch}][{i}/{len(dataloader)}] {err_d.item():.4f} {err_g.item():.4f} D(x) {d_x:.4f}")
        g_losses.append(err_g.item())
        d_losses.append(err_d.item())
        if iters % 4 == 0:
            with torch.no_grad():
                img_list.append(net_g(fixed_noise).detach().cpu())
        iters += 1
        if i % 3 == 1:
            lost = state.check()
state.close()
