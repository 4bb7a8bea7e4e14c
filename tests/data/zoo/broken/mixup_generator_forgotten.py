"""Broken: mixup draws from a NumPy generator that is in no part of the run."""

import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState


def mixed(x, y, rng, alpha):
    share = float(rng.beta(alpha, alpha))
    partner = torch.from_numpy(rng.permutation(len(x)))
    return share * x + (1 - share) * x[partner], share * y + (1 - share) * y[partner]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--alpha", type=float, default=0.4)
    args = parser.parse_args()

    torch.manual_seed(0)
    x = torch.randn(48, 8)
    y = nn.functional.one_hot((x[:, :4].sum(1) > x[:, 4:].sum(1)).long(), 2).float()
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mixup_rng = np.random.default_rng(0)

    with RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader) as state:
        for epoch in state.epochs(args.epochs):
            for inputs, labels in state.batches():
                inputs, labels = mixed(inputs, labels, mixup_rng, args.alpha)
                loss = nn.functional.cross_entropy(model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if state.batch == 0:
                    print(f"epoch {epoch}: loss {loss.item():.4f}")
            state.save()


if __name__ == "__main__":
    main()
