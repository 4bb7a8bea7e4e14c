"""A GPT that is sharded over its processes: `fully_shard`, and tensor parallelism if asked for.

torchrun --standalone --nproc-per-node 2 examples/fsdp.py runs/fsdp
torchrun --standalone --nproc-per-node 4 examples/fsdp.py runs/fsdp --tensor-parallel 2

The same run continues on any number of processes, with another mesh or, as `python examples/fsdp.py`, alone.
"""

import argparse
import hashlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from resumable import Ranks, RunState

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("run", nargs="?", default="runs/fsdp", help="the run directory")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--tensor-parallel", type=int, default=1, help="how many processes split each block")
has_cuda = torch.cuda.is_available()
parser.add_argument("--device", default=f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if has_cuda else "cpu")
args = parser.parse_args()

kind = args.device.partition(":")[0]
backend = "gloo" if kind == "cpu" else "nccl"
if kind == "cuda":
    torch.cuda.set_device(args.device)
if "RANK" in os.environ:
    dist.init_process_group(backend)
else:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
shape = (dist.get_world_size() // args.tensor_parallel, args.tensor_parallel)
mesh = init_device_mesh(kind, shape, mesh_dim_names=("data", "tensor"))

context, letters, width, heads = 16, 40, 48, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = (*x.shape[:2], heads, width // heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        return x + self.narrow(nn.functional.gelu(self.wide(self.between(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.letters(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            found = block(found)
        return self.head(self.norm(found))


torch.manual_seed(0)
text = torch.cumsum(torch.randint(4, (320, context + 1)), 1) % letters
dataset = TensorDataset(text)
# The processes that split a block among them read the same batches: the data is dealt to the others.
data = mesh["data"]
sampler = DistributedSampler(dataset, data.size(), data.get_local_rank())
loader = DataLoader(dataset, batch_size=10, sampler=sampler)

model = GPT().to(args.device)
for block in model.blocks:
    if args.tensor_parallel > 1:
        parallelize_module(block, mesh["tensor"], {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
    fully_shard(block, mesh=data)
fully_shard(model, mesh=data)
# Kernels for several tensors at once cannot take those of two meshes together.
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
torch.manual_seed(1 + data.get_local_rank())

state = RunState.load(
    args.run, model=model, optimizer=optimizer, loader=loader, every=4, ranks=Ranks(timeout=20)
)
for epoch in state.epochs(args.epochs):
    sampler.set_epoch(epoch)
    for (rows,) in state.batches(device=args.device):
        found = model(rows[:, :-1]).flatten(0, 1)
        loss = nn.functional.cross_entropy(found, rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state.mean(loss=loss, weight=len(rows))
    state.save(**state.means.reduced())
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {state.metrics['loss']:.3f}", flush=True)
state.close()

weights = hashlib.sha256()
for tensor in model.state_dict().values():
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    weights.update((whole + 0).cpu().numpy().tobytes())
if dist.get_rank() == 0:
    print("weights", weights.hexdigest()[:16])
dist.destroy_process_group()
