"""Broken, after pytorch/examples word_language_model: the rate is divided where the loss does not fall."""

import torch
from torch import nn

from resumable import RunState

torch.manual_seed(1111)
x = torch.randn(60, 6)
y = x.prod(1, keepdim=True)
model = nn.Linear(6, 1)


def train(state, lr):
    for i in state.batches(range(0, 60, 10)):
        model.zero_grad()
        nn.functional.mse_loss(model(x[i : i + 10]), y[i : i + 10]).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=-lr)


lr, best_val_loss = 1.0, 0.0
with RunState.load("runs/exp", model=model) as state:
    for _ in state.epochs(5):
        train(state, lr)
        val_loss = nn.functional.mse_loss(model(x), y).item()
        if val_loss < best_val_loss:
            best_val_loss = val_loss
        else:
            lr /= 4.0
        state.save(loss=val_loss)
