"""Workers that augment by three generators, another for validation, and images cached as they are read."""

import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from resumable import RunState


class Images(Dataset):
    def __init__(self, first, count, augment):
        self.first, self.count, self.augment = first, count, augment
        self.cache = {}

    def __len__(self):
        return self.count

    def read(self, index):
        generator = np.random.default_rng(self.first + index)
        return torch.from_numpy(generator.random((1, 8, 8), dtype=np.float32))

    def __getitem__(self, index):
        if index not in self.cache:
            self.cache[index] = self.read(index)
        image, label = self.cache[index], int(self.cache[index].mean() > 0.5)
        if self.augment:
            if random.random() < 0.5:
                image = image.flip(-1)
            image = image.roll(np.random.randint(-1, 2), -1) + 0.05 * torch.randn(1, 8, 8)
        return image, label


def main():
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    train_loader = DataLoader(Images(0, 40, True), batch_size=8, shuffle=True, num_workers=2)
    val_loader = DataLoader(Images(40, 16, False), batch_size=16)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    with RunState.load("runs/exp", model=model, optimizer=optimizer, loader=train_loader) as state:
        for epoch in state.epochs(5):
            for images, labels in state.batches():
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                val_loss = sum(nn.functional.cross_entropy(model(x), y).item() for x, y in val_loader)
            state.save(val_loss=val_loss)
            print(f"epoch {epoch}: {val_loss:.4f}")


if __name__ == "__main__":
    main()
