"""A training on a device, started again after each kill: on_device.py DEVICE KIND RUN [BATCHES SIGNAL]

It ends itself by the signal after that many batches of this start. At its end it prints a digest of all that
a resume has to bring back.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from resumable import Ranks, RunState, seed_everything
from resumable.files import sharded_tensor

DEVICE, KIND, RUN = sys.argv[1:4]
LAST, SIGNAL = map(int, sys.argv[4:6]) if len(sys.argv) > 4 else (-1, 0)
EPOCHS, SAMPLES, BATCH = 3, 64, 8
ON_GPU = DEVICE.startswith("cuda")


def batches_done() -> int:
    """Return how many batches of this start are done; in no variable, which a resume would put back."""
    with open(f"{RUN}-{os.getpid()}.batches", "ab") as file:
        file.write(b".")
        return file.tell()


class Convolutions(nn.Module):
    """Convolutions, statistics of batches, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.dropout, self.second = nn.Dropout(0.3), nn.Conv2d(32, 32, 3, stride=2)
        self.out = nn.Linear(288, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.norm(self.first(x)))
        return self.out(self.dropout(self.second(x)).flatten(1))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """Two layers of cuDNN's LSTM; its own dropout cannot be resumed, that of a module can."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.dropout = nn.LSTM(24, 32, 2, batch_first=True), nn.Dropout(0.3)
        self.out = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found, _ = self.lstm(x.flatten(1).view(len(x), 8, 24))
        return self.out(self.dropout(found[:, -1]))  # type: ignore[no-any-return]


def main() -> None:
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    # Without a resume, too, an LSTM on two busy threads of the CPU gives other bits now and then.
    torch.set_num_threads(1)
    # Atomic sums in another order each time would be no fault of a resume either.
    seed_everything(7, deterministic=True)
    drawn = torch.Generator().manual_seed(1)
    model: nn.Module = (Recurrent() if KIND == "lstm" else Convolutions()).to(DEVICE)
    if KIND == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    average = torch.optim.swa_utils.AveragedModel(model)
    if KIND == "sharded":
        shard(model, average.module)
    settings: dict[str, Any] = {"lr": 1e-2, **({"fused": True} if KIND == "fused" else {})}
    if KIND == "capturable":
        settings |= {"capturable": ON_GPU, "foreach": True}
    if KIND == "captured":
        # A graph would keep a number as it was at the capture, whatever the scheduler does.
        settings |= {"capturable": True, "lr": torch.tensor(1e-2, device=DEVICE)}
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    scaler = torch.amp.GradScaler(DEVICE, enabled=KIND == "fp16" and ON_GPU, init_scale=2.0**20)
    own = torch.Generator(DEVICE).manual_seed(3)
    data = TensorDataset(
        torch.randn(SAMPLES, 3, 8, 8, generator=drawn), torch.randint(0, 10, (SAMPLES,), generator=drawn)
    )
    workers = 2 * (KIND == "prefetch")
    loader = DataLoader(
        data, BATCH, shuffle=True, num_workers=workers, pin_memory=ON_GPU and workers > 0, drop_last=True
    )

    forward: Callable[[torch.Tensor], torch.Tensor] = model
    if KIND == "compiled":
        forward = torch.compile(model, backend="inductor" if ON_GPU else "eager")

    def precision() -> AbstractContextManager[Any]:
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(KIND)
        is_used = dtype is not None and (ON_GPU or dtype == torch.bfloat16)
        return torch.autocast(torch.device(DEVICE).type, dtype) if is_used else nullcontext()

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        with precision():
            loss = functional.cross_entropy(forward(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=KIND != "captured")
        if KIND == "sharded":
            # Torch draws the random numbers of sharded tensors by other means.
            for parameter in model.parameters():
                parameter.data.add_(torch.rand_like(parameter.data), alpha=1e-4)

    step = train
    if KIND == "captured":
        x, y = torch.zeros(BATCH, 3, 8, 8, device=DEVICE), torch.zeros(BATCH, dtype=torch.long, device=DEVICE)
        side = torch.cuda.Stream(DEVICE)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                train(x, y)
        torch.cuda.current_stream().wait_stream(side)

    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    extra = {"average": average, "own": own}
    with RunState.load(
        RUN, **parts, loader=loader, extra=extra, every=2, keep=2, progress=False, ranks=Ranks(timeout=600)
    ) as state:
        if KIND == "captured":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                train(x, y)

            def step(batch: torch.Tensor, labels: torch.Tensor) -> None:
                x.copy_(batch)
                y.copy_(labels)
                graph.replay()

        for _ in state.epochs(EPOCHS):
            for images, labels in state.batches(device=DEVICE if KIND == "prefetch" else None):
                images, labels = images.to(DEVICE), labels.to(DEVICE)
                noise = torch.randn(images.shape, generator=own, device=DEVICE)
                step(images + 0.01 * noise, labels)
                average.update_parameters(model)
                if batches_done() == LAST:
                    os.kill(os.getpid(), SIGNAL)
            scheduler.step()
        print("digest", digest(state.step, scheduler, scaler, model, optimizer, average, own))


def shard(*models: nn.Module) -> None:
    """Shard models over the only process there is."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    backend, store = "nccl" if ON_GPU else "gloo", torch.distributed.HashStore()
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    mesh = init_device_mesh(torch.device(DEVICE).type, (1,))
    for model in models:
        fully_shard(model, mesh=mesh)


def digest(steps: int, scheduler: Any, scaler: Any, *parts: Any) -> str:
    rates = [float(rate) for rate in scheduler.get_last_lr()]
    total = hashlib.sha256(json.dumps([steps, rates, scaler.state_dict()]).encode())
    tensors = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if ON_GPU else [])]
    for part in parts:
        if isinstance(part, nn.Module):
            tensors += part.state_dict().values()
        elif isinstance(part, torch.Generator):
            tensors.append(part.get_state())
        else:
            tensors += [value for state in part.state.values() for value in state.values()]
    for tensor in map(sharded_tensor.local, tensors):
        total.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


if __name__ == "__main__":
    main()
