"""Fine-tuning of a diffusion model: accumulation, an average of the weights, and noise of its own."""

import copy

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from resumable import RunState


class Pictures(Dataset):
    def __init__(self, size):
        self.pictures = torch.rand(size, 4)
        self.cache = {}

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        if index not in self.cache:
            self.cache[index] = self.pictures[index] * 2 - 1
        return self.cache[index]


class EMA:
    def __init__(self, model, decay):
        self.decay, self.optimization_step = decay, 0
        self.shadow_params = [p.clone().detach() for p in model.parameters()]

    @torch.no_grad()
    def step(self, parameters):
        self.optimization_step += 1
        decay = min(self.decay, (1 + self.optimization_step) / (10 + self.optimization_step))
        for shadow, parameter in zip(self.shadow_params, parameters, strict=True):
            shadow.sub_((1 - decay) * (shadow - parameter))

    def state_dict(self):
        state = {"decay": self.decay, "optimization_step": self.optimization_step}
        return {**state, "shadow_params": [p.clone() for p in self.shadow_params]}

    def load_state_dict(self, state):
        state = copy.deepcopy(state)
        self.decay, self.optimization_step = state["decay"], state["optimization_step"]
        self.shadow_params = state["shadow_params"]


class Unet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(5, 16), nn.Linear(16, 4)

    def forward(self, noisy, timesteps):
        return self.up(torch.tanh(self.down(torch.cat([noisy, timesteps[:, None]], 1))))


def main():
    torch.manual_seed(0)
    text_encoder = nn.Linear(4, 4).requires_grad_(False)
    unet = Unet()
    ema_unet = EMA(unet, 0.99)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    noise_generator = torch.Generator().manual_seed(1)
    timestep_rng = np.random.default_rng(2)
    loader = DataLoader(Pictures(32), batch_size=4, shuffle=True)
    state = RunState.load(
        "runs/exp",
        model=unet,
        optimizer=optimizer,
        scheduler=lr_scheduler,
        loader=loader,
        extra={"ema": ema_unet, "noise": noise_generator, "timesteps": timestep_rng},
    )
    lost = []
    for epoch in state.epochs(2):
        train_loss = 0.0
        for pictures in state.batches():
            latents = text_encoder(pictures)
            noise = torch.randn(latents.shape, generator=noise_generator)
            timesteps = torch.from_numpy(timestep_rng.random(len(latents), dtype=np.float32))
            noisy = latents + timesteps[:, None] * noise
            loss = nn.functional.mse_loss(unet(noisy, timesteps), noise) / 2
            train_loss += loss.item()
            loss.backward()
            if state.batch % 2 == 1:
                nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                ema_unet.step(unet.parameters())
            if state.batch % 4 == 2:
                lost = state.check()
        print(f"epoch {epoch}: {train_loss:.4f}")
        state.save()
    state.close()
    return lost


if __name__ == "__main__":
    lost = main()
