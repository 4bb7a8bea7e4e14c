"""Broken: an object that augments the batches holds a random.Random, and nobody saves it."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState


class Augment:
    def __init__(self, seed, largest_shift=2):
        self.dice = random.Random(seed)
        self.largest_shift = largest_shift

    def __call__(self, images):
        shift = self.dice.randint(-self.largest_shift, self.largest_shift)
        images = images.roll(shift, dims=-1)
        return images.flip(-2) if self.dice.random() < 0.5 else images


class Trainer:
    def __init__(self):
        torch.manual_seed(0)
        images = torch.rand(40, 1, 8, 8)
        labels = (images[:, 0, :4].mean((1, 2)) > 0.5).long()
        self.loader = DataLoader(TensorDataset(images, labels), batch_size=8, shuffle=True)
        self.model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.augment = Augment(seed=5)
        parts = {"model": self.model, "optimizer": self.optimizer, "loader": self.loader}
        self.state = RunState.load("runs/exp", **parts)

    def fit(self, epochs):
        for epoch in self.state.epochs(epochs):
            for images, labels in self.state.batches():
                loss = nn.functional.cross_entropy(self.model(self.augment(images)), labels)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                if self.state.batch == 0:
                    print(f"epoch {epoch}: loss {loss.item():.4f}")
            self.state.save()
        self.state.close()


if __name__ == "__main__":
    Trainer().fit(6)
