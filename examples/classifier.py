"""An image classifier with AMP, an average of its weights, a schedule, and workers that augment.

python examples/classifier.py runs/classifier
"""

import argparse
import hashlib

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

from resumable import RunState

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("run", nargs="?", default="runs/classifier", help="the run directory")
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--samples", type=int, default=2000)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
args = parser.parse_args()
dtype = torch.float16 if args.device.startswith("cuda") else torch.bfloat16


class Stripes(Dataset):
    """Images of the size of CIFAR's: noisy stripes, in one of ten directions."""

    def __init__(self, count: int, seed: int, augment: bool = False) -> None:
        noise = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(10, (count,), generator=noise)
        angle = (self.labels * torch.pi / 10)[:, None, None]
        y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
        stripes = torch.sin(0.8 * (x * angle.cos() + y * angle.sin()))
        self.images = stripes[:, None] + 3 * torch.randn(count, 3, 32, 32, generator=noise)
        self.augment = augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.images[index]
        if self.augment:
            # Drawn in a worker: a resume continues with the random numbers that the worker had.
            image = image.roll(torch.randint(-4, 5, (2,)).tolist(), (1, 2))
            image = image * (0.8 + 0.4 * torch.rand(3, 1, 1))
        return image, self.labels[index]


def block(inputs: int, outputs: int) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


torch.manual_seed(0)
loader = DataLoader(Stripes(args.samples, 1, augment=True), batch_size=50, shuffle=True, num_workers=2)
test_loader = DataLoader(Stripes(500, 2), batch_size=100)

layers = [block(3, 16), block(16, 32), block(32, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
model = nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(64, 10)).to(args.device)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95), use_buffers=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=args.epochs * len(loader))
scaler = torch.amp.GradScaler(args.device)

state = RunState.load(
    args.run,
    model=model,
    optimizer=optimizer,
    scheduler=scheduler,
    scaler=scaler,
    loader=loader,
    extra={"average": average},
    maximize="accuracy",
    every=7,  # steps: this training takes seconds; say "10 min" for one that takes days
)


@torch.no_grad()
def accuracy() -> float:
    average.eval()
    right = sum((average(x.to(args.device)).argmax(1).cpu() == y).sum().item() for x, y in test_loader)
    return right / len(test_loader.dataset)


for epoch in state.epochs(args.epochs):
    for x, y in state.batches(device=args.device):
        with torch.autocast(torch.device(args.device).type, dtype):
            loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        average.update_parameters(model)
        state.mean(loss=loss, weight=len(y))
    state.save(accuracy=accuracy(), **state.means)
    print(f"epoch {epoch}: best accuracy {state.best:.3f}", flush=True)
state.close()

weights = b"".join(tensor.cpu().numpy().tobytes() for tensor in model.state_dict().values())
print("weights", hashlib.sha256(weights).hexdigest()[:16])
