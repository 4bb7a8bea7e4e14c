"""Mixed precision with a scaler that skips its first steps, clipping, and a schedule for each step."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

torch.manual_seed(0)
x = torch.randn(48, 16)
y = x[:, :4].sum(1, keepdim=True)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=40)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=4)

with RunState.load(
    "runs/exp", model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, loader=loader
) as state:
    for epoch in state.epochs(6):
        for inputs, targets in state.batches():
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.mse_loss(model(inputs).float(), targets)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() >= before:
                scheduler.step()
            if state.batch == 0:
                print(f"epoch {epoch}: loss {loss.item():.4f}, scale {scaler.get_scale():g}")
        state.save()
