"""Two processes whose loader Accelerate or Fabric has prepared: stopped and resumed, and the plain script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gloo
import prepared_training
import pytest
from prepared_training import Stop

pytest.importorskip("accelerate")
pytest.importorskip("lightning_fabric")

SETUPS: dict[str, tuple[str, dict[str, Any]]] = {
    "a shard": ("accelerate", {}),
    "a shard, workers": ("accelerate", {"num_workers": 1}),
    "a shard, shuffled by torch": ("accelerate", {"use_seedable_sampler": False, "num_workers": 1}),
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


@pytest.mark.parametrize("stops", [[2, 4], [], [5, 7, 11], ["epoch 0", 13]], ids=str)
@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.quick(4)
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
