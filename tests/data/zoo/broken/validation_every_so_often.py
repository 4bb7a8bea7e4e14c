"""Broken: it validates every 4 batches of this process, and shuffling the validation draws from torch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState


def accuracy_on(loader, model):
    model.eval()
    with torch.no_grad():
        x, y = next(iter(loader))
        hits = (model(x).argmax(1) == y).float().mean().item()
    model.train()
    return hits


def main():
    torch.manual_seed(0)
    x = torch.randn(72, 5)
    y = x.argmax(1)
    train_loader = DataLoader(TensorDataset(x[:48], y[:48]), batch_size=8, shuffle=True)
    val_loader = DataLoader(TensorDataset(x[48:], y[48:]), batch_size=12, shuffle=True)
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    state = RunState.load("runs/exp", model=model, optimizer=optimizer, loader=train_loader)
    since_validation = 0
    for epoch in state.epochs(5):
        for inputs, labels in state.batches():
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            since_validation += 1
            if since_validation == 4:
                print(f"epoch {epoch}: accuracy {accuracy_on(val_loader, model):.3f}")
                since_validation = 0
        state.save()
    state.close()


if __name__ == "__main__":
    main()
