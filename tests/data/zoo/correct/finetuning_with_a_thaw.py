"""A frozen backbone in eval mode that is thawed at epoch 2, with a group of its own and a warm start."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU())
        self.head = nn.Linear(24, 2)

    def forward(self, x):
        return self.head(self.backbone(x))


torch.manual_seed(0)
x = torch.randn(48, 6)
y = (x[:, 0] > x[:, 1]).long()
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = Net()
model.backbone.requires_grad_(False)
optimizer = torch.optim.AdamW(
    [{"params": model.head.parameters(), "lr": 1e-2}, {"params": model.backbone.parameters(), "lr": 1e-3}]
)
schedule = torch.optim.lr_scheduler.SequentialLR(
    optimizer,
    [
        torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6),
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97),
    ],
    milestones=[6],
)

state = RunState.load("runs/exp", model=model, optimizer=optimizer, scheduler=schedule, loader=loader)
if not state.resumed:
    with torch.no_grad():
        model.backbone[0].weight.mul_(0.5)
for epoch in state.epochs(5):
    model.train()
    if epoch < 2:
        model.backbone.eval()
    else:
        model.backbone.requires_grad_(True)
    for inputs, labels in state.batches():
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if state.batch == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    state.save()
state.close()
