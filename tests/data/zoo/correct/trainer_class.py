"""A Trainer that holds everything as attributes, with a metric object and a log in a CSV file."""

import csv
import os
import tempfile
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from resumable import RunState


class Accuracy:
    def __init__(self):
        self.reset()

    def reset(self):
        self.hits, self.total = 0, 0

    def update(self, outputs, labels):
        self.hits += (outputs.argmax(1) == labels).sum().item()
        self.total += len(labels)

    def value(self):
        return self.hits / max(1, self.total)


class Trainer:
    def __init__(self, log):
        torch.manual_seed(0)
        x = torch.randn(64, 6)
        y = x[:, :3].argmax(1)
        self.train_loader = DataLoader(TensorDataset(x[:48], y[:48]), batch_size=8, shuffle=True)
        self.val_loader = DataLoader(TensorDataset(x[48:], y[48:]), batch_size=8)
        self.model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 3))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.accuracy = Accuracy()
        self.log = log
        self.epoch_loss = 0.0
        self.started = time.time()
        parts = {"model": self.model, "optimizer": self.optimizer, "loader": self.train_loader}
        self.state = RunState.load("runs/exp", **parts, maximize="accuracy")

    def train_epoch(self):
        self.model.train()
        self.epoch_loss = 0.0
        for inputs, labels in tqdm(self.state.batches(), disable=None):
            loss = self.criterion(self.model(inputs), labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.epoch_loss += loss.item()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        self.accuracy.reset()
        for inputs, labels in self.val_loader:
            self.accuracy.update(self.model(inputs), labels)
        return self.accuracy.value()

    def fit(self, epochs):
        writer = csv.writer(self.log)
        for epoch in self.state.epochs(epochs):
            self.train_epoch()
            accuracy = self.validate()
            self.state.save(accuracy=accuracy)
            writer.writerow([epoch, self.epoch_loss, accuracy, time.time() - self.started])
            self.log.flush()
        self.state.close()


if __name__ == "__main__":
    with open(os.path.join(tempfile.gettempdir(), f"log-{os.getpid()}.csv"), "w", newline="") as log:
        Trainer(log).fit(5)
    os.remove(log.name)
