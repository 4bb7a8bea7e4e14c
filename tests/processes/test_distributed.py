"""Trainings of several processes: stopped and resumed, they end as one that was never stopped."""

from __future__ import annotations

import hashlib
import random
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import compare
import gloo
import numpy as np
import pytest
import torch
from grouped import grouped
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from resumable import CannotStore, Ranks, ResumableError, Run, RunState, StateMismatch

EPOCHS = 2


class Augmented(Dataset[Any]):
    """Samples that are drawn at random as they are loaded, by all three libraries."""

    def __init__(self, size: int = 40) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(4) + random.random() + float(np.random.rand())
        return torch.arange(4) * index / self.size + noise


class Training:
    """What each process makes: a model in DDP, an optimizer, a loader that augments in its workers."""

    def __init__(self, rank: int, *, workers: int = 0, drop_last: bool = False, **ddp: Any) -> None:
        torch.manual_seed(0)
        layers = [
            nn.Linear(4, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.3),
            nn.Tanh(),
            nn.Linear(8, 6),
            nn.Linear(6, 1),
        ]
        self.model = DistributedDataParallel(nn.Sequential(*layers), **ddp)
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(100 + rank)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.7)
        self.own = np.random.default_rng(rank)
        self.sampler: DistributedSampler[Any] = DistributedSampler(Augmented(), drop_last=drop_last, seed=3)
        self.loader = DataLoader(
            Augmented(), batch_size=2, sampler=self.sampler, num_workers=workers, drop_last=drop_last
        )
        self.seen: list[str] = []

    def parts(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "loader": self.loader,
            "extra": {"own": self.own},
        }

    def digest(self) -> str:
        parts = [t.detach().numpy().tobytes() for t in self.model.state_dict().values()]
        for state in self.optimizer.state.values():
            parts += [value.numpy().tobytes() for value in state.values()]
        parts += [str(self.scheduler.get_last_lr()).encode(), repr(self.own.bit_generator.state).encode()]
        draws = f"{random.random()} {np.random.rand()} {torch.rand(1).item()}".encode()
        return hashlib.sha256(b"".join([*parts, draws])).hexdigest()


def train(
    rank: int, run_dir: Path, stop_at: int | None, options: dict[str, Any], keywords: dict[str, Any]
) -> Any:
    """Train until so many batches were done in this process, or to the end; return what the rank has seen."""
    window = options.pop("window", 1)
    training = Training(rank, **options)
    done = 0
    with RunState.load(
        run_dir, **training.parts(), minimize="loss", **grouped(timeout=20, **keywords)
    ) as state:
        for epoch in state.epochs(EPOCHS):
            training.sampler.set_epoch(epoch)
            for batch in state.batches():
                training.seen.append(hashlib.sha256(batch.numpy().tobytes()).hexdigest()[:8])
                done += 1
                is_step = (state.batch + 1) % window == 0
                with training.model.no_sync() if not is_step else torch.enable_grad():
                    loss = (training.model(batch) * training.own.random()).square().mean()
                    loss.backward()
                if is_step:
                    training.optimizer.step()
                    training.optimizer.zero_grad()
                    training.scheduler.step()
                if done == stop_at:
                    state.save(loss=loss.detach() + rank).wait()
                    return training.seen
            state.save(loss=float(epoch))
    return training.seen, training.digest(), state.samples, state.best


def ended(
    size: int, folder: Path, stop_at: int | None, options: dict[str, Any], **keywords: Any
) -> list[Any]:
    return values(gloo.run(size, train, folder / "run", stop_at, dict(options), keywords, folder=folder))


def values(found: list[gloo.Ended]) -> list[Any]:
    for one in found:
        if one.error:
            raise AssertionError(f"a rank failed: {one.printed}") from one.error
        assert one.value is not None, f"a rank has ended with {one.exitcode}"
    return [one.value for one in found]


