"""Two processes whose loader Accelerate or Fabric has prepared: stopped and resumed, and the plain script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gloo
import prepared_training
import pytest
from prepared_training import Stop, Training

from resumable import Ranks, RunState, StateMismatch

pytest.importorskip("accelerate")
pytest.importorskip("lightning_fabric")

SETUPS: dict[str, tuple[str, dict[str, Any]]] = {
    "a shard": ("accelerate", {}),
    "a shard, workers": ("accelerate", {"num_workers": 1}),
    "a shard, seeded": ("accelerate", {"use_seedable_sampler": True, "num_workers": 1}),
    "batches that are split": ("accelerate", {"split_batches": True}),
    "as many batches as there are": ("accelerate", {"even_batches": False, "samples": 20}),
    "a stream of each process": ("accelerate", {"is_stream": True, "dispatch_batches": False}),
    "a stream that is dealt out": ("accelerate", {"is_stream": True}),
    "dealt out in halves": (
        "accelerate",
        {"dispatch_batches": True, "split_batches": True, "num_workers": 1},
    ),
    "Fabric": ("fabric", {"num_workers": 1}),
}


def both(rank: int, folder: Path, stops: list[Stop], maker: str, options: Any) -> tuple[Any, Any]:
    """Return how the plain script ends, and how ours does."""
    there = {**options, "rank": rank, "size": 2}
    plain = prepared_training.plain(maker, **there)
    return plain, prepared_training.stopped(folder / "run", stops, maker, **there)


@pytest.mark.heavy
@pytest.mark.parametrize("stops", [[2, 4], [], [5, 7, 11], ["epoch 0", 13]], ids=str)
@pytest.mark.parametrize("setup", SETUPS)
def test_two_processes_end_with_the_bits_of_the_plain_script(
    setup: str, stops: list[Stop], tmp_path: Path
) -> None:
    maker, options = SETUPS[setup]
    found = gloo.run(2, both, tmp_path, stops, maker, options, folder=tmp_path, limit=100)
    for one in found:
        assert one.error is None, one.printed
        assert one.value is not None
        plain, ours = one.value
        assert ours == plain


def until(rank: int, run_dir: Path, stop: Stop, size: int) -> None:
    prepared_training.ours(run_dir, stop, "accelerate", rank=rank, size=size)


def succeeded(found: list[gloo.Ended]) -> None:
    assert all(one.error is None for one in found), found[0].printed


@pytest.mark.heavy
def test_another_number_of_processes_is_taken_only_between_epochs(tmp_path: Path) -> None:
    succeeded(gloo.run(2, until, tmp_path / "run", 7, 2, folder=tmp_path))
    (alone,) = gloo.run(1, until, tmp_path / "run", "epoch 1", 1, folder=tmp_path)
    assert isinstance(alone.error, StateMismatch)
    assert "its batches come from a BatchSamplerShard" in str(alone.error)

    succeeded(gloo.run(2, until, tmp_path / "run", "epoch 1", 2, folder=tmp_path))
    (alone,) = gloo.run(1, until, tmp_path / "run", "epoch 2", 1, folder=tmp_path)
    succeeded([alone])
    assert "resumed" in alone.printed


def apart(rank: int, run_dir: Path) -> list[int]:
    """Loop over batches of which rank 0 has one more, stopped after the second."""
    found = []
    for stop in (2, None):
        loader = Training("accelerate", rank, 2, samples=10, even_batches=False).loader
        with RunState.load(run_dir, loader=loader, every=None, ranks=Ranks(timeout=20)) as state:
            for _ in state.batches():
                if state.batch + 1 == stop:
                    state.save().wait()
                    break
            found.append(state.batch)
    return found


@pytest.mark.heavy
def test_a_process_that_has_no_batch_left_is_not_waited_for(tmp_path: Path) -> None:
    found = gloo.run(2, apart, tmp_path / "run", folder=tmp_path)
    succeeded(found)
    assert [one.value for one in found] == [[2, 3], [2, 2]]
