"""What one process of a training asks for, all do at the same boundary."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, NoReturn

import gloo
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import resumable
from resumable import Run, RunState
from resumable.processes.ranks import Ranks
from resumable.processes.rendezvous import Rendezvous

pytestmark = pytest.mark.timeout(120)


def hear(rank: int, size: int, asks: dict[int, int], pause: float, ahead: float) -> list[Any]:
    """Pass boundaries, each rank at its own speed; return where something was to be done."""
    ranks = Ranks(1.5, lambda: (0, 0, 0))
    calls = Rendezvous(ranks, lambda: ahead)
    ranks.join({}, {})
    found = []
    for boundary in range(400):
        if asks.get(rank) == boundary:
            calls.want("leave" if rank else "save", f"asked by {rank}")
            calls.want("leave" if rank else "save", "asked twice")
        if called := calls.passed():
            found.append((boundary, *called))
        time.sleep(pause * (rank + 1))
    ranks.agree("the end", lambda: None)
    return found


@pytest.mark.quick(4)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("ahead", [0.0, 0.001, 10])
def test_all_do_at_the_same_boundary_what_one_asks_for(tmp_path: Path, size: int, ahead: float) -> None:
    ended = gloo.run(size, hear, size, {size - 1: 20}, 0.001, ahead, folder=tmp_path)

    found = [one.value for one in ended]
    assert len(found[0]) == 1
    assert found[0][0][1:] == ("leave", f"asked by {size - 1}")
    assert found == [found[0]] * size


@pytest.mark.heavy
def test_of_two_that_ask_at_once_both_are_heard_everywhere(tmp_path: Path) -> None:
    ended = gloo.run(2, hear, 2, {0: 30, 1: 30}, 0.001, 0.001, folder=tmp_path)

    found = [one.value for one in ended]
    assert found[0] == found[1]
    assert sorted(kind for _, kind, _ in found[0]) == ["leave", "save"]


class Augmented(Dataset[Any]):
    """Samples that are drawn at random."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(4) + index / 48


def train(rank: int, run_dir: Path, whom: int | None, step: int, is_group: bool, options: Any) -> Any:
    """Train in DDP; at a step one rank gets a signal."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(100 + rank)
    sampler: DistributedSampler[Any] = DistributedSampler(Augmented())
    loader = DataLoader(Augmented(), batch_size=1, sampler=sampler, num_workers=1)
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    with RunState.load(run_dir, **parts, ranks=resumable.Ranks(timeout=3), keep=None, **options) as state:  # type: ignore[arg-type]
        for epoch in state.epochs(8):
            sampler.set_epoch(epoch)
            for x in state.batches():
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                # The faster the bodies, the more of them pass until all have heard
                time.sleep(0.005)
                if rank == whom and state.step == step:
                    os.killpg(0, signal.SIGTERM) if is_group else signal.raise_signal(signal.SIGTERM)
    return [p.sum().item() for p in model.parameters()], torch.rand(1).item(), state.step


@pytest.mark.proves("in good order")
@pytest.mark.parametrize(
    ("size", "whom", "is_group"),
    [
        (2, 1, True),
        pytest.param(2, 0, False, marks=pytest.mark.heavy),
        pytest.param(3, 2, False, marks=pytest.mark.heavy),
    ],
)
@pytest.mark.heavy
def test_a_signal_on_one_rank_ends_all_at_one_place(
    tmp_path: Path, size: int, whom: int, is_group: bool
) -> None:
    def start(run: str, step: int | None) -> list[gloo.Ended]:
        told = None if step is None else whom
        return gloo.run(size, train, tmp_path / run, told, step, is_group, {}, folder=tmp_path)

    whole = start("whole", None)
    cut = [start("run", step) for step in (5, 70, None)]

    for ended in cut[:2]:
        assert [getattr(one.error, "code", one.error) for one in ended] == [143] * size
    assert [one.value for one in cut[2]] == [one.value for one in whole]
    assert [one.error for one in whole] == [None] * size
    steps = [found.about.step for found in Run(tmp_path / "run").checkpoints()]
    # The last one is of the end of the loop.
    assert len(steps) == 3
    assert 5 <= steps[0] < steps[1] < steps[2] == 8 * 48 // size


@pytest.mark.heavy
def test_saves_by_count_and_by_time_are_made_by_all(tmp_path: Path) -> None:
    options = {"every": [7, "0.2 s"]}
    ended = gloo.run(2, train, tmp_path / "run", None, 0, False, options, folder=tmp_path)

    assert [one.error for one in ended] == [None, None]
    saved = Run(tmp_path / "run").checkpoints()
    assert saved
    for found in saved:
        found.verify()
        assert found.about.world_size == 2


@pytest.mark.heavy
@pytest.mark.proves("never a hang")
def test_a_rank_that_does_not_come_to_the_place_is_named(tmp_path: Path) -> None:
    ended = gloo.run(2, leave_alone, folder=tmp_path, limit=30)

    assert "no place was found where all leave (told): rank 0 has waited" in str(ended[0].error)
    assert "rank 1" in str(ended[0].error)


def leave_alone(rank: int) -> NoReturn:
    ranks = Ranks(1.5, lambda: (0, 0, 0))
    calls = Rendezvous(ranks, lambda: 0.0)
    ranks.join({}, {})
    if rank:
        gloo.stop_myself()
    calls.want("leave", "told")
    while True:
        calls.passed()
        time.sleep(0.01)


def give_then_save_alone(rank: int, run_dir: Path) -> Any:
    """Give a metric once, and let the loop save by itself for long after it."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with RunState.load(
        run_dir, model=model, optimizer=optimizer, every=1, minimize="loss", ranks=resumable.Ranks(timeout=5)
    ) as state:
        for step in state.steps(8):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            if step == 0:
                state.save(loss=1.0 + rank)
        return state.metrics, state.best


@pytest.mark.heavy
def test_after_many_saves_by_itself_all_know_what_rank_0_gave_last(tmp_path: Path) -> None:
    ended = gloo.run(2, give_then_save_alone, tmp_path / "run", folder=tmp_path)

    assert [one.value for one in ended] == [({"loss": 1.0}, 1.0)] * 2, ended
