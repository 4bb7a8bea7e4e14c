"""A whole script for several processes: each has its share of the data; a signal to one is enough to leave.

torchrun --nproc-per-node 2 examples/distributed.py runs/distributed
python examples/distributed.py runs/distributed
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from resumable import RunState

device = "cpu"
if torch.cuda.is_available():
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    torch.cuda.set_device(device)
backend = "nccl" if torch.cuda.is_available() else "gloo"
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

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2)).to(device)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
# From here on each rank draws its own: two that drop the same neurons train as one.
torch.manual_seed(1 + dist.get_rank())

run_dir = sys.argv[1] if len(sys.argv) > 1 else "runs/distributed"
state = RunState.load(run_dir, model=ddp, optimizer=optimizer, loader=loader, maximize="accuracy", timeout=20)


@torch.no_grad()
def accuracy() -> float:
    """The share of right guesses; each rank looks at a part of the test set."""
    x, y = (part[dist.get_rank() :: dist.get_world_size()].to(device) for part in test_set)
    model.eval()
    right = torch.tensor([float((model(x).argmax(1) == y).sum()), len(y)], device=device)
    model.train()
    dist.all_reduce(right)
    return (right[0] / right[1]).item()


for epoch in state.epochs(8):
    sampler.set_epoch(epoch)
    for x, y in state.batches():
        loss = nn.functional.cross_entropy(ddp(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if state.step % 4 == 0:
            state.save()
    state.save(accuracy=accuracy())
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: best accuracy {state.best:.3f}", flush=True)
state.close()
dist.destroy_process_group()
