"""Gradients of four batches make one step, told by state.batch; the end of the epoch steps with the rest."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

ACCUMULATE = 4


def main():
    torch.manual_seed(0)
    x = torch.randn(56, 5)
    y = x.cos().sum(1, keepdim=True)
    loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)  # 14 batches: 3 windows and a half
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    state = RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader)
    for epoch in state.epochs(6):
        running, seen = 0.0, 0
        for inputs, targets in state.batches():
            loss = nn.functional.mse_loss(model(inputs), targets)
            (loss / ACCUMULATE).backward()
            running, seen = running + loss.item(), seen + 1
            is_last = state.batch + 1 == len(loader)
            if (state.batch + 1) % ACCUMULATE == 0 or is_last:
                optimizer.step()
                optimizer.zero_grad()
        state.save()
        print(f"epoch {epoch}: mean loss {running / max(1, seen):.4f}")
    state.close()


if __name__ == "__main__":
    main()
