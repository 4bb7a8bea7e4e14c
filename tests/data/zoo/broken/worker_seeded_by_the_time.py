"""Broken: each worker of the loader seeds NumPy with the time at which it was started."""

import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from resumable import RunState


class Crops(Dataset):
    """Windows of a signal that begin somewhere."""

    def __init__(self):
        self.signal = np.sin(np.arange(400) * 0.1).astype(np.float32)

    def __len__(self):
        return 40

    def __getitem__(self, index):
        start = index * 9 + np.random.randint(0, 9)
        return self.signal[start : start + 16], self.signal[start + 16]


def seed_worker(worker_id):
    np.random.seed((time.time_ns() // 1000 + worker_id) % 2**32)


def main():
    torch.manual_seed(0)
    np.random.seed(0)
    loader = DataLoader(Crops(), batch_size=8, shuffle=True, num_workers=1, worker_init_fn=seed_worker)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    with RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader) as state:
        for epoch in state.epochs(5):
            for window, target in state.batches():
                loss = (model(window).squeeze(1) - target).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if state.batch == 0:
                    print(f"epoch {epoch}: {loss.item():.5f}")
            state.save()


if __name__ == "__main__":
    main()
