"""Broken, after pytorch/examples mnist: the scheduler of main() is not given."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState


def train(model, state, optimizer):
    model.train()
    for data, target in state.batches():
        optimizer.zero_grad()
        loss = nn.functional.nll_loss(model(data).log_softmax(1), target)
        loss.backward()
        optimizer.step()


def main():
    torch.manual_seed(1)
    x = torch.randn(48, 8)
    loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.25), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
    state = RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader)
    for _ in state.epochs(5):
        train(model, state, optimizer)
        scheduler.step()
        state.save()
    state.close()


if __name__ == "__main__":
    main()
