"""A moving average teaches the model: a class with a state, in extra beside a generator for noise."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState


class Teacher:
    def __init__(self, model, decay):
        self.decay = decay
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.updates = 0

    def update(self, model):
        self.updates += 1
        decay = min(self.decay, self.updates / (self.updates + 10))
        for mine, other in zip(self.model.parameters(), model.parameters(), strict=True):
            mine.lerp_(other.detach(), 1 - decay)

    def state_dict(self):
        return {"model": self.model.state_dict(), "updates": self.updates}

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"])
        self.updates = state["updates"]


torch.manual_seed(0)
x = torch.randn(48, 8)
y = (x.sum(1) > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
teacher = Teacher(model, decay=0.99)
noise = torch.Generator().manual_seed(4)
extra = {"teacher": teacher, "noise": noise}

with RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader, extra=extra) as state:
    for epoch in state.epochs(5):
        for inputs, labels in state.batches():
            outputs = model(inputs + 0.1 * torch.randn(inputs.shape, generator=noise))
            loss = nn.functional.cross_entropy(outputs, labels)
            loss = loss + nn.functional.mse_loss(outputs.softmax(1), teacher.model(inputs).softmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            teacher.update(model)
            if state.batch == 0:
                print(f"epoch {epoch}: loss {loss.item():.4f}")
        state.save()
