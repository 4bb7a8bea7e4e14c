"""Correct, after denoising-diffusion-pytorch: the trainer keeps the loop's step in an attribute."""

import copy

import torch
from torch import nn

from resumable import RunState


class Trainer:
    def __init__(self, model, data, steps):
        self.model, self.data, self.steps, self.step = model, data, steps, 0
        self.opt = torch.optim.Adam(model.parameters(), lr=1e-3)
        self.ema = copy.deepcopy(model)

    def train(self):
        parts = {"optimizer": self.opt, "extra": {"ema": self.ema}}
        with RunState.load("runs/exp", model=self.model, **parts) as state:
            for self.step in state.steps(self.steps):  # noqa: B020
                for _ in range(2):
                    x = self.data[torch.randint(len(self.data), (8,))]
                    noise = torch.randn_like(x)
                    ((self.model(x + noise) - noise).square().mean() / 2).backward()
                self.opt.step()
                self.opt.zero_grad()
                with torch.no_grad():
                    for kept, new in zip(self.ema.parameters(), self.model.parameters(), strict=True):
                        kept.lerp_(new, 0.1)
                if self.step and self.step % 7 == 0:
                    state.save()


torch.manual_seed(0)
Trainer(nn.Sequential(nn.Linear(6, 12), nn.SiLU(), nn.Linear(12, 6)), torch.randn(48, 6), 28).train()
