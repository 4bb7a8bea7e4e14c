"""What docs/comparison.md says of others, as far as torch and safetensors alone can show it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from resumable import CheckpointDamaged, RunState

ONES = torch.ones(1000)


def turn_over(folder: Path) -> None:
    """Turn one bit over in the middle of the file that holds the tensor."""
    ones = ONES.numpy().tobytes()
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    (path,) = [path for path in files if ones in path.read_bytes()]
    data = bytearray(path.read_bytes())
    data[data.index(ones) + 2003] ^= 0x40
    path.write_bytes(data)


def by_torch(folder: Path) -> Callable[[], torch.Tensor]:
    torch.save({"weight": ONES}, folder / "model.pt")
    return lambda: torch.load(folder / "model.pt")["weight"]


def by_safetensors(folder: Path) -> Callable[[], torch.Tensor]:
    save_file({"weight": ONES}, folder / "model.safetensors")
    return lambda: load_file(folder / "model.safetensors")["weight"]


def by_dcp(folder: Path) -> Callable[[], torch.Tensor]:
    import torch.distributed.checkpoint as dcp

    dcp.save({"weight": ONES}, checkpoint_id=folder, no_dist=True)

    def load() -> torch.Tensor:
        state: dict[str, Any] = {"weight": torch.zeros(1000)}
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        return state["weight"]

    return load


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("save", [by_torch, by_safetensors, by_dcp])
def test_others_load_a_byte_that_was_turned_over_without_a_word(
    save: Callable[[Path], Callable[[], torch.Tensor]], tmp_path: Path
) -> None:
    load = save(tmp_path)
    turn_over(tmp_path)

    assert (load() != ONES).sum() == 1


def test_a_byte_that_was_turned_over_here_is_named(run_dir: Path) -> None:
    model = nn.Linear(1000, 1, bias=False)
    nn.init.ones_(model.weight)
    with RunState.load(run_dir, model=model) as state:
        state.save()
    turn_over(run_dir)

    with pytest.raises(CheckpointDamaged, match=r"model.safetensors"):
        RunState.load(run_dir, model=model, resume=1)
