"""The shape of PyTorch's DCGAN example: two models, two optimizers, a fixed noise to look at."""

import torch
from digest import print_digest
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

EPOCHS, NZ = 3, 4


def weights_init(module):
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, 0.0, 0.2)


torch.set_num_threads(1)
torch.manual_seed(999)
dataset = TensorDataset(torch.randn(80, 8).cumsum(1))
dataloader = DataLoader(dataset, batch_size=8, shuffle=True)
netG = nn.Sequential(nn.Linear(NZ, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
netG.apply(weights_init)
netD = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1), nn.Sigmoid(), nn.Flatten(0))
netD.apply(weights_init)
criterion = nn.BCELoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=0.002, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=0.002, betas=(0.5, 0.999))
state = RunState.load(
    "runs/dcgan",
    model={"G": netG, "D": netD},
    optimizer={"D": optimizerD, "G": optimizerG},
    loader=dataloader,
    every=3,
)
fixed_noise = torch.randn(8, NZ)
real_label, fake_label = 1.0, 0.0

for epoch in state.epochs(EPOCHS):
    for i, (real,) in state.enumerate():
        # (1) Update D: maximize log(D(x)) + log(1 - D(G(z)))
        netD.zero_grad()
        label = torch.full((len(real),), real_label)
        output = netD(real)
        errD_real = criterion(output, label)
        errD_real.backward()
        D_x = output.mean().item()
        fake = netG(torch.randn(len(real), NZ))
        label.fill_(fake_label)
        errD_fake = criterion(netD(fake.detach()), label)
        errD_fake.backward()
        optimizerD.step()

        # (2) Update G: maximize log(D(G(z)))
        netG.zero_grad()
        label.fill_(real_label)
        errG = criterion(netD(fake), label)
        errG.backward()
        optimizerG.step()

        if i % 4 == 0:
            errD = errD_real + errD_fake
            print(f"[{epoch}/{EPOCHS}][{i}/{len(dataloader)}] {errD.item():.4f} {errG.item():.4f} {D_x:.4f}")
            print(f"[{epoch}/{EPOCHS}][{i}/{len(dataloader)}] samples {netG(fixed_noise).sum().item():.6f}")
    state.save()
state.close()
print_digest(G=netG, D=netD, optimizerG=optimizerG, optimizerD=optimizerD, fixed_noise=fixed_noise)
