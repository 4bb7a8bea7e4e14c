"""Trainings on a device, killed twice and sent SIGTERM once, end with the bits of an uninterrupted one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from forks import WARM, Life
from places import DATA, ROOT
from sharded_training import CAN_SHARD

KINDS = [
    "fp16",
    "bf16",
    "channels_last",
    "lstm",
    "compiled",
    "captured",
    "fused",
    "capturable",
    "prefetch",
    *(["sharded"] if CAN_SHARD else []),
]
ENDS = [(7, signal.SIGKILL), (6, signal.SIGKILL), (5, signal.SIGTERM)]
"""After how many batches of a start its end comes, and how: in mid-epoch, at a last batch, in mid-epoch."""


def _started(device: str, kind: str, run: Path, *end: int) -> Life:
    # Before CUDA starts: what it needs to repeat the sums of matrix products.
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONPATH": str(ROOT)}
    command = [str(DATA / "on_device.py"), device, kind, str(run), *map(str, end)]
    if device == "cpu":
        return WARM.run(command, run.parent, environment=environment, deadline=300)
    how: Any = {"capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([sys.executable, *command], env={**os.environ, **environment}, **how)
    return Life(done.returncode, done.stdout, done.stderr)


def _digest(ended: Life) -> str:
    return ended.checked().out.split("digest ")[1].strip()


def _chain(device: str, kind: str, folder: Path) -> tuple[str, str]:
    """Return the digest of the uninterrupted training, and that of the interrupted one."""
    straight = _digest(_started(device, kind, folder / "straight"))
    for batches, number in ENDS:
        ended = _started(device, kind, folder / "ended", batches, number)
        expected = -number if number == signal.SIGKILL else 128 + number
        assert ended.code == expected, ended.err
    return straight, _digest(_started(device, kind, folder / "ended"))


@pytest.mark.proves("exact")
@pytest.mark.heavy
@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "captured"])
def test_a_training_that_is_killed_ends_as_an_uninterrupted_one(kind: str, tmp_path: Path) -> None:
    straight, interrupted = _chain("cpu", kind, tmp_path)

    assert interrupted == straight


@pytest.fixture(scope="module")
def chains(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[tuple[str, str]]]:
    """Begin the chains of all kinds on the GPU at once: most of their time is that of their starts."""
    folder = tmp_path_factory.mktemp("chains")
    pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2))
    return {kind: pool.submit(_chain, "cuda", kind, folder / kind) for kind in KINDS}


@pytest.mark.proves("exact")
@pytest.mark.cuda
@pytest.mark.timeout(500)
@pytest.mark.parametrize("kind", KINDS)
def test_a_training_on_a_gpu_that_is_killed_ends_as_an_uninterrupted_one(
    kind: str, chains: dict[str, Future[tuple[str, str]]]
) -> None:
    straight, interrupted = chains[kind].result()

    assert interrupted == straight
