"""Correct, after nanoGPT: a count of this process decides only what is printed."""

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
local_iter_num, running_mfu, t0 = 0, -1.0, time.time()
for iter_num in state.steps(30):
    x, y = get_batch()
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    t0, dt = time.time(), time.time() - t0
    if iter_num % 5 == 0:
        if local_iter_num >= 5:  # let the training loop settle a bit
            running_mfu = 0.1 / dt if running_mfu == -1.0 else 0.9 * running_mfu + 0.1 / dt
        print(f"iter {iter_num}: loss {loss.item():.4f}, mfu {running_mfu:.2f}")
    local_iter_num += 1
state.close()
