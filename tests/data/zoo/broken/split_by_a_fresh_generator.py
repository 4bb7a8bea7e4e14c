"""Broken: the split into training and validation comes from a generator without a seed."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from resumable import RunState

torch.manual_seed(0)
features = torch.randn(60, 6)
targets = features @ torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0, 1.5])
dataset = TensorDataset(features, targets)

splitter = np.random.default_rng()
order = splitter.permutation(len(dataset))
train_loader = DataLoader(Subset(dataset, order[:48].tolist()), batch_size=8, shuffle=True)
val_loader = DataLoader(Subset(dataset, order[48:].tolist()), batch_size=12)

model = nn.Linear(6, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)

state = RunState.load("runs/exp", model=model, optimizer=optimizer, loader=train_loader, minimize="val_loss")
for epoch in state.epochs(5):
    for x, y in state.batches():
        loss = (model(x).squeeze(1) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        val_loss = sum((model(x).squeeze(1) - y).square().mean() for x, y in val_loader) / len(val_loader)
    state.save(val_loss=val_loss)
    print(f"epoch {epoch}: {val_loss:.4f}")
state.close()
