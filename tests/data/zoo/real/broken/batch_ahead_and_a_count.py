"""Broken, after nanoGPT: the next batch is fetched ahead, beside counts that do not matter."""

import time

import torch
from torch import nn

from resumable import RunState

torch.manual_seed(1337)
data = torch.randint(0, 20, (500,))


def get_batch():
    starts = torch.randint(len(data) - 9, (4,))
    return torch.stack([data[i : i + 8] for i in starts]), torch.stack([data[i + 1 : i + 9] for i in starts])


model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
state = RunState.load("runs/exp", model=model, optimizer=optimizer, every=10)
best_val_loss, local_iter_num, t0 = 1e9, 0, time.time()
X, Y = get_batch()
for iter_num in state.steps(30):
    loss = nn.functional.cross_entropy(model(X).flatten(0, 1), Y.flatten())
    X, Y = get_batch()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    t0, dt = time.time(), time.time() - t0
    if iter_num % 5 == 0:
        best_val_loss = min(best_val_loss, loss.item())
        print(f"iter {iter_num}: loss {best_val_loss:.4f}, {dt if local_iter_num >= 5 else 0:.3f} s")
    local_iter_num += 1
state.close()
