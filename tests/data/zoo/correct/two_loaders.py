"""Semi-supervised: two loaders of different lengths in one loop, each in its own order."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

torch.manual_seed(0)
x = torch.randn(88, 6)
y = (x[:, 0] > 0).long()
loaders = {
    "labelled": DataLoader(TensorDataset(x[:40], y[:40]), batch_size=8, shuffle=True),
    "unlabelled": DataLoader(TensorDataset(x[40:]), batch_size=8, shuffle=True, drop_last=True),
}
model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

with RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loaders) as state:
    for epoch in state.epochs(5):
        pairs = zip(state.batches("labelled"), state.batches("unlabelled"))
        for (inputs, labels), (others,) in pairs:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss = loss + 0.1 * nn.functional.mse_loss(model(others), model(others))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if state.batch == 0:
                print(f"epoch {epoch}: {loss.item():.4f}")
        state.save()
