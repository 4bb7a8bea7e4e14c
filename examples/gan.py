"""A GAN: two models and two optimizers, each under a name, and an average of the one that draws.

python examples/gan.py runs/gan
"""

import argparse
import hashlib

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("run", nargs="?", default="runs/gan", help="the run directory")
parser.add_argument("--epochs", type=int, default=60)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
args = parser.parse_args()

torch.manual_seed(0)
# Images of one round spot each, somewhere.
y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
centre = 4 + 8 * torch.rand(2, 600, 1, 1)
images = torch.exp(-((x - centre[0]) ** 2 + (y - centre[1]) ** 2) / 6)
loader = DataLoader(TensorDataset(2 * images[:, None] - 1), batch_size=50, shuffle=True)

generator = nn.Sequential(
    nn.Linear(16, 64 * 4 * 4),
    nn.Unflatten(1, (64, 4, 4)),
    nn.BatchNorm2d(64),
    nn.ReLU(),
    nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.ConvTranspose2d(32, 1, 4, stride=2, padding=1),
    nn.Tanh(),
).to(args.device)
critic = nn.Sequential(
    nn.Conv2d(1, 32, 4, stride=2, padding=1),
    nn.LeakyReLU(0.2),
    nn.Conv2d(32, 64, 4, stride=2, padding=1),
    nn.LeakyReLU(0.2),
    nn.Flatten(),
    nn.Dropout(0.2),
    nn.Linear(64 * 4 * 4, 1),
).to(args.device)
average = AveragedModel(generator, multi_avg_fn=get_ema_multi_avg_fn(0.99), use_buffers=True)
models = {"generator": generator, "critic": critic}
optimizers = {name: torch.optim.Adam(one.parameters(), 5e-4, (0.5, 0.999)) for name, one in models.items()}

state = RunState.load(
    args.run, model=models, optimizer=optimizers, loader=loader, extra={"average": average}, every=8
)
for epoch in state.epochs(args.epochs):
    for (real,) in state.batches(device=args.device):
        fake = generator(torch.randn(len(real), 16, device=args.device))
        critic_loss = (
            nn.functional.softplus(-critic(real)).mean()
            + nn.functional.softplus(critic(fake.detach())).mean()
        )
        optimizers["critic"].zero_grad()
        critic_loss.backward()
        optimizers["critic"].step()

        loss = nn.functional.softplus(-critic(fake)).mean()
        optimizers["generator"].zero_grad()
        loss.backward()
        optimizers["generator"].step()
        average.update_parameters(generator)
    state.save()
    print(f"epoch {epoch}: {state.samples:,} images seen", flush=True)
state.close()

tensors = [tensor for model in models.values() for tensor in model.state_dict().values()]
print("weights", hashlib.sha256(b"".join(one.cpu().numpy().tobytes() for one in tensors)).hexdigest()[:16])
drawn = average.eval()(torch.randn(1, 16, device=args.device))[0, 0].tolist()
print("\n".join("".join(" .:*#"[round(2 * (one + 1))] * 2 for one in row) for row in drawn))
