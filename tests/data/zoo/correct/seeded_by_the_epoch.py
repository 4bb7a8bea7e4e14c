"""A DistributedSampler told its epoch, a seed for each epoch, shuffled validation, and draws before load."""

import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from resumable import RunState


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def main():
    set_seed(0)
    x = torch.randn(64, 4)
    order = np.random.permutation(64)
    x, y = x[order], (x[order].sum(1) > 0).float().unsqueeze(1)
    data = TensorDataset(x[:48], y[:48])
    sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True, seed=3)
    train_loader = DataLoader(data, batch_size=8, sampler=sampler)
    val_loader = DataLoader(TensorDataset(x[48:], y[48:]), batch_size=4, shuffle=True)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    torch.rand(random.randrange(100))

    state = RunState.load("runs/exp", model=model, optimizer=optimizer, loader=train_loader)
    for epoch in state.epochs(5):
        sampler.set_epoch(epoch)
        set_seed(epoch)
        model.train()
        for inputs, labels in state.batches():
            noise = torch.from_numpy(np.random.normal(0, 0.1, inputs.shape)).float()
            loss = nn.functional.binary_cross_entropy_with_logits(model(inputs + noise), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            first, wanted = next(iter(val_loader))
            val_loss = nn.functional.binary_cross_entropy_with_logits(model(first), wanted)
        state.save(val_loss=val_loss)
        print(f"epoch {epoch}: {val_loss:.4f}")
    state.close()


if __name__ == "__main__":
    main()
