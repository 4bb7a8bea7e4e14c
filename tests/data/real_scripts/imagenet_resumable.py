"""The shape of PyTorch's ImageNet example with --dummy: meters, workers, validate(), the best kept."""

import torch
from digest import print_digest
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

from resumable import RunState

EPOCHS, PRINT_FREQ = 3, 3


class FakeData(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.randn(3, 8, 8) + index % 4, index % 4


class AverageMeter:
    """Computes and stores the average and current value."""

    def __init__(self, name, fmt):
        self.name, self.fmt = name, fmt
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def __str__(self):
        return f"{self.name} {self.val:{self.fmt}} ({self.avg:{self.fmt}})"


class ProgressMeter:
    def __init__(self, num_batches, meters, prefix):
        self.num_batches, self.meters, self.prefix = num_batches, meters, prefix

    def display(self, batch):
        print("\t".join([f"{self.prefix}[{batch}/{self.num_batches}]", *map(str, self.meters)]))


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean().item() * 100


def train(train_loader, model, criterion, optimizer, epoch):
    losses, top1 = AverageMeter("Loss", ".4e"), AverageMeter("Acc@1", "6.2f")
    progress = ProgressMeter(len(train_loader), [losses, top1], f"Epoch: [{epoch}]")
    model.train()
    for i, (images, target) in state.enumerate():
        output = model(images)
        loss = criterion(output, target)
        acc1 = accuracy(output, target)
        losses.update(loss.item(), images.size(0))
        top1.update(acc1, images.size(0))
        state.mean(loss=loss, acc1=acc1, weight=images.size(0))
        losses.avg, top1.avg = state.means["loss"], state.means["acc1"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % PRINT_FREQ == 0:
            progress.display(i + 1)


def validate(val_loader, model, criterion, epoch):
    losses, top1 = AverageMeter("Loss", ".4e"), AverageMeter("Acc@1", "6.2f")
    progress = ProgressMeter(len(val_loader), [losses, top1], f"Test: [{epoch}]")
    model.eval()
    with torch.no_grad():
        for i, (images, target) in enumerate(val_loader):
            output = model(images)
            losses.update(criterion(output, target).item(), images.size(0))
            top1.update(accuracy(output, target), images.size(0))
            progress.display(i + 1)
    return top1.avg


torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
    *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(8, 4)),
)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
scheduler = StepLR(optimizer, step_size=2, gamma=0.1)
train_loader = DataLoader(FakeData(78), batch_size=8, shuffle=True, num_workers=1)
val_loader = DataLoader(FakeData(24), batch_size=8, num_workers=1)
state = RunState.load(
    "runs/imagenet",
    model=model,
    optimizer=optimizer,
    scheduler=scheduler,
    loader=train_loader,
    maximize="acc1",
    every=4,
)
for epoch in state.epochs(EPOCHS):
    train(train_loader, model, criterion, optimizer, epoch)
    acc1 = validate(val_loader, model, criterion, epoch)
    scheduler.step()
    state.save(acc1=acc1)
state.close()
print_digest(model=model, optimizer=optimizer, scheduler=scheduler)
