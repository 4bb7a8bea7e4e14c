"""Broken: a moving average of the weights teaches the model, and no part of the run holds it."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState


class EMA:
    def __init__(self, model, decay):
        self.decay = decay
        self.shadow = {name: one.detach().clone() for name, one in model.named_parameters()}

    def update(self, model):
        for name, one in model.named_parameters():
            self.shadow[name].lerp_(one.detach(), 1 - self.decay)

    def teacher(self, model):
        teacher = copy.deepcopy(model)
        teacher.load_state_dict(self.shadow)
        return teacher.eval()


torch.manual_seed(0)
x = torch.randn(48, 8)
y = (x.sum(1) > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
ema = EMA(model, decay=0.9)

state = RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader)
for epoch in state.epochs(5):
    for inputs, labels in state.batches():
        with torch.no_grad():
            taught = ema.teacher(model)(inputs).softmax(1)
        outputs = model(inputs + 0.1 * torch.randn_like(inputs))
        loss = nn.functional.cross_entropy(outputs, labels)
        loss = loss + nn.functional.mse_loss(outputs.softmax(1), taught)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model)
        if state.batch == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    state.save()
state.close()
