"""What a run of very many checkpoints costs: finding the newest one, and saving another."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import torch

from resumable import RunState

from .contenders import quiet
from .rounds import Values, put_garbage_aside, tell

FEW = 10
TURNS = 41


def measure(many: int, folder: Path) -> Values:
    """Make a run of many checkpoints, and one of few; load and save in turns."""
    tell(f"a run of {many} checkpoints")
    paths = {"many": folder / "many", "few": folder / "few"}
    _fill(paths["many"], many)
    _fill(paths["few"], FEW)
    values: Values = {"listdir": []}
    put_garbage_aside()
    for turn in range(TURNS):
        values["listdir"].append(_listdir(paths["many"] / "checkpoints"))
        for which in sorted(paths, reverse=bool(turn % 2)):
            load, save = _load_and_save(paths[which])
            values.setdefault(f"load_{which}", []).append(load)
            values.setdefault(f"save_{which}", []).append(save)
    shutil.rmtree(folder)
    return values


def _fill(path: Path, count: int) -> None:
    with quiet(), RunState.load(path, model=torch.nn.Linear(4, 4), keep=None) as state:
        for _ in range(count):
            state.save()


def _load_and_save(path: Path) -> tuple[float, float]:
    model = torch.nn.Linear(4, 4)
    start = time.perf_counter()
    with quiet():
        state = RunState.load(path, model=model, keep=None)
    loaded = time.perf_counter() - start
    # The first one of a RunState makes what the later ones have.
    state.save().wait()
    start = time.perf_counter()
    state.save().wait()
    saved = time.perf_counter() - start
    state.close()
    return loaded, saved


def _listdir(path: Path) -> float:
    start = time.perf_counter()
    max(os.listdir(path))
    return time.perf_counter() - start
