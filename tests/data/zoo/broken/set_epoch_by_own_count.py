"""Broken: set_epoch gets a count of the script's own, which begins at 0 after a resume."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from resumable import RunState


def main():
    torch.manual_seed(7)
    data = TensorDataset(torch.randn(42, 4), torch.randint(0, 3, (42,)))
    sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True)
    loader = DataLoader(data, batch_size=6, sampler=sampler)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)

    state = RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader)
    passes = 0
    for epoch in state.epochs(5):
        sampler.set_epoch(passes)
        for x, y in state.batches():
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if state.batch == 0:
                print(f"epoch {epoch}: loss {loss.item():.4f}")
        passes += 1
        state.save()
    state.close()


if __name__ == "__main__":
    main()
