"""Correct, after accelerate's gradient_accumulation: the accelerator counts, and is put back."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

torch.manual_seed(42)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
x = torch.randn(96, 6)
y = (x[:, 0] > 0).long()
loader = DataLoader(TensorDataset(x[:80], y[:80]), batch_size=8, shuffle=True)
eval_dataloader = DataLoader(TensorDataset(x[80:], y[80:]), batch_size=8)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, eval_dataloader = accelerator.prepare(model, optimizer, eval_dataloader)

with RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader) as state:
    for epoch in state.epochs(4):
        model.train()
        for inputs, labels in state.batches():
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        for inputs, labels in eval_dataloader:
            with torch.no_grad():
                model(inputs)
        state.save()
