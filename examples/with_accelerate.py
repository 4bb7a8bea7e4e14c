"""Hugging Face Accelerate: all that it prepares, in our loops (pip install accelerate).

python examples/with_accelerate.py runs/accelerate
"""

import argparse
import hashlib
import math

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("run", nargs="?", default="runs/accelerate", help="the run directory")
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--device", default="auto", help="auto or cpu")
args = parser.parse_args()
accelerator = Accelerator(cpu=args.device == "cpu", mixed_precision="bf16", gradient_accumulation_steps=4)

torch.manual_seed(0)
images = torch.randn(1000, 64)
labels = (images.mean(1) > 0).long()
loader = DataLoader(TensorDataset(images, labels), batch_size=20, shuffle=True)

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
# An epoch ends in the middle of a window of 4 batches, and with a step
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * math.ceil(len(loader) / 4))
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
torch.manual_seed(1 + accelerator.process_index)

state = RunState.load(
    args.run,
    model=model,
    optimizer=optimizer,
    scheduler=scheduler,
    loader=loader,
    minimize="loss",
    every=3,
)
for epoch in state.epochs(args.epochs):
    for x, y in state.batches():
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        state.mean(loss=loss, weight=len(y))
    means = state.means.reduced()
    state.save(**means)
    accelerator.print(f"epoch {epoch}: loss {means['loss']:.3f}, best {state.best:.3f}", flush=True)
state.close()

weights = b"".join(tensor.cpu().numpy().tobytes() for tensor in model.state_dict().values())
accelerator.print("weights", hashlib.sha256(weights).hexdigest()[:16])
