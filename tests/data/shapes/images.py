"""A classifier in the shape of the ImageNet example: meters, a function for each pass, the best accuracy."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState


class AverageMeter:
    def __init__(self, name):
        self.name = name
        self.reset()

    def reset(self):
        self.last = self.average = self.sum = self.count = 0

    def update(self, value, n=1):
        self.last = value
        self.sum += value * n
        self.count += n
        self.average = self.sum / self.count

    def __str__(self):
        return f"{self.name} {self.last:.3f} ({self.average:.3f})"


def train(state, model, criterion, optimizer, scheduler):
    batch_time, losses = AverageMeter("time"), AverageMeter("loss")
    model.train()
    end = time.time()
    for i, (images, target) in state.enumerate():
        loss = criterion(model(images), target)
        losses.update(loss.item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batch_time.update(time.time() - end)
        end = time.time()
        if i % 2 == 0:
            print(i, batch_time, losses)
    scheduler.step()


def validate(loader, model):
    top1 = AverageMeter("accuracy")
    model.eval()
    with torch.no_grad():
        for images, target in loader:
            right = (model(images).argmax(1) == target).float().mean()
            top1.update(right.item(), images.size(0))
    return top1.average


def main():
    torch.manual_seed(0)
    images = torch.randn(60, 3, 8, 8)
    target = (images.mean((1, 2, 3)) > 0).long()
    train_loader = DataLoader(TensorDataset(images[:40], target[:40]), batch_size=10, shuffle=True)
    val_loader = DataLoader(TensorDataset(images[40:], target[40:]), batch_size=10)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    state = RunState.load(
        "runs/exp",
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=train_loader,
        maximize="accuracy",
    )
    lost = []
    for epoch in state.epochs(3):
        train(state, model, criterion, optimizer, scheduler)
        accuracy = validate(val_loader, model)
        lost = state.check()
        state.save(accuracy=accuracy)
        print(epoch, accuracy, state.best)
    state.close()
    return lost


if __name__ == "__main__":
    lost = main()
