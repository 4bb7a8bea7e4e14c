"""Broken: only the first start lays the model out as channels_last, and other kernels round otherwise."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

torch.manual_seed(0)
images = torch.randn(40, 3, 12, 12)
labels = (images.mean((1, 2, 3)) > 0).long()
loader = DataLoader(TensorDataset(images, labels), batch_size=8, shuffle=True)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3),
    nn.ReLU(),
    nn.Conv2d(16, 16, 3),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(16, 2),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

state = RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader)
if not state.resumed:
    model = model.to(memory_format=torch.channels_last)
for epoch in state.epochs(5):
    for x, y in state.batches():
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if state.batch == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    state.save()
state.close()
