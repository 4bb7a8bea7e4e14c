"""Broken, after accelerate's gradient_accumulation: an object of a library counts, and is in no part."""

import sys
import types

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

library = types.ModuleType("accumulating_installed")
library.__file__ = "/usr/lib/python3/site-packages/accumulating_installed/__init__.py"
sys.modules[library.__name__] = library
exec(
    """
class Accelerator:
    def __init__(self, steps):
        self.steps, self.step = steps, 0
    def is_over(self):
        self.step += 1
        return self.step % self.steps == 0
""",
    library.__dict__,
)
accelerator = library.Accelerator(4)

torch.manual_seed(42)
x = torch.randn(80, 6)
loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
with RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader) as state:
    for epoch in state.epochs(4):
        for inputs, labels in state.batches():
            nn.functional.cross_entropy(model(inputs), labels).backward()
            if accelerator.is_over():
                optimizer.step()
                optimizer.zero_grad()
        state.save()
