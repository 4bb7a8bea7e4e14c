"""A small training that is sharded over processes in every way that torch has."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gloo
import torch
from grouped import grouped
from torch import Tensor, nn

from resumable import RunState
from resumable.files import sharded_tensor

CAN_SHARD = torch.distributed.is_available() and not torch.__version__.startswith("2.6.")
WHY_NOT = "torch 2.6 cannot train with fully_shard on a CPU, nor shard unevenly in two ways; or no processes"

MESHES = {"plain": 1, "ddp": 2, "fsdp-2": 2, "fsdp-3": 3, "hsdp": 4, "tp": 2, "fsdp-tp": 4, "fsdp-tp-3": 6}
"""The number of processes of each kind. Those of plain and ddp are not sharded."""


class Net(nn.Module):
    """Uneven in every dimension, with a frozen and a tied parameter, a buffer and dropout."""

    def __init__(self, width: int = 10, inner: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, width)
        self.up = nn.Linear(width, inner)
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(inner, width)
        self.norm = nn.LayerNorm(width)
        self.frozen = nn.Linear(width, width)
        self.head = nn.Linear(width, 13, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            self.seen.add_(1)
        hidden = self.embed(tokens)
        hidden = hidden + self.down(self.drop(torch.relu(self.up(hidden))))
        return self.head(self.frozen(self.norm(hidden)) * self.scale)


class Tokens(torch.utils.data.Dataset[Tensor]):
    """Rows of tokens, each with noise that is drawn when it is loaded."""

    def __init__(self, is_numbered: bool = False) -> None:
        self._is_numbered = is_numbered

    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> Tensor:
        if self._is_numbered:
            return torch.full((5,), number)
        return (torch.arange(5) * (number + 1) + torch.randint(13, (5,))) % 13


def shard(model: nn.Module, kind: str, **options: Any) -> tuple[int, int]:
    """Shard a model in place; return which of how many shares of the data this process trains on."""
    if kind in ("plain", "ddp"):
        return (
            (0, 1) if kind == "plain" else (torch.distributed.get_rank(), torch.distributed.get_world_size())
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    size = torch.distributed.get_world_size()
    shapes = {"tp": (1, size), "fsdp-tp": (size // 2, 2), "fsdp-tp-3": (size // 3, 3)}
    mesh = init_device_mesh("cpu", shapes.get(kind, (size, 1)), mesh_dim_names=("dp", "tp"))
    if "tp" in kind:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if kind != "tp":
        over = (
            init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("r", "s"))
            if kind == "hsdp"
            else mesh["dp"]
        )
        if isinstance(model, Net):
            fully_shard(model.up, mesh=over, **options)
        fully_shard(model, mesh=over, **options)
    found = mesh["dp"]
    return found.get_local_rank(), found.size()


def make(kind: str, seed: int, **options: Any) -> tuple[Net, torch.optim.Optimizer, tuple[int, int]]:
    """Return the model, its optimizer and the share of the data."""
    torch.manual_seed(seed)
    model = Net()
    share = shard(model, kind, **options)
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(trained, 1e-2, foreach=False), share


def train(rank: int, kind: str, run_dir: Path, until: int, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Train up to a step; return what was there after the start and at the end, and the samples."""
    torch.set_num_threads(1)
    if rank in plan.get("lives", ()):
        threading.Timer(plan["lives"][rank], os.kill, (os.getpid(), signal.SIGKILL)).start()
    model, optimizer, share = make(kind, plan.get("seed", 0), **plan.get("options", {}))
    sampler: Any = torch.utils.data.DistributedSampler(Tokens(), share[1], share[0])
    data = Tokens(is_numbered="numbered" in plan)
    loader = torch.utils.data.DataLoader(data, 2, sampler=sampler, num_workers=plan.get("workers", 0))
    wrapped = nn.parallel.DistributedDataParallel(model) if kind == "ddp" else model
    if "torch" in plan:
        # Each share of the data draws for itself; the processes that share one draw the same.
        torch.manual_seed(100 + share[0])
    given = {"keep": 3, "timeout": 20, **plan.get("load", {})}
    if nodes := plan.get("nodes"):
        run_dir, given["shared"] = of_node(run_dir, nodes[rank]), False
    state = RunState.load(run_dir, model=wrapped, optimizer=optimizer, loader=loader, **grouped(**given))
    begun, seen = whole(model, optimizer), []
    for epoch in state.epochs(plan.get("epochs", 100)):
        sampler.set_epoch(epoch)
        for batch in state.batches():
            seen.append(batch[:, 0].tolist() if "numbered" in plan else batch.tolist())
            batch = batch % 13
            optimizer.zero_grad()
            loss = wrapped(batch).float().square().mean()
            loss.backward()
            optimizer.step()
            if state.step % plan.get("every", 2) == 0:
                evaluate(model, batch)
                state.save()
            # So that kills and pushes fall between saves, on a machine of any speed; nothing waits for it.
            time.sleep(plan.get("slow", 0))
            if state.step == plan.get("dies"):
                state.wait()
                os.kill(os.getpid(), signal.SIGKILL)
            if state.step >= until:
                break
        if state.step >= until:
            break
    state.save().wait()
    found = {
        "begun": begun,
        "ended": whole(model, optimizer),
        "seen": seen,
        "samples": state.samples,
        "share": share[0],
        "drawn": torch.rand(4).numpy(),
        "own": local(model, optimizer),
    }
    state.close()
    return found


