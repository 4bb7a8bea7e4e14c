"""Broken: nothing is seeded at all, so each start has other weights and another order."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

centres = torch.tensor([[2.0, 2.0], [-2.0, 2.0], [0.0, -2.0]])
labels = torch.arange(48) % 3
points = centres[labels] + torch.linspace(-1, 1, 96).reshape(48, 2)
loader = DataLoader(TensorDataset(points, labels), batch_size=8, shuffle=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(2, 16)
        self.out = nn.Linear(16, 3)

    def forward(self, x):
        return self.out(nn.functional.relu(self.hidden(x)))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader, maximize="accuracy")
for epoch in state.epochs(5):
    model.train()
    for x, y in state.batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        accuracy = (model(points).argmax(1) == labels).float().mean()
    state.save(accuracy=accuracy)
    print(f"epoch {epoch + 1}/5, accuracy {accuracy:.3f}")
state.close()
