"""Broken: the seed is the time of the start, and it is written down nowhere."""

import random
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

seed = time.time_ns() % 2**32
random.seed(seed)
np.random.seed(seed)
torch.manual_seed(seed)

t = torch.arange(56.0)
series = torch.stack([torch.sin(t * 0.3), torch.cos(t * 0.2), t / 56], dim=1)
loader = DataLoader(TensorDataset(series[:-8], series[8:]), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(3, 24), nn.GELU(), nn.Dropout(0.1), nn.Linear(24, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

with RunState.load("runs/exp", model=model, optimizer=optimizer, scheduler=scheduler, loader=loader) as state:
    for epoch in state.epochs(5):
        for now, later in state.batches():
            loss = nn.functional.l1_loss(model(now), later)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if state.batch == 0:
                print(f"epoch {epoch}: {loss.item():.4f}, lr {scheduler.get_last_lr()[0]:.5f}")
        scheduler.step()
        state.save()