def of_node(run_dir: Path, node: int) -> Path:
    """Return the run directory on the disk of a node."""
    return run_dir.parent / f"node{node}" / run_dir.name


@torch.no_grad()
def evaluate(model: nn.Module, batch: Tensor) -> None:
    """Leave the whole parameters in the root, as FSDP2 does."""
    model.eval()
    model(batch)
    model.train()


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return all tensors as a whole."""
    return _tensors(model, optimizer, gathered)


def local(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what this process has of all tensors."""
    return _tensors(model, optimizer, sharded_tensor.local)


def gathered(tensor: Any) -> Tensor:
    """Return the whole of a tensor that is sharded."""
    if not sharded_tensor.is_sharded(tensor):
        return tensor  # type: ignore[no-any-return]
    found = tensor.full_tensor()
    # It may still be on its way.
    return found.wait() if hasattr(found, "wait") else found  # type: ignore[no-any-return]


def _tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, of: Callable[[Any], Tensor]
) -> dict[str, Any]:
    found = {name: of(one).detach().clone().numpy() for name, one in model.state_dict().items()}
    names = {id(p): name for name, p in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            found[f"{key}.{names[id(parameter)]}"] = of(value).detach().clone().numpy()
    return found


def run(kind: str, run_dir: Path, until: int, folder: Path, **plan: Any) -> list[gloo.Ended]:
    """Train on a mesh of this kind, in processes of its own."""
    return gloo.run(MESHES[kind], train, kind, run_dir, until, plan, folder=folder)


def read_by_dcp(rank: int, folder: Path) -> dict[str, Any]:
    """Return the tensors of a model that torch's own reader finds in a folder, on a mesh of three."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (3,))
    wanted = {name: value for name, value in Net().state_dict().items() if name != "head.weight"}
    state = {
        name: distribute_tensor(torch.zeros_like(value), mesh, [Shard(0)]) for name, value in wanted.items()
    }
    reader = dcp.HuggingFaceStorageReader(str(folder))  # type: ignore[no-untyped-call]
    dcp.load(state, storage_reader=reader)
    return {name: gathered(value).numpy() for name, value in state.items()}


def values(ended: list[gloo.Ended]) -> list[dict[str, Any]]:
    """Return what the processes have returned, if all of them ended well."""
    for one in ended:
        if one.error:
            raise one.error
    return [one.value for one in ended]


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of the tensors that do not have the same bits."""
    assert one.keys() == other.keys()
    return [n for n in one if one[n].shape != other[n].shape or one[n].tobytes() != other[n].tobytes()]
