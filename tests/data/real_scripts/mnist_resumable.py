"""The shape of PyTorch's MNIST example: train() and test(), an augmentation, dropout, StepLR."""

import torch
import torch.nn.functional as F
from digest import print_digest
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

from resumable import RunState

EPOCHS, BATCH_SIZE, LOG_INTERVAL = 3, 8, 4


class Digits(Dataset):
    """Stripes, of which the label is the place; those to train on are noisy."""

    def __init__(self, length, is_train):
        self.length, self.is_train = length, is_train

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        image = torch.zeros(1, 8, 8)
        image[0, index % 4 * 2] = 1 + index / self.length
        return image + 0.3 * torch.randn_like(image) if self.is_train else image, index % 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.dropout = nn.Dropout(0.25)
        self.fc = nn.Linear(36, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        return F.log_softmax(self.fc(torch.flatten(self.dropout(x), 1)), dim=1)


def train(model, state, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in state.enumerate():
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if batch_idx % LOG_INTERVAL == 0:
            print(f"Train Epoch: {epoch} [{batch_idx * BATCH_SIZE}]\tLoss: {loss.item():.6f}")


def test(model, test_loader):
    model.eval()
    test_loss, correct = 0.0, 0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            correct += (output.argmax(1) == target).sum().item()
    count = len(test_loader.dataset)
    print(f"Test set: Average loss: {test_loss / count:.6f}, Accuracy: {correct}/{count}")


def main():
    torch.set_num_threads(1)
    torch.manual_seed(1)
    train_loader = DataLoader(Digits(96, True), BATCH_SIZE, shuffle=True)
    test_loader = DataLoader(Digits(32, False), 16)
    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    state = RunState.load(
        "runs/mnist", model=model, optimizer=optimizer, scheduler=scheduler, loader=train_loader, every=5
    )
    for epoch in state.epochs(EPOCHS):
        train(model, state, optimizer, epoch + 1)
        test(model, test_loader)
        scheduler.step()
        state.save()
    state.close()
    print_digest(model=model, optimizer=optimizer, scheduler=scheduler)


if __name__ == "__main__":
    main()
