"""Broken: the training draws its batches from a generator that only the script knows."""

import torch
from torch import nn

from resumable import RunState

torch.manual_seed(1337)
data = torch.randint(0, 20, (500,))
picker = torch.Generator()
picker.manual_seed(1337)


def get_batch(block=8, size=6):
    starts = torch.randint(len(data) - block - 1, (size,), generator=picker)
    x = torch.stack([data[i : i + block] for i in starts])
    y = torch.stack([data[i + 1 : i + 1 + block] for i in starts])
    return x, y


class TinyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.rnn = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 20)

    def forward(self, x):
        return self.head(self.rnn(self.embed(x))[0])


model = TinyModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
state = RunState.load("runs/exp", model=model, optimizer=optimizer, every=7, minimize="loss")
for step in state.steps(28):
    x, y = get_batch()
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if state.step % 7 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
state.close()
