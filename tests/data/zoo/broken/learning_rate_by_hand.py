"""Broken: the learning rate decays in a variable, from which each epoch sets that of the optimizer."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState


def set_lr(optimizer, value):
    for group in optimizer.param_groups:
        group["lr"] = value


def main():
    torch.manual_seed(0)
    x = torch.randn(48, 7)
    y = x.sort(dim=1).values
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(7, 32), nn.ReLU(), nn.Linear(32, 7))
    rate = 0.1
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    state = RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader)
    for epoch in state.epochs(5):
        set_lr(optimizer, rate)
        for inputs, targets in state.batches():
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if state.batch == 0:
                print(f"epoch {epoch}: loss {loss.item():.4f}")
        rate *= 0.7
        state.save()
    state.close()


if __name__ == "__main__":
    main()
