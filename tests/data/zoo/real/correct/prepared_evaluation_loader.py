"""Correct, after accelerate's complete_cv_example: the loader of the evaluation is prepared, and no part."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

torch.manual_seed(42)
accelerator = Accelerator(cpu=True)
x = torch.randn(64, 6)
y = (x[:, 0] > 0).long()
train_loader = DataLoader(TensorDataset(x[:40], y[:40]), batch_size=8, shuffle=True)
eval_loader = DataLoader(TensorDataset(x[40:], y[40:]), batch_size=8)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, epochs=5, steps_per_epoch=5)
model, optimizer, eval_loader, scheduler = accelerator.prepare(model, optimizer, eval_loader, scheduler)

parts = {"optimizer": optimizer, "scheduler": scheduler, "loader": train_loader}
with RunState.load("runs/exp", model=model, **parts, maximize="accuracy") as state:
    for epoch in state.epochs(5):
        model.train()
        for inputs, labels in state.batches():
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        right = 0
        for inputs, labels in eval_loader:
            with torch.no_grad():
                right += (model(inputs).argmax(1) == labels).sum().item()
        state.save(accuracy=right / 24)
