"""Saving and loading against torch.save and against writing the same bytes, all in one run.

    python benchmarks/save_and_load.py [MEGABYTES]

Every contender writes the same state to the same disk and flushes it; the figures to read are the ratios.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from resumable import Run, RunState

ROUNDS = 5


def training(megabytes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and an AdamW whose state, with the weights, takes about so much memory."""
    side = 1024
    layers = max(1, megabytes * 2**20 // (3 * 4 * side * side))
    model = nn.Sequential(*(nn.Linear(side, side) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, side)).sum().backward()
    optimizer.step()
    return model, optimizer


def flushed(write: Callable[[Path], object], path: Path) -> None:
    """Write a file, make it durable, and put it in the place of the one before."""
    fresh = path.with_suffix(".new")
    write(fresh)
    with fresh.open("rb") as file:
        os.fsync(file.fileno())
    fresh.replace(path)


def seconds(job: Callable[[], object]) -> float:
    """Return how long a job takes."""
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def main() -> None:
    """Measure in turns, so that a noisy machine is noisy for all, and print the medians."""
    model, optimizer = training(int(sys.argv[1]) if len(sys.argv) > 1 else 400)
    folder = Path(tempfile.mkdtemp(dir="."))
    state = RunState(folder / "run", model=model, optimizer=optimizer, keep=1)
    state.save().wait()
    content = [bytes(data) for data in Run(folder / "run").checkpoints()[-1].read().values()]
    whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def write_raw(path: Path) -> None:
        with path.open("wb", buffering=0) as file:
            for data in content:
                file.write(data)

    def load_torch() -> None:
        saved = torch.load(folder / "torch.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    taken: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name, job in {
            "raw write": lambda: flushed(write_raw, folder / "raw"),
            "torch.save": lambda: flushed(lambda path: torch.save(whole, path), folder / "torch.pt"),
            "save, until it returns": state.save,
            "save, the rest until durable": state.wait,
            "torch.load": load_torch,
            "restore, verified": lambda: state.restore("newest"),
        }.items():
            taken.setdefault(name, []).append(seconds(job))
    state.close()
    size = sum(map(len, content))
    print(f"{size / 1e6:.0f} MB, {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
    raw = statistics.median(taken["raw write"])
    for name, times in taken.items():
        median = statistics.median(times)
        print(f"{name:30} {median:7.3f} s  {median / raw:5.2f} x raw write  (best {min(times):.3f})")


if __name__ == "__main__":
    main()
