"""Broken: NumPy's generator adds noise to the batches, and only torch's was seeded."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState


def jitter(batch, amount=0.1):
    return batch + amount * torch.from_numpy(np.random.randn(*batch.shape).astype(np.float32))


def main():
    torch.manual_seed(42)
    x = torch.linspace(-3, 3, 40).unsqueeze(1)
    loader = DataLoader(TensorDataset(x, x.sin()), batch_size=8, shuffle=True)
    net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

    with RunState.load("runs/exp", model=net, optimizer=optimizer, loader=loader) as state:
        for epoch in state.epochs(6):
            total = 0.0
            for inputs, targets in state.batches():
                loss = nn.functional.mse_loss(net(jitter(inputs)), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item()
            state.save()
            print(epoch, total / len(loader))


if __name__ == "__main__":
    main()
