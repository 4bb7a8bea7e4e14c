"""An average that is swapped into the model to validate and back again, and loss curves kept for a plot."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState


def evaluate(model, x, y):
    model.eval()
    with torch.no_grad():
        value = nn.functional.mse_loss(model(x), y).item()
    model.train()
    return value


torch.manual_seed(0)
x = torch.linspace(-2, 2, 40).unsqueeze(1)
y = x**3 - x
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.95))
train_losses, val_losses = [], []

with RunState.load(
    "runs/exp", model=net, optimizer=optimizer, loader=loader, extra={"ema": ema}, minimize="val_loss"
) as state:
    for epoch in state.epochs(6):
        running = 0.0
        for step, (inputs, targets) in state.enumerate():
            loss = nn.functional.mse_loss(net(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update_parameters(net)
            running += loss.item()
            if step % 2 == 1:
                train_losses.append(running / 2)
                running = 0.0
        mine = {name: one.clone() for name, one in net.state_dict().items()}
        net.load_state_dict(ema.module.state_dict())
        val_losses.append(evaluate(net, x, y))
        net.load_state_dict(mine)
        state.save(val_loss=val_losses[-1])
        print(f"epoch {epoch}: {val_losses[-1]:.5f}")
