"""A batch next to the plain loader: the main thread's time without workers, the throughput with two."""

from __future__ import annotations

import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from . import data
from .apart import Apart
from .rounds import Figures, Values, in_turns, tell

WARM_UP = 100
_samples = {"nothing drawn": data.Samples(count=20_000), "numbers drawn": data.Samples(True, count=20_000)}
SETUPS: dict[str, tuple[data.Setup, int]] = {
    "0 workers, nothing drawn": (partial(data.shuffled, _samples["nothing drawn"]), 2_000),
    "0 workers, numbers drawn": (partial(data.shuffled, _samples["numbers drawn"]), 2_000),
    "2 workers, numbers drawn": (partial(data.shuffled, _samples["numbers drawn"], **data.W2), 600),
}
"""Loaders of batches of eight scalars, and how many are timed; the numbers come from all three generators."""
LOOPS = {"plain": data.plain, "ours": data.ours}


def measure(rounds: int, folder: Path, errors: dict[str, dict[str, str]]) -> dict[str, Values]:
    """Return, for each set-up and loop, the seconds of a batch and those of the main thread's CPU."""
    tell(f"batches: {rounds} rounds")
    folder.mkdir(parents=True)
    # In a process without threads: each measurement is a fork of it.
    with Apart(_rounds, rounds, folder) as apart:
        found, failed = apart.receive()
    if failed:
        errors.setdefault("resumable", {}).update(failed)
    return dict(found)


def _rounds(connection: Connection, rounds: int, folder: Path) -> None:
    torch.set_num_threads(1)
    tempfile.tempdir = str(folder)
    jobs = {
        f"{setup}, {loop}": partial(_leg, _Timed(contender, make, batches))
        for setup, (make, batches) in SETUPS.items()
        for loop, contender in LOOPS.items()
    }
    errors: dict[str, dict[str, str]] = {}
    taken = in_turns("batches", jobs, rounds, 600.0, errors)
    connection.send(
        (taken, {name: reason for reasons in errors.values() for name, reason in reasons.items()})
    )


def _leg(timed: _Timed, number: int) -> Figures:
    return data.leg(timed)


@dataclass(frozen=True)
class _Timed:
    contender: data.Contender
    setup: data.Setup
    batches: int

    def __call__(self) -> Figures:
        clock = _Clock(self.batches)
        with suppress(data.Stopped):
            self.contender(partial(data.build, self.setup), clock, Path(tempfile.mkdtemp()), False)
        return {name: seconds / self.batches for name, seconds in clock.taken.items()}


class _Clock:
    """A training that does nothing but look at the clock."""

    epochs = 1

    def __init__(self, batches: int) -> None:
        self.done, self.last = 0, WARM_UP + batches
        self.taken: Figures = {}

    def step(self, epoch: int, batch: Any) -> bool:
        """Count a batch; begin after the warm-up, and stop after the last."""
        self.done += 1
        if self.done == WARM_UP:
            self.started = time.perf_counter(), time.thread_time()
        elif self.done == self.last:
            ended = time.perf_counter(), time.thread_time()
            self.taken = dict(zip(("batch", "main"), map(float.__sub__, ended, self.started), strict=True))
            raise data.Stopped
        return False
