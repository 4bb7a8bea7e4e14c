"""Broken: the state_dict of an average that is given leaves out how often it was updated."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState


class LossScale:
    """Divides each loss by a moving average of the losses, corrected for its start."""

    def __init__(self, beta=0.9):
        self.beta = beta
        self.mean = 0.0
        self.seen = 0

    def __call__(self, loss):
        self.seen += 1
        self.mean = self.beta * self.mean + (1 - self.beta) * loss.item()
        return loss / (self.mean / (1 - self.beta**self.seen))

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state):
        self.mean = state["mean"]


torch.manual_seed(0)
x = torch.randn(48, 4)
y = 5 * x.square().sum(1, keepdim=True)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loss_scale = LossScale()
parts = {"model": model, "optimizer": optimizer, "loader": loader}

with RunState.load("runs/exp", **parts, extra={"loss_scale": loss_scale}) as state:
    for epoch in state.epochs(5):
        for inputs, targets in state.batches():
            loss = loss_scale(nn.functional.mse_loss(model(inputs), targets))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        state.save()
        print(f"epoch {epoch}: {loss_scale.mean:.3f}")
