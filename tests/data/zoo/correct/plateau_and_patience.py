"""The rate falls where the validation stands still, patience ends the training, and the best is kept."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

torch.manual_seed(0)
x, y = torch.randn(64, 6), torch.randn(64, 1)
train_loader = DataLoader(TensorDataset(x[:40], y[:40]), batch_size=8, shuffle=True)
val_loader = DataLoader(TensorDataset(x[40:], y[40:]), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

state = RunState.load(
    "runs/exp",
    model=model,
    optimizer=optimizer,
    scheduler=scheduler,
    loader=train_loader,
    minimize="val_loss",
)
for epoch in state.epochs(20):
    if state.patience(5):
        break
    model.train()
    for inputs, targets in state.batches():
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    total = 0.0
    with torch.no_grad():
        for inputs, targets in val_loader:
            total += nn.functional.mse_loss(model(inputs), targets).item()
    scheduler.step(total)
    state.save(val_loss=total / len(val_loader))
    print(f"epoch {epoch}: {total / len(val_loader):.4f}, lr {optimizer.param_groups[0]['lr']:g}")
state.restore("best", only="model")
state.close()
