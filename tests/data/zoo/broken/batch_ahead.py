"""Broken: the next batch is fetched before the step that ends, and is lost with the process."""

import numpy as np
import torch
from torch import nn

from resumable import RunState

BLOCK, BATCH = 8, 6
text = "to be or not to be that is the question whether tis nobler in the mind to suffer " * 4
alphabet = sorted(set(text))
tokens = np.array([alphabet.index(letter) for letter in text], dtype=np.int64)


def get_batch():
    starts = torch.randint(len(tokens) - BLOCK - 1, (BATCH,))
    x = torch.stack([torch.from_numpy(tokens[i : i + BLOCK]) for i in starts])
    y = torch.stack([torch.from_numpy(tokens[i + 1 : i + 1 + BLOCK]) for i in starts])
    return x, y


torch.manual_seed(1337)
model = nn.Sequential(nn.Embedding(len(alphabet), 16), nn.Linear(16, len(alphabet)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
state = RunState.load("runs/exp", model=model, optimizer=optimizer, every=10, minimize="loss")

x, y = get_batch()
for step in state.steps(30):
    logits = model(x)
    loss = nn.functional.cross_entropy(logits.view(-1, len(alphabet)), y.view(-1))
    x, y = get_batch()  # while the GPU is busy with the last one
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
state.close()
