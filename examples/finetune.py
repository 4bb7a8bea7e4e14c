"""Fine-tuning: the backbone of an earlier run, frozen at first; its file is written once and then linked.

python examples/finetune.py runs/finetune
"""

import argparse
import hashlib
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState, load_weights

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("run", nargs="?", default="runs/finetune", help="the folder of both runs")
parser.add_argument("--epochs", type=int, default=8, help="of fine-tuning, two thirds of them frozen")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
args = parser.parse_args()
first_run, second_run = f"{args.run}/pretrained", f"{args.run}/finetuned"
unfreeze_at = args.epochs * 2 // 3


class Net(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        sizes = [256, 768, 768, 256]
        layers = [nn.Sequential(nn.Linear(*pair), nn.ReLU()) for pair in pairwise(sizes)]
        self.backbone = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(256, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))


def made_of(classes: int, samples: int) -> DataLoader:
    """Samples of so many classes, each around a centre of its own."""
    labels = torch.randint(classes, (samples,))
    samples = torch.randn(classes, 256)[labels] + 4 * torch.randn(samples, 256)
    return DataLoader(TensorDataset(samples, labels), batch_size=50, shuffle=True)


def train(model: Net, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


torch.manual_seed(0)
loader = made_of(classes=20, samples=1000)
model = Net(classes=20).to(args.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with RunState.load(first_run, model=model, optimizer=optimizer, loader=loader, every=15) as state:
    for epoch in state.epochs(4):
        for batch in state.batches(device=args.device):
            train(model, batch)
        state.save()
        print(f"pretraining, epoch {epoch}: step {state.step}", flush=True)

torch.manual_seed(1)
loader = made_of(classes=5, samples=1000)
model = Net(classes=5).to(args.device)
# Where the second run has begun already, the next load puts its own weights in place of these
misfit = load_weights(model, first_run, strict=False)
print("not taken from the first run:", *misfit.reshaped)
model.backbone.requires_grad_(False)
# All parameters from the beginning, in groups: one that has no gradient is left as it is.
groups = [{"params": model.head.parameters()}, {"params": model.backbone.parameters(), "lr": 1e-4}]
optimizer = torch.optim.AdamW(groups, lr=1e-3)
with RunState.load(second_run, model=model, optimizer=optimizer, loader=loader, every=15) as state:
    for epoch in state.epochs(args.epochs):
        if epoch == unfreeze_at:
            model.backbone.requires_grad_(True)
        for batch in state.batches(device=args.device):
            train(model, batch)
        checkpoint = state.save()
        checkpoint.wait()
        sizes = [file.stat() for file in Path(checkpoint.path).rglob("*") if file.is_file()]
        # What is frozen is in a file that the checkpoint before has too: a hard link
        written = sum(size.st_size for size in sizes if size.st_nlink == 1) / 1e6
        whole = sum(size.st_size for size in sizes) / 1e6
        print(f"epoch {epoch}: saved {whole:.2f} MB, wrote {written:.2f}", flush=True)

weights = b"".join(tensor.cpu().numpy().tobytes() for tensor in model.state_dict().values())
print("weights", hashlib.sha256(weights).hexdigest()[:16])
