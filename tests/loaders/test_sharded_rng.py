"""What torch keeps of the random numbers of sharded tensors, on a stand-in: it exists only on GPUs."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gloo
import pytest
import torch
from sharded_training import CAN_SHARD, WHY_NOT, make, values

from resumable import RunState
from resumable.loaders.generators import rng, sharded_rng
from resumable.parts.parts import Parts

pytestmark = pytest.mark.skipif(not CAN_SHARD, reason=WHY_NOT)


class Tracker:
    """As torch's, but on a CPU; like torch's it replaces the generator unless it is told not to."""

    def __init__(self, device_mesh: Any, run_state_sync: bool = True) -> None:
        self.mesh = device_mesh
        if run_state_sync:
            torch.manual_seed(0)


class OldTracker(Tracker):
    """As that of torch 2.6, which takes a device type and keeps a state of its own."""

    def __init__(self, device_type: str = "cuda", run_state_sync: bool = True) -> None:
        super().__init__(device_type, run_state_sync)
        self.rng_states = {"parallel-rng": torch.zeros(16, dtype=torch.uint8)}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    import torch.distributed.tensor._random as module

    monkeypatch.setattr(module, "_rng_tracker", None)
    monkeypatch.setattr(module, "OffsetBasedRNGTracker", Tracker)
    return module


GPUS = SimpleNamespace(device_type="cuda")


def test_what_torch_does_with_its_private_names_is_what_is_relied_upon() -> None:
    import inspect

    import torch.distributed.tensor._random as module

    assert hasattr(module, "_rng_tracker"), "torch tracks the random numbers of sharded tensors elsewhere now"
    names = inspect.signature(module.OffsetBasedRNGTracker).parameters
    assert [*names] in (["device_mesh", "run_state_sync"], ["device_type", "run_state_sync"])


def test_a_tracker_is_made_without_touching_a_generator(module: Any) -> None:
    assert "sharded" not in rng.collect()
    before = torch.get_rng_state()
    sharded_rng.make(SimpleNamespace(device_type="cpu"))
    assert module._rng_tracker is None
    sharded_rng.make(GPUS)
    made = module._rng_tracker
    assert made.mesh is GPUS
    sharded_rng.make(GPUS)
    assert module._rng_tracker is made
    assert torch.equal(torch.get_rng_state(), before)
    assert rng.collect()["sharded"] == {}
    assert "sharded" not in rng.collect(devices=False)


def test_the_state_that_old_versions_keep_is_restored(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OffsetBasedRNGTracker", OldTracker)
    sharded_rng.make(GPUS)
    assert module._rng_tracker.mesh == "cuda"
    module._rng_tracker.rng_states["parallel-rng"] += 7
    found = rng.collect()

    module._rng_tracker = None
    sharded_rng.make(GPUS)
    rng.restore(found)
    assert module._rng_tracker.rng_states["parallel-rng"].tolist() == [7] * 16
    module._rng_tracker.rng_states["parallel-rng"] += 1
    assert found["sharded"]["parallel-rng"].tolist() == [7] * 16


def _resumes(rank: int, run_dir: Path, is_there: bool) -> list[str]:
    import torch.distributed.tensor._random as module

    there: Any = module
    there._rng_tracker, there.OffsetBasedRNGTracker = Tracker(None) if is_there else None, Tracker
    model, optimizer, _ = make("fsdp-2", 0)
    made = []
    # The mesh of a group on a CPU, as if it were one of GPUs.
    real = Parts._mesh
    Parts._mesh = lambda self: real(self) and GPUS  # type: ignore[method-assign]
    with RunState.load(run_dir, model=model, optimizer=optimizer) as state:
        made.append(str(there._rng_tracker and there._rng_tracker.mesh))
        for _ in state.steps(state.step + 1):
            state.save()
    return made


@pytest.mark.heavy
def test_a_resumed_process_has_the_tracker_that_the_one_before_had(tmp_path: Path) -> None:
    def start(is_there: bool) -> Any:
        return values(gloo.run(2, _resumes, tmp_path / "exp", is_there, folder=tmp_path))

    assert start(False) == [["None"]] * 2
    # No save knew of one: the first operation makes it, as in an uninterrupted training.
    assert start(False) == [["None"]] * 2
    assert start(True) == [["None"]] * 2
    assert start(False) == [[str(GPUS)]] * 2
