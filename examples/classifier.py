"""A whole training script with AMP, an average of the weights and a schedule: kill it and start it again.

python examples/classifier.py runs/classifier
"""

import sys

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16

torch.manual_seed(0)
images = torch.randn(600, 1, 8, 8)
labels = (images.mean((1, 2, 3)) > 0).long()
loader = DataLoader(TensorDataset(images[:500], labels[:500]), batch_size=50, shuffle=True)

model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2)).to(
    device
)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=8 * len(loader))
scaler = torch.amp.GradScaler(device)

state = RunState.load(
    sys.argv[1] if len(sys.argv) > 1 else "runs/classifier",
    model=model,
    optimizer=optimizer,
    scheduler=scheduler,
    scaler=scaler,
    loader=loader,
    extra={"average": average},
    maximize="accuracy",
)


@torch.no_grad()
def accuracy() -> float:
    average.eval()
    guesses = average(images[500:].to(device)).argmax(1).cpu()
    return (guesses == labels[500:]).float().mean().item()


for epoch in state.epochs(8):
    for x, y in state.batches():
        with torch.autocast(device, dtype):
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        average.update_parameters(model)
        if state.step % 4 == 0:
            state.save()
    state.save(accuracy=accuracy())
    print(f"epoch {epoch}: best accuracy {state.best:.3f}", flush=True)
state.close()
