"""Broken, after pytorch/examples word_language_model: each epoch begins its hidden state, a resume too."""

import torch
from torch import nn

from resumable import RunState

BPTT = 5

torch.manual_seed(1111)
data = torch.randint(0, 12, (61, 4))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.out = nn.Embedding(12, 8), nn.RNN(8, 8), nn.Linear(8, 12)

    def forward(self, x, hidden):
        seen, hidden = self.rnn(self.embed(x), hidden)
        return self.out(seen), hidden


def train(state, model):
    hidden = torch.zeros(1, 4, 8)
    for i in state.batches(range(0, 60, BPTT)):
        out, hidden = model(data[i : i + BPTT], hidden.detach())
        model.zero_grad()
        nn.functional.cross_entropy(out.flatten(0, 1), data[i + 1 : i + 1 + BPTT].flatten()).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=-0.5)


model = Model()
with RunState.load("runs/exp", model=model) as state:
    for _ in state.epochs(4):
        train(state, model)
        state.save()
