"""Broken, after torchvision's references: the average of the model is not given."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState


def main():
    torch.manual_seed(0)
    x = torch.randn(48, 6)
    y = (x[:, 0] > x[:, 1]).long()
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model_ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    state = RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader)
    for _ in state.epochs(5):
        for image, target in state.batches():
            loss = nn.functional.cross_entropy(model(image), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            model_ema.update_parameters(model)
        with torch.no_grad():
            state.save(loss=nn.functional.cross_entropy(model_ema(x), y).item())
    state.close()


main()
