"""A plain classifier: one model, one optimizer, one scheduler, one loader, an accuracy."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

torch.manual_seed(0)
x = torch.randn(64, 8)
y = (x.sum(1) > 0).long()
train_loader = DataLoader(TensorDataset(x[:48], y[:48]), batch_size=8, shuffle=True)
val_loader = DataLoader(TensorDataset(x[48:], y[48:]), batch_size=16)
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)

state = RunState.load(
    "runs/exp",
    model=model,
    optimizer=optimizer,
    scheduler=scheduler,
    loader=train_loader,
    maximize="accuracy",
)
for epoch in state.epochs(5):
    model.train()
    for inputs, labels in state.batches():
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    scheduler.step()
    model.eval()
    hits = 0
    with torch.no_grad():
        for inputs, labels in val_loader:
            hits += (model(inputs).argmax(1) == labels).sum().item()
    state.save(accuracy=hits / 16)
    print(f"epoch {epoch}: accuracy {hits / 16:.3f}, best {state.best:.3f}")
state.close()
