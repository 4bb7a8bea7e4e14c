"""Lightning Fabric: all that it sets up, in our loops (pip install lightning-fabric).

python examples/with_fabric.py runs/fabric
"""

import argparse
import hashlib

import torch
from lightning_fabric import Fabric  # of the package lightning: from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("run", nargs="?", default="runs/fabric", help="the run directory")
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
parser.add_argument("--processes", type=int, default=1)
args = parser.parse_args()
fabric = Fabric(accelerator=args.device, devices=args.processes, precision="bf16-mixed")
fabric.launch()

torch.manual_seed(0)
images = torch.randn(1000, 64)
labels = (images.mean(1) > 0).long()
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(images, labels), batch_size=20, shuffle=True))

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = fabric.setup(model, optimizer)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
torch.manual_seed(1 + fabric.global_rank)

state = RunState.load(
    args.run, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, minimize="loss", every=11
)
for epoch in state.epochs(args.epochs):
    for x, y in state.batches():
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        state.mean(loss=loss, weight=len(y))
    scheduler.step()
    means = state.means.reduced()
    state.save(**means)
    fabric.print(f"epoch {epoch}: loss {means['loss']:.3f}, best {state.best:.3f}", flush=True)
state.close()

weights = b"".join(tensor.cpu().numpy().tobytes() for tensor in model.state_dict().values())
fabric.print("weights", hashlib.sha256(weights).hexdigest()[:16])
