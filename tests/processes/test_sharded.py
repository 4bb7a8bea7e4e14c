"""Sharded trainings: FSDP2, HSDP, tensor parallelism, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sharded_training import MESHES, differing, run, values

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without processes")
SHARDED = [kind for kind in MESHES if kind not in ("plain", "ddp")]


@pytest.mark.parametrize("kind", SHARDED)
def test_a_sharded_training_that_is_resumed_twice_ends_with_the_same_bits(tmp_path: Path, kind: str) -> None:
    whole = values(run(kind, tmp_path / "whole", 7, tmp_path))

    run(kind, tmp_path / "exp", 7, tmp_path, dies=2)
    run(kind, tmp_path / "exp", 7, tmp_path, seed=1, dies=4)
    ended = values(run(kind, tmp_path / "exp", 7, tmp_path, seed=2))

    for now, then in zip(ended, whole, strict=True):
        assert differing(now["ended"], then["ended"]) == []
        assert differing(now["own"], then["own"]) == []
        assert now["samples"] == then["samples"]
        assert now["seen"] == then["seen"][-len(now["seen"]) :]
        assert now["drawn"].tobytes() == then["drawn"].tobytes()


@pytest.mark.heavy
@pytest.mark.parametrize("there", MESHES)
@pytest.mark.parametrize("here", MESHES)
def test_every_mesh_continues_from_every_other(tmp_path: Path, here: str, there: str) -> None:
    saved = values(run(here, tmp_path / "exp", 3, tmp_path))

    resumed = values(run(there, tmp_path / "exp", 4, tmp_path, seed=1))

    for one in resumed:
        assert differing(one["begun"], saved[0]["ended"]) == []
