"""A GAN: two models, two optimizers, noise from torch's generator, faces to look at from a fixed seed."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

torch.manual_seed(0)
angle = torch.rand(48) * 6.283
points = torch.stack([angle.cos(), angle.sin()], dim=1)
loader = DataLoader(TensorDataset(points), batch_size=8, shuffle=True)
models = {
    "generator": nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)),
    "critic": nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)),
}
optimizers = {name: torch.optim.Adam(one.parameters(), 2e-3, (0.5, 0.999)) for name, one in models.items()}
fixed_noise = torch.randn(3, 4, generator=torch.Generator().manual_seed(5))
softplus = nn.functional.softplus
losses = []

state = RunState.load("runs/exp", model=models, optimizer=optimizers, loader=loader)
for epoch in state.epochs(5):
    for (real,) in state.batches():
        generator, critic = models["generator"], models["critic"]
        fake = generator(torch.randn(len(real), 4))
        loss_d = softplus(-critic(real)).mean() + softplus(critic(fake.detach())).mean()
        optimizers["critic"].zero_grad()
        loss_d.backward()
        optimizers["critic"].step()

        loss_g = softplus(-critic(fake)).mean()
        optimizers["generator"].zero_grad()
        loss_g.backward()
        optimizers["generator"].step()
        losses.append((loss_d.item(), loss_g.item()))
    state.save()
    with torch.no_grad():
        shown = models["generator"](fixed_noise).tolist()
    print(f"epoch {epoch}: {shown[0]}")
state.close()
