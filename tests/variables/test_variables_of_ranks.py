"""The variables of a script that several processes run: each rank has its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from forks import Forks
from places import SUPPORT

from resumable.cli.app import main

TRAINING = f"""
import sys
sys.path.insert(0, {str(SUPPORT / "site-packages")!r})
import carrying, os, torch
from carrying import note
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from resumable import RunState

rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
dist.init_process_group("gloo", init_method=os.environ["MEET"], rank=rank, world_size=size)
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = torch.randn(36, 4)
sampler = DistributedSampler(data, seed=1)
loader = DataLoader(data, 12 // size, sampler=sampler)
state = RunState.load("run", model=model, optimizer=optimizer, loader=loader, every=None, quiet=True)

def ended():
    carrying.left -= 1
    if not carrying.left:
        state.save().wait()
        dist.barrier()
        os._exit(143)

class Best:
    loss, epoch = 9.0, None

dice = torch.Generator().manual_seed(rank)
best, seen, weight = Best(), [], float(rank)
for epoch in state.epochs(3):
    sampler.set_epoch(epoch)
    for x in state.batches():
        loss = (model(x + torch.rand(4, generator=dice)) - weight).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
        weight = 0.9 * weight + 0.1 * loss.item()
        if loss < best.loss:
            best.loss, best.epoch = loss.item(), epoch
        note(rank, seen, weight, best.loss, best.epoch, model.module.weight.tolist())
        ended()
    ended()
state.close()
dist.destroy_process_group()
"""


def trained(
    forks: Forks, folder: Path, starts: Sequence[tuple[int, int]]
) -> tuple[list[list[list[str]]], str]:
    """Return what each rank has noted over all starts, each with its ranks and its stop."""
    folder.mkdir()
    (folder / "train.py").write_text(TRAINING)
    for number, (size, stop) in enumerate(starts):
        common = {"WORLD_SIZE": str(size), "STOP": str(stop), "MEET": f"file://{folder}/meet-{number}"}
        ranks = [
            forks.begin(["train.py"], folder, environment={**common, "RANK": str(rank)})
            for rank in range(size)
        ]
        lives = [one.ended() for one in ranks]
        assert [one.code for one in lives] == [0 if stop < 0 else 143] * size, lives
    rows = [json.loads(one) for one in (folder / "noted").read_text().splitlines()]
    noted = [[row for row in rows if row[0] == str(rank)] for rank in range(starts[-1][0])]
    return noted, (folder / "problems").read_text().strip()


@pytest.mark.heavy
@pytest.mark.proves("exact")
def test_each_rank_has_its_own_variables_back(
    forks: Forks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, _ = trained(forks, tmp_path / "plain", [(2, -1)])
    assert expected[0][-1] != expected[1][-1]

    # In mid-epoch, after an epoch's last batch, after the epoch, and in the next one.
    for stops in ((2, 1), (3, 1), (4, 4), (5, 2)):
        starts = [*((2, stop) for stop in stops), (2, -1)]
        assert trained(forks, tmp_path / str(stops), starts) == (expected, ""), stops
    main(["show", str(tmp_path / str(stops) / "run"), "--json"])
    shown = {row["name"]: row["differs_on"] for row in json.loads(capsys.readouterr().out)["variables"]}
    assert [shown[name] for name in ("weight", "seen[0]", "epoch")] == [1, 1, 0]


@pytest.mark.heavy
def test_a_new_rank_begins_with_the_variables_of_the_first(forks: Forks, tmp_path: Path) -> None:
    ranks, told = trained(forks, tmp_path / "more", [(2, 4), (3, 5), (3, -1)])
    losses = [[json.loads(row[1]) for row in rows] for rows in ranks]

    assert [[len(row) for row in rows] for rows in losses] == [[*range(1, 10)]] * 2 + [[*range(4, 10)]]
    assert [rows[-1][:3] for rows in losses] == [losses[0][2], losses[1][2], losses[0][2]]
    assert losses[0][2] != losses[1][2]
    assert "world_size         2  -> 3" in told