@pytest.mark.proves("exact")
@pytest.mark.parametrize(
    ("size", "stops", "options"),
    [
        (2, (3, 2), {"workers": 2}),
        (4, (2, 3), {}),
        pytest.param(4, (3, 1), {"workers": 2}, marks=pytest.mark.heavy),
        pytest.param(2, (9, 9), {}, marks=pytest.mark.heavy),
        pytest.param(2, (3, 3), {"window": 2}, marks=pytest.mark.heavy),
        pytest.param(2, (2, 9), {"drop_last": True}, marks=pytest.mark.heavy),
        pytest.param(4, (4, 1), {"static_graph": True}, marks=pytest.mark.heavy),
    ],
)
@pytest.mark.heavy
def test_a_training_stopped_twice_ends_as_one_that_was_not(
    tmp_path: Path, size: int, stops: tuple[int, ...], options: dict[str, Any]
) -> None:
    traces = [tmp_path / f"{name}.jsonl" for name in ("whole", "parts")]
    whole = ended(size, tmp_path / "whole", None, options, trace=traces[0], trace_every=1)

    stopped = {"trace": traces[1], "trace_every": 1}
    parts = [ended(size, tmp_path / "parts", stop, options, **stopped) for stop in stops]
    last = ended(size, tmp_path / "parts", None, options, **stopped)

    for rank in range(size):
        seen = [batch for part in parts for batch in part[rank]] + last[rank][0]
        assert (seen, last[rank][1:]) == (whole[rank][0], whole[rank][1:]), compare.first_of_traces(*traces)
    assert len({one[1] for one in whole}) == size, "the ranks draw the same"


def big(rank: int, run_dir: Path, keywords: dict[str, Any]) -> Any:
    """Save a state of several blocks of 16 MiB twice; return what the files are."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(1024, 4096, bias=False), nn.Linear(4096, 2048, bias=False), nn.Linear(8, 8)
    )
    model[2].requires_grad_(False)
    model[1].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([model[0].weight], lr=0.01)
    with RunState.load(run_dir, model=model, optimizer=optimizer, **grouped(timeout=30, **keywords)) as state:
        for step in state.steps(3):
            model[0].weight.grad = torch.full_like(model[0].weight, step + 1.0)
            optimizer.step()
            optimizer.zero_grad()
            state.save()
        state.wait()
        memory = state._saving._image._memory
        taken = memory.size if memory else 0
    (newest, *_) = Run(run_dir).checkpoints()[::-1]
    newest.verify()
    files = {path: record for path, record in newest.about.files.items() if not path.startswith("ranks/")}
    with RunState.load(run_dir, model=model, optimizer=optimizer, **grouped(timeout=30, **keywords)) as state:
        return files, taken, float(model[0].weight.double().sum()), state.step


@pytest.mark.heavy
def test_files_written_by_all_are_those_that_one_writes(tmp_path: Path) -> None:
    alone = values(gloo.run(1, big, tmp_path / "alone", {}, folder=tmp_path))
    for size in (2, 4):
        found = values(gloo.run(size, big, tmp_path / str(size), {"write": "all"}, folder=tmp_path))

        assert all(one[0] == alone[0][0] for one in found), "other bytes than one process writes"
        assert sum(one[1] for one in found) <= 1.05 * alone[0][1], "more memory than one process takes"
        assert {one[2:] for one in found} == {alone[0][2:]}


def diverged(rank: int, run_dir: Path, whose: str, keywords: dict[str, Any]) -> Any:
    """Let one rank's tensors go their own way, and save."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    if whose == "other tensors" and rank == 1:
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    try:
        with RunState.load(
            run_dir, model=model, optimizer=optimizer, **grouped(timeout=20, **keywords)
        ) as state:
            for step in state.steps(3):
                model(torch.full((2, 3), rank + 1.0)).sum().backward()
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                if whose == "weight" and rank == 1 and step == 1:
                    with torch.no_grad():
                        model[0].weight[0, 0] += 1e-6
                state.save().wait()
    except ResumableError as exc:
        return exc.problem
    return state.step


