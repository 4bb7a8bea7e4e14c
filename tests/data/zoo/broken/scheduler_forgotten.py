"""Broken: there is a scheduler, and RunState was not given it."""

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState


def train_one_epoch(state, model, optimizer):
    for x, y in state.batches():
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main():
    torch.manual_seed(0)
    x = torch.randn(48, 6)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.1)

    with RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader) as state:
        for epoch in state.epochs(5):
            train_one_epoch(state, model, optimizer)
            scheduler.step()
            state.save()
            print(f"epoch {epoch}: lr {optimizer.param_groups[0]['lr']:g}")


if __name__ == "__main__":
    main()
