"""Broken: the head has an optimizer of its own, and RunState was given that of the backbone only."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

torch.manual_seed(0)
x = torch.randn(48, 10)
y = (x[:, :5].norm(dim=1) > x[:, 5:].norm(dim=1)).long()
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
backbone = nn.Sequential(nn.Linear(10, 32), nn.ReLU())
head = nn.Linear(32, 2)
model = nn.Sequential(backbone, head)
backbone_optimizer = torch.optim.AdamW(backbone.parameters(), lr=1e-3)
head_optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)

state = RunState.load(
    "runs/exp", model=model, optimizer=backbone_optimizer, loader=loader, maximize="accuracy"
)
for epoch in state.epochs(5):
    for inputs, labels in state.batches():
        loss = nn.functional.cross_entropy(model(inputs), labels)
        backbone_optimizer.zero_grad()
        head_optimizer.zero_grad()
        loss.backward()
        backbone_optimizer.step()
        head_optimizer.step()
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == y).float().mean()
    state.save(accuracy=accuracy)
    print(f"epoch {epoch}: {accuracy:.3f}")
state.close()