@pytest.mark.heavy
@pytest.mark.proves("never a silent change")
def test_a_tensor_that_has_diverged_is_named(tmp_path: Path) -> None:
    keywords = {"check_replicas": True}

    found = values(gloo.run(2, diverged, tmp_path / "run", "weight", keywords, folder=tmp_path))

    problem = "on rank 1 the tensor model.safetensors: 0.weight is not what it is on rank 0"
    assert found == [f"checkpoint 2 was not made: {problem}."] * 2
    assert [one.about.step for one in Run(tmp_path / "run").checkpoints()] == [1]


@pytest.mark.heavy
def test_statistics_that_each_rank_makes_are_no_divergence(tmp_path: Path) -> None:
    keywords = {"check_replicas": True, "write": "all"}

    found = values(gloo.run(2, diverged, tmp_path / "run", "none", keywords, folder=tmp_path))

    assert found == [3, 3]


def test_ranks_whose_models_differ_are_named(tmp_path: Path) -> None:
    keywords = {"write": "all"}

    found = values(gloo.run(2, diverged, tmp_path / "run", "other tensors", keywords, folder=tmp_path))

    assert all("what model holds is '7 tensors (" in problem for problem in found), found


def on_nodes(rank: int, folder: Path, stop_at: int | None, keywords: dict[str, Any]) -> Any:
    """Train with a run directory for each two ranks, as on two nodes without a disk in common."""
    return train(rank, folder / f"node{rank // 2}" / "run", stop_at, {}, {"shared": False, **keywords})


@pytest.mark.parametrize("write", ["one", pytest.param("all", marks=pytest.mark.heavy)])
@pytest.mark.heavy
def test_each_node_keeps_a_full_copy_where_no_disk_is_shared(tmp_path: Path, write: str) -> None:
    whole = ended(4, tmp_path / "whole", None, {})

    def go(stop_at: int | None) -> list[Any]:
        return values(gloo.run(4, on_nodes, tmp_path, stop_at, {"write": write}, folder=tmp_path, limit=60))

    parts = [go(2), go(2)]
    copies = [Run(tmp_path / f"node{node}" / "run").checkpoints() for node in (0, 1)]
    for first, second in zip(*copies, strict=True):
        first.verify()
        second.verify()
        # But for what differs by rank, such as the statistics of batches, which lie in ranks/
        own = {file for file in first.about.files if file.startswith("ranks/")}
        assert own == {f"ranks/0000{rank}.{end}" for rank in range(4) for end in ("json", "safetensors")}
        assert all(first.about.files[file] == second.about.files[file] for file in {*own, "state.json"})
        assert replace(first.about, files={}) == replace(second.about, files={})
    last = go(None)

    for rank in range(4):
        assert parts[0][rank] + parts[1][rank] + last[rank][0] == whole[rank][0]
        assert last[rank][1:] == whole[rank][1:]


def apart(rank: int, folder: Path) -> Any:
    try:
        RunState.load(folder / f"node{rank}", ranks=Ranks(timeout=3))
    except ResumableError as exc:
        return exc.problem
    return "loaded"


@pytest.mark.heavy
def test_a_disk_that_is_not_shared_is_noticed(tmp_path: Path) -> None:
    found = values(gloo.run(2, apart, tmp_path, folder=tmp_path))

    assert len({*found}) == 1
    assert "the run directory is" in found[0] or "does not see what rank 0" in found[0]


