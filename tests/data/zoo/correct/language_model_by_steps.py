"""A loop of steps without a loader: batches drawn at random, accumulation, clipping, a rate by the step."""

import math

import numpy as np
import torch
from torch import nn

from resumable import RunState

BLOCK, BATCH, ACCUMULATE, STEPS = 8, 4, 2, 30
text = "it was the best of times it was the worst of times it was the age of wisdom " * 3
letters = sorted(set(text))
tokens = np.array([letters.index(letter) for letter in text])


def get_batch():
    starts = torch.randint(len(tokens) - BLOCK, (BATCH,))
    x = torch.stack([torch.from_numpy(tokens[i : i + BLOCK]) for i in starts])
    y = torch.stack([torch.from_numpy(tokens[i + 1 : i + 1 + BLOCK]) for i in starts])
    return x, y


def rate_at(step):
    if step < 5:
        return 1e-2 * (step + 1) / 5
    return 1e-3 + 0.5 * 9e-3 * (1 + math.cos(math.pi * step / STEPS))


torch.manual_seed(1337)
model = nn.Sequential(
    nn.Embedding(len(letters), 16),
    nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True),
    nn.Linear(16, len(letters)),
)
optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
state = RunState.load("runs/exp", model=model, optimizer=optimizer, minimize="loss")
for step in state.steps(STEPS):
    for group in optimizer.param_groups:
        group["lr"] = rate_at(step)
    optimizer.zero_grad(set_to_none=True)
    for _ in range(ACCUMULATE):
        x, y = get_batch()
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        (loss / ACCUMULATE).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if state.step % 10 == 0:
        state.save(loss=loss.item())
        print(f"step {state.step}: loss {loss.item():.4f}")
state.close()
