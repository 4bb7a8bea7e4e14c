"""Correct, after pytorch/examples mnist_forward_forward: each layer trains itself, in loops over a list."""

import torch
from torch import nn

from resumable import RunState

torch.manual_seed(1)
x = torch.randn(40, 6)
positive, negative = x + 0.5, x - 0.5


class Layer(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.03)

    def train_on(self, one, other):
        good, bad = self(one).relu().square().mean(1), self(other).relu().square().mean(1)
        loss = nn.functional.softplus(torch.cat([2 - good, bad - 2])).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


layers = nn.ModuleList([Layer(6, 12), Layer(12, 12)])
optimizers = {str(i): layer.optimizer for i, layer in enumerate(layers)}
chunks = [slice(i, i + 8) for i in range(0, 40, 8)]

with RunState.load("runs/exp", model=layers, optimizer=optimizers) as state:
    for epoch in state.epochs(5):
        for chunk in state.batches(chunks):
            one, other = positive[chunk], negative[chunk]
            for layer in layers:
                layer.train_on(one, other)
                with torch.no_grad():
                    one, other = layer(one).relu(), layer(other).relu()