def damage(rank: int, run_dir: Path) -> Any:
    """Make three checkpoints and go back: to the best one, and to one that only rank 1 finds damaged."""
    model = nn.Linear(2, 2)
    drawn = random.Random(rank)
    with RunState.load(
        run_dir, model=model, extra={"drawn": drawn}, maximize="acc", ranks=Ranks(timeout=20)
    ) as state:
        for step in state.steps(3):
            state.vars["mine"] = [rank, step]
            drawn.random()
            # Rank 0 decides what is best, whatever the others measure.
            state.save(acc=[1.0, 3.0, 2.0][step] if rank == 0 else -step)
        best, metrics = state.best, state.metrics
        last = drawn.random()
        state.restore("best")
        assert state.vars["mine"] == [rank, 1], state.vars
        state.restore("newest")
        assert state.vars["mine"] == [rank, 2], state.vars
        assert drawn.random() == last
        if rank == 0:
            file = run_dir / "newest" / "ranks" / "00001.safetensors"
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
        torch.distributed.barrier()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            state.restore("newest")
        assert [("is damaged" in str(one.message)) for one in told] == ([True] if rank == 0 else [])
        return best, metrics, state.step, state.vars["mine"]


def test_all_ranks_go_back_to_one_checkpoint_each_to_its_own_state(tmp_path: Path) -> None:
    found = values(gloo.run(2, damage, tmp_path / "run", folder=tmp_path))

    assert found == [(3.0, {"acc": 2.0}, 2, [rank, 1]) for rank in range(2)]


def elastic(rank: int, run_dir: Path, stop_at: int | None, keywords: dict[str, Any]) -> Any:
    """Train one epoch over indices; return the indices that this rank has had, and what it draws."""
    size = torch.distributed.get_world_size()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5 + rank)
    data = torch.utils.data.TensorDataset(torch.arange(60))
    sampler = None
    if size > 1 or keywords.get("always"):
        sampler = DistributedSampler(data, num_replicas=size, rank=rank, seed=1)
    loader = DataLoader(data, batch_size=2, sampler=sampler, shuffle=sampler is None)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    own = np.random.default_rng(rank)
    seen: list[int] = []
    parts = {"model": model, "optimizer": optimizer, "loader": loader, "extra": {"own": own}}
    options = {key: value for key, value in keywords.items() if key != "always"}
    with RunState.load(run_dir, **parts, **grouped(timeout=20, **options)) as state:
        drawn = float(torch.rand(1)), random.random(), float(np.random.rand()), float(own.random())
        for epoch in state.epochs(1):
            if sampler:
                sampler.set_epoch(epoch)
            for (indices,) in state.batches():
                seen += indices.tolist()
                model.weight.grad = torch.ones_like(model.weight)
                optimizer.step()
                if len(seen) == stop_at:
                    state.save().wait()
                    return seen, drawn
    return seen, drawn, state.samples


