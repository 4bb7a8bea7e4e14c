"""Broken: samples with a high loss are drawn more often, and the weights for that are kept nowhere."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from resumable import RunState

torch.manual_seed(3)
x = torch.randn(40, 4)
y = (x[:, 0] * x[:, 1] > 0).long()
sampler = WeightedRandomSampler(torch.ones(len(x)), num_samples=len(x))
loader = DataLoader(TensorDataset(x, y), batch_size=8, sampler=sampler)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

state = RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader)
for epoch in state.epochs(6):
    for inputs, labels in state.batches():
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        losses = nn.functional.cross_entropy(model(x), y, reduction="none")
    sampler.weights = 0.1 + losses.double() ** 2
    state.save()
    print(f"epoch {epoch}: hardest {losses.max():.3f}")
state.close()
