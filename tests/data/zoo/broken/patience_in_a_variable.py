"""Broken: patience is counted in variables of the script, so a run that is resumed often never stops."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState


def main():
    torch.manual_seed(0)
    x, y = torch.randn(64, 10), torch.randn(64, 1)
    train_loader = DataLoader(TensorDataset(x[:40], y[:40]), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)

    state = RunState.load("runs/exp", model=model, optimizer=optimizer, loader=train_loader)
    lowest, epochs_without = float("inf"), 0
    for epoch in state.epochs(20):
        for inputs, targets in state.batches():
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            val_loss = nn.functional.mse_loss(model(x[40:]), y[40:]).item()
        if val_loss < lowest:
            lowest, epochs_without = val_loss, 0
        else:
            epochs_without += 1
        state.save(val_loss=val_loss)
        print(f"epoch {epoch}: {val_loss:.4f}, {epochs_without} without a better one")
        if epochs_without == 6:
            break
    state.close()


if __name__ == "__main__":
    main()