@pytest.mark.parametrize(
    "sizes",
    [
        (1, 2, 1),
        pytest.param((4, 2, 3, 4), marks=pytest.mark.heavy),
        pytest.param((2, 1, 3), marks=pytest.mark.heavy),
    ],
)
@pytest.mark.heavy
def test_another_number_of_processes_sees_each_sample_of_the_epoch_once(
    tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    seen: list[int] = []
    for number, size in enumerate(sizes):
        # Stopped twice with each number: a resume with the same continues as ever.
        for turn, stop_at in enumerate((2, 2) if number < len(sizes) - 1 else (2, None)):
            found = gloo.run(size, elastic, tmp_path / "run", stop_at, {}, folder=tmp_path)
            seen += [index for one in values(found) for index in one[0]]

            assert len({one.value[1] for one in found}) == size, "two ranks draw the same"
            before = sizes[number - 1]
            is_told = (
                number > 0
                and turn == 0
                and f"; {size} process{'es' * (size > 1)} instead of {before}: " in found[0].printed
            )
            assert is_told or number == 0 or turn == 1, found[0].printed

    assert sorted(seen) == [*range(60)]
    assert found[0].value[2] == 60


@pytest.mark.heavy
def test_ranks_that_existed_continue_and_new_ones_draw_the_same(tmp_path: Path) -> None:
    values(gloo.run(2, elastic, tmp_path / "run", 2, {}, folder=tmp_path))
    shutil.copytree(tmp_path / "run", tmp_path / "copy")

    (same, other, again) = (
        values(gloo.run(size, elastic, tmp_path / folder, None, {}, folder=tmp_path))
        for size, folder in [(2, "run"), (3, "run"), (3, "copy")]
    )

    drawn = [[one[1] for one in found] for found in (same, other, again)]
    assert drawn[1] == drawn[2]
    assert drawn[1][:2] == drawn[0]
    assert all(mine not in theirs for mine, *theirs in zip(drawn[1][2], *drawn[0], strict=True))


@pytest.mark.heavy
def test_another_number_is_an_error_where_it_may_not_change(tmp_path: Path) -> None:
    values(gloo.run(2, elastic, tmp_path / "run", 2, {"elastic": False}, folder=tmp_path))

    found = gloo.run(1, elastic, tmp_path / "run", None, {"elastic": False}, folder=tmp_path)

    assert isinstance(found[0].error, StateMismatch)
    assert "was made by 2 processes; there are 1 now, and Ranks(elastic=False)" in str(found[0].error)


def unsharded(rank: int, run_dir: Path, allow: list[str]) -> Any:
    """Loop over all of the data on every rank, and stop in the middle of an epoch."""
    loader = DataLoader(torch.utils.data.TensorDataset(torch.arange(12)), batch_size=2, shuffle=True)
    with RunState.load(run_dir, loader=loader, ranks=Ranks(timeout=20), allow=allow) as state:
        for _ in state.epochs(1):
            for number, _ in enumerate(state.batches(), 1):
                if number == 2:
                    state.save()
                    return state.resumed
    return "at the end"


@pytest.mark.heavy
def test_data_that_is_not_divided_cannot_be_divided_again(tmp_path: Path) -> None:
    values(gloo.run(2, unsharded, tmp_path / "run", [], folder=tmp_path))

    refused = gloo.run(3, unsharded, tmp_path / "run", [], folder=tmp_path)
    allowed = gloo.run(3, unsharded, tmp_path / "run", ["loader"], folder=tmp_path)

    assert {type(one.error) for one in refused} == {StateMismatch}
    assert "each of 2 loads all of the data for itself" in str(refused[0].error)
    assert values(allowed) == [True] * 3


def window(rank: int, run_dir: Path, allow: list[str]) -> Any:
    """Stop in the middle of an accumulation, where each rank has gradients of its own."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.arange(24.0))
    loader = DataLoader(data, sampler=DistributedSampler(data), batch_size=2)
    with RunState.load(
        run_dir, model=model, optimizer=optimizer, loader=loader, ranks=Ranks(timeout=20), allow=allow
    ) as state:
        for _ in state.epochs(1):
            for (batch,) in state.batches():
                before = None if model.weight.grad is None else model.weight.grad.item()
                if state.resumed:
                    return before
                model(batch[:, None]).sum().backward()
                state.save().wait()
                return float(batch.sum())
    return "at the end"


@pytest.mark.heavy
def test_gradients_of_a_window_come_back_on_each_rank_or_not_at_all(tmp_path: Path) -> None:
    sums = values(gloo.run(2, window, tmp_path / "run", [], folder=tmp_path))

    again = values(gloo.run(2, window, tmp_path / "run", [], folder=tmp_path))
    refused = gloo.run(3, window, tmp_path / "run", [], folder=tmp_path)
    allowed = gloo.run(3, window, tmp_path / "run", ["optimizer.gradients"], folder=tmp_path)

    assert sums[0] != sums[1]
    assert again == sums
    assert all("summed up by 2 processes, each for itself" in str(one.error) for one in refused)
    assert [one.value for one in allowed] == [None] * 3
    assert not any(one.error for one in allowed)


@pytest.mark.heavy
def test_a_part_of_each_rank_is_its_own(tmp_path: Path) -> None:
    values(gloo.run(2, own_parts, tmp_path / "run", folder=tmp_path))

    assert values(gloo.run(2, own_parts, tmp_path / "run", folder=tmp_path)) == [
        ([rank], [0], {"count": rank}) for rank in range(2)
    ]


def own_parts(rank: int, run_dir: Path) -> Any:
    """Keep a list for each rank and one for all."""
    mine, shared = [rank], [rank]
    with RunState.load(
        run_dir, extra={"mine": mine, "shared": shared}, ranks=Ranks(per_rank=["mine"], timeout=20)
    ) as state:
        if not state.resumed:
            state.vars["count"] = rank
            state.save()
            return "saved"
        return mine, shared, state.vars


class Counting(nn.Module):
    """A buffer that each rank fills for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen += batch
        return (self.weight * self.seen).sum()


def buffers(rank: int, run_dir: Path, stop_at: int | None, broadcast: bool) -> Any:
    """Accumulate over two passes, of which the first broadcasts no buffers."""
    model = DistributedDataParallel(Counting(), broadcast_buffers=broadcast)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    data = torch.utils.data.TensorDataset(torch.arange(12.0))
    loader = DataLoader(data, sampler=DistributedSampler(data), batch_size=1)
    with RunState.load(
        run_dir, model=model, optimizer=optimizer, loader=loader, ranks=Ranks(timeout=20)
    ) as state:
        for _ in state.epochs(1):
            for (batch,) in state.batches():
                is_step = state.batch % 2 == 1
                with torch.enable_grad() if is_step else model.no_sync():
                    model(batch.expand(2) * (rank + 1)).backward()
                found.append(model.module.seen.tolist())
                if is_step:
                    optimizer.step()
                    optimizer.zero_grad()
                if state.batch + 1 == stop_at:
                    state.save().wait()
                    return found
    return found, model.module.weight.tolist()


@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.heavy
def test_buffers_of_each_rank_continue_in_a_window(tmp_path: Path, broadcast: bool) -> None:
    def go(folder: str, stop_at: int | None) -> list[Any]:
        return values(gloo.run(2, buffers, tmp_path / folder, stop_at, broadcast, folder=tmp_path))

    whole = go("whole", None)
    first, second, last = go("parts", 1), go("parts", 4), go("parts", None)

    for rank in range(2):
        assert (first[rank] + second[rank] + last[rank][0], last[rank][1]) == whole[rank]


def noisy(rank: int, run_dir: Path) -> Any:
    """Train an epoch with persistent workers that draw, on all of the data; return what they drew first."""
    random.seed(rank)
    torch.manual_seed(rank)
    loader = DataLoader(Augmented(8), batch_size=2, num_workers=1, persistent_workers=True)
    with RunState.load(run_dir, loader=loader, ranks=Ranks(timeout=20)) as state:
        first = None
        for _ in state.epochs(state.epoch + 1):
            for batch in state.batches():
                first = batch.tolist() if first is None else first
            state.save()
    return first


@pytest.mark.heavy
def test_workers_of_a_new_rank_do_not_draw_what_those_of_another_draw(tmp_path: Path) -> None:
    values(gloo.run(2, noisy, tmp_path / "run", folder=tmp_path))

    found = values(gloo.run(3, noisy, tmp_path / "run", folder=tmp_path))

    assert found[2] not in found[:2]


class Refusing:
    """A part that takes its state on all ranks but one."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.refuses = False

    def state_dict(self) -> dict[str, Any]:
        return {"rank": self.rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.refuses:
            raise ValueError("no")


def goes_on(rank: int, run_dir: Path) -> Any:
    """Meet errors that a script may catch, and continue after each of them."""
    model = nn.Linear(1, 1)
    # A number that steps of 1 do not round
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    part = Refusing(rank)
    told: list[str] = []

    def step() -> None:
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()

    def caught(do: Callable[[], Any]) -> None:
        try:
            do()
        except (ResumableError, CannotStore) as exc:
            told.append(type(exc).__name__)
        else:
            told.append("fine")

    extra = {"part": part}
    with RunState.load(
        run_dir, model=model, optimizer=optimizer, extra=extra, maximize="acc", ranks=Ranks(timeout=20)
    ) as state:
        weight = model.weight.item()
        step()
        state.save(acc=1.0).wait()
        # One that is not there; and one whose state one rank refuses.
        caught(lambda: state.restore(7))
        step()
        part.refuses = rank == 1
        caught(lambda: state.restore(1))
        assert model.weight.item() == weight - 2, "a rank has another weight than before"
        assert state.step == 2
        part.refuses = False
        caught(lambda: state.save(acc=2.0).wait())
        # One rank cannot store what it has: the others hear of it at their next call.
        if rank == 1:
            state.vars["bad"] = lambda: 0
        caught(lambda: state.save(acc=9.0).wait())
        state.vars.pop("bad", None)
        best = state.best, state.metrics
        step()
        caught(lambda: state.save(acc=1.5).wait())
        # The same, without waiting: the rank that knows continues to the next save before the others.
        if rank == 1:
            state.vars["bad"] = lambda: 0
        caught(lambda: state.save(acc=9.0))
        state.vars.pop("bad", None)
        caught(lambda: state.save(acc=9.0))
        step()
        caught(lambda: state.save(acc=3.0).wait())
        return told, best, state.best, state.step


@pytest.mark.heavy
def test_a_training_continues_after_an_error_that_it_catches(tmp_path: Path) -> None:
    found = values(gloo.run(2, goes_on, tmp_path / "run", folder=tmp_path))

    (first, *rest), (second, *others) = found
    assert rest == others == [(2.0, {"acc": 2.0}), 3.0, 4]
    assert first[:5] == ["CheckpointNotFound", "StateMismatch", "fine", "CannotStore", "fine"]
    assert first[:5] == second[:5]
    # Each hears of the second failure once, when it is asked next, and then all save again.
    assert first[5:] == ["fine", "CannotStore", "fine"]
    assert second[5:] == ["CannotStore", "fine", "fine"]
    assert Run(tmp_path / "run").checkpoints()[-1].about.step == 4


def iterables(rank: int, run_dir: Path, allow: list[str]) -> Any:
    """Loop over data that RunState was not given, and stop in the middle of an epoch."""
    with RunState.load(run_dir, ranks=Ranks(timeout=20), allow=allow) as state:
        for _ in state.epochs(1):
            for number, _ in enumerate(state.batches(range(rank, 12, 2)), 1):
                if number == 2:
                    state.save()
                    return state.resumed
    return "at the end"


@pytest.mark.heavy
def test_data_that_was_not_given_cannot_be_divided_again(tmp_path: Path) -> None:
    values(gloo.run(2, iterables, tmp_path / "run", [], folder=tmp_path))

    refused = gloo.run(3, iterables, tmp_path / "run", [], folder=tmp_path)
    allowed = gloo.run(3, iterables, tmp_path / "run", ["position.range"], folder=tmp_path)

    assert all("looped over by each of 2 processes for itself" in str(one.error) for one in refused)
    assert values(allowed) == [True] * 3


def refused(rank: int, run_dir: Path) -> Any:
    try:
        RunState.load(run_dir, ranks=Ranks(timeout=20, elastic=False))
    except ResumableError as exc:
        return type(exc).__name__
    return "loaded"


def test_a_checkpoint_that_may_not_be_read_is_refused_on_all_ranks_alike(tmp_path: Path) -> None:
    with RunState.load(tmp_path / "run", ranks=Ranks(elastic=False)) as state:
        state.save()

    assert values(gloo.run(2, refused, tmp_path / "run", folder=tmp_path)) == ["StateMismatch"] * 2
