"""Broken: the last layer is initialised after load, which throws away what load has put there."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState


class Classifier(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 24), nn.ReLU())
        self.head = nn.Linear(24, classes)

    def forward(self, x):
        return self.head(self.body(x))

    def reset_head(self):
        nn.init.zeros_(self.head.bias)
        nn.init.constant_(self.head.weight, 0.01)


torch.manual_seed(0)
x = torch.randn(48, 6)
y = x[:, :3].argmax(1)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = Classifier(3)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

state = RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader)
model.reset_head()
for epoch in state.epochs(5):
    for inputs, labels in state.batches():
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if state.batch == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    state.save()
state.close()
