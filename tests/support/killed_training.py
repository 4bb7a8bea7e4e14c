"""A training as users write them, to be killed and started again: killed_training.py RUN_DIR SEED."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import nn
from torch.utils.data import DataLoader, Dataset

from resumable import RunState, Trace

EPOCHS = 3
RESULT, TRACE = "result.txt", "boundaries.jsonl"


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """What a sample looks like, the generators of the worker that makes it decide."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.randn(6) + float(np.random.standard_normal()) + random.random()
        return index / 60 + 0.1 * noise, torch.tensor([float(index % 2)])


def main(run_dir: Path, seed: int) -> None:
    """Train, and leave in the run a digest of all there is in the end."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=EPOCHS * 10)
    # Of what is drawn in process as of what is drawn in workers
    loader = DataLoader(Noisy(), batch_size=6, shuffle=True, num_workers=2 * (seed % 2))
    state = RunState.load(
        run_dir,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        minimize="loss",
        keep=1 + seed % 3,
        every=3,
        trace=Trace(run_dir / TRACE, every=1),
    )
    losses = state.vars.setdefault("losses", [])
    for _ in state.epochs(EPOCHS):
        for samples, labels in state.batches():
            loss = nn.functional.binary_cross_entropy_with_logits(model(samples), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
        state.save(loss=losses[-1])
    state.close()
    (run_dir / RESULT).write_text(_digest(model, optimizer, [*losses, state.best, scheduler.get_last_lr()]))


def _digest(model: nn.Module, optimizer: torch.optim.Optimizer, others: list[object]) -> str:
    momenta = [value for one in optimizer.state.values() for value in one.values()]
    tensors = [*model.state_dict().values(), *momenta, torch.get_rng_state()]
    found = xxhash.xxh3_128(b"".join(tensor.numpy().tobytes() for tensor in tensors))
    found.update(repr([others, random.getstate(), np.random.get_state()[1].tolist()]).encode())
    return found.hexdigest()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
