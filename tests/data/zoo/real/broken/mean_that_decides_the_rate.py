"""Broken, after timm's train.py: an AverageMeter of the epoch decides what the scheduler does."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

torch.manual_seed(42)
x = torch.randn(60, 6)
y = x.prod(1, keepdim=True)
model = nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
lr_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.3)
loader_train = DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)


class AverageMeter:
    """timm's."""

    def __init__(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


def train_one_epoch(state):
    losses_m = AverageMeter()
    for input, target in state.batches():
        loss = nn.functional.mse_loss(model(input), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses_m.update(loss.item(), input.size(0))
    return losses_m.avg


with RunState.load(
    "runs/exp", model=model, optimizer=optimizer, scheduler=lr_scheduler, loader=loader_train
) as state:
    for _ in state.epochs(5):
        metric = train_one_epoch(state)
        lr_scheduler.step(metric)
        state.save(loss=metric)
