"""Several processes, each with its share of the data; one that dies is started again, and all continue.

torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/distributed.py runs/distributed

The restarts need TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (docs/recipes/torchrun.md says why). Alone, as
`python examples/distributed.py`, it continues too.
"""

import argparse
import hashlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from resumable import Ranks, RunState

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("run", nargs="?", default="runs/distributed", help="the run directory")
parser.add_argument("--epochs", type=int, default=8)
has_cuda = torch.cuda.is_available()
parser.add_argument("--device", default=f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if has_cuda else "cpu")
args = parser.parse_args()

backend = "gloo" if args.device == "cpu" else "nccl"
if backend == "nccl":
    torch.cuda.set_device(args.device)
if "RANK" in os.environ:
    dist.init_process_group(backend)
else:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)

torch.manual_seed(0)
images = torch.randn(600, 64)
labels = (images.mean(1) > 0).long()
train_set, test_set = TensorDataset(images[:500], labels[:500]), (images[500:], labels[500:])
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=50, sampler=sampler)

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2)).to(args.device)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
# From here on each rank draws its own: two that drop the same neurons train as one.
torch.manual_seed(1 + dist.get_rank())

state = RunState.load(
    args.run,
    model=ddp,
    optimizer=optimizer,
    loader=loader,
    maximize="accuracy",
    every=4,
    ranks=Ranks(timeout=20),
)


@torch.no_grad()
def accuracy() -> float:
    """The share of right guesses; each rank looks at a part of the test set."""
    x, y = (part[dist.get_rank() :: dist.get_world_size()].to(args.device) for part in test_set)
    model.eval()
    right = torch.tensor([float((model(x).argmax(1) == y).sum()), len(y)], device=args.device)
    model.train()
    dist.all_reduce(right)
    return (right[0] / right[1]).item()


for epoch in state.epochs(args.epochs):
    sampler.set_epoch(epoch)
    for x, y in state.batches(device=args.device):
        loss = nn.functional.cross_entropy(ddp(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state.mean(loss=loss, weight=len(y))
    state.save(accuracy=accuracy(), **state.means.reduced())
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: best accuracy {state.best:.3f}", flush=True)
state.close()

if dist.get_rank() == 0:
    weights = b"".join(tensor.cpu().numpy().tobytes() for tensor in model.state_dict().values())
    print("weights", hashlib.sha256(weights).hexdigest()[:16])
dist.destroy_process_group()
