"""Broken: the dataset makes its samples harder the more it has given, and counts them in its workers."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from resumable import RunState


class Harder(Dataset):
    def __init__(self, count):
        self.x = torch.randn(count, 4)
        self.given = 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.given += 1
        x = self.x[index]
        return x * (1 + 0.01 * self.given), (x.sum() > 0).long()


torch.manual_seed(0)
loader = DataLoader(Harder(48), batch_size=8, shuffle=True, num_workers=1, persistent_workers=True)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

if __name__ == "__main__":
    with RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader) as state:
        for epoch in state.epochs(5):
            for x, y in state.batches():
                loss = nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            state.save()
            print(f"epoch {epoch}: {loss.item():.4f}")
