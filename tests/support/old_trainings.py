"""Trainings of which runs are stored that earlier versions wrote, and what trains them here.

Their numbers are small integers and powers of two, in double precision, so that every sum is exact, on every
machine. SGD trains the weights; the other optimizers have a learning rate of 0, so that only their moments
change, which decays by halves keep exact.

    python tests/support/old_trainings.py REVISION FOLDER    writes the runs of this checkout's version
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gloo
import numpy as np
import torch
from grouped import grouped
from sharded_training import gathered
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from resumable import RunState

Log = list[Any]
"""What a training was at each of its ticks."""


class Stopped(Exception):
    """Ends a start of a training."""


class Start:
    """One start of a training: up to its `stop`-th tick, or to its end."""

    def __init__(self, run_dir: Path, stop: int | None = None, resume: Any = "auto") -> None:
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        self.log: Log = []
        self._run_dir, self._stop, self._resume = run_dir, stop, resume
        self._watched: Mapping[str, Any] = {}

    def load(self, loader: Any = None, **parts: Any) -> RunState[Any]:
        """Begin the training, or resume it."""
        self._watched = parts
        own = {"loader": loader} if loader is not None else {}
        given = {"resume": self._resume, "keep": None, "every": None, "minimize": "loss", "quiet": True}
        return RunState.load(self._run_dir, **own, **parts, **grouped(**given), progress=False)

    def tick(self, state: RunState[Any], *seen: Any) -> None:
        """Note what is trained, and end this start with a save if it is time."""
        at = {name: getattr(state, name) for name in ("epoch", "batch", "step", "samples", "vars")}
        at["means"] = dict(state.means)
        generators = torch.get_rng_state(), random.getstate(), [*np.random.get_state()]  # type: ignore[misc]
        self.log.append(plain([seen, at, dict(self._watched), _digest(generators)]))
        if len(self.log) == self._stop:
            state.save(loss=float(8 - self._stop)).wait()
            raise Stopped


def plain(value: Any) -> Any:
    """Return a value, with what has a state, as plain values."""
    if isinstance(value, torch.Generator | np.random.Generator | random.Random):
        state: Any = value.get_state() if isinstance(value, torch.Generator) else None
        state = value.bit_generator.state if isinstance(value, np.random.Generator) else state
        return _digest(state if state is not None else value.getstate())  # type: ignore[union-attr]
    if dataclasses.is_dataclass(value) or hasattr(value, "state_dict"):
        value = value.state_dict() if hasattr(value, "state_dict") else vars(value)
    if isinstance(value, Tensor):
        return gathered(value).tolist()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def _digest(state: Any) -> str:
    return hashlib.sha1(json.dumps(plain(state)).encode()).hexdigest()[:12]


# -------------------------------------------------------------------------------------------- what they train


class Weights(nn.Module):
    """A row of weights, one of which is frozen, and running statistics of the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Linear(4, 1, bias=False, dtype=torch.float64)
        self.frozen = nn.Linear(4, 1, bias=False, dtype=torch.float64).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4, momentum=0.5, affine=False, dtype=torch.float64)
        self.register_buffer("bodies", torch.zeros((), dtype=torch.int64))
        for one in (self.trained, self.frozen):
            nn.init.zeros_(one.weight)

    def forward(self, batch: Tensor) -> Tensor:
        if self.training:
            self.bodies += 1
            self.norm(batch)
        return self.trained(batch) + self.frozen(batch)


def row() -> nn.Linear:
    """Return weights that are zeros."""
    weights = nn.Linear(4, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(weights.weight)
    return weights


def sgd(model: nn.Module) -> torch.optim.SGD:
    """Return the optimizer that is exact: its momentum is halved with each step."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.25, momentum=0.5)


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, *batches: Tensor) -> None:
    """Train a step on batches."""
    optimizer.zero_grad()
    for batch in batches:
        model(batch).sum().backward()
    optimizer.step()


# ----------------------------------------------------------------------------------------- what they train on


def sample(index: int) -> Tensor:
    """Return a sample that draws from every global generator."""
    drawn = [int(torch.randint(4, ())), random.randrange(4), int(np.random.randint(4))]
    return torch.tensor([index, *drawn], dtype=torch.float64)


class Noisy(Dataset[Tensor]):
    """Samples that draw from every global generator."""

    def __init__(self, count: int = 6) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        return sample(index)


class Numbered(Dataset[Tensor]):
    """Samples that draw nothing."""

    def __init__(self, count: int = 6) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, 1, index % 2, index % 3], dtype=torch.float64)


class Augmented(Numbered):
    """Samples that draw from a generator of NumPy's, which the dataset holds."""

    def __init__(self) -> None:
        super().__init__()
        self.dice = np.random.default_rng(3)

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + int(self.dice.bit_generator.random_raw() % 4)


class Stream(IterableDataset[Tensor]):
    """Samples in an order that is drawn as they begin."""

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        mine = slice(worker.id, None, worker.num_workers) if worker else slice(None)
        return map(sample, torch.randperm(8).tolist()[mine])


class Counting(IterableDataset[Tensor]):
    """A stream with a state of its own."""

    def __init__(self, count: int = 6) -> None:
        self._count, self._next = count, 0

    def __iter__(self) -> Iterator[Tensor]:
        while self._next < self._count:
            self._next += 1
            yield torch.full((4,), float(self._next), dtype=torch.float64)
        self._next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._next = state["next"]


class Own:
    """A loader that is no DataLoader, with a state of its own."""

    def __init__(self) -> None:
        self._source = Counting(2)

    def __iter__(self) -> Iterator[Tensor]:
        return (one.unsqueeze(0) for one in self._source)

    def state_dict(self) -> dict[str, Any]:
        return self._source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._source.load_state_dict(state)


class Turning(BatchSampler):
    """Batches that a sampler with a state draws one by one."""

    def __init__(self, count: int) -> None:
        self._count, self._passes = count, 0

    def __len__(self) -> int:
        return self._count // 2

    def __iter__(self) -> Iterator[list[int]]:
        self._passes += 1
        for _ in range(len(self)):
            first = self._passes + int(torch.randint(self._count, ()))
            yield [first % self._count, (first + 1) % self._count]

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self._passes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._passes = state["passes"]


class Again:
    """The batches of a loader, pass after pass."""

    def __init__(self, state: RunState[Any], name: str | None = None) -> None:
        self._state, self._name = state, name
        self._batches = iter(state.batches(name))

    def __iter__(self) -> Again:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self._state.batches(self._name))
            return next(self._batches)


def seeded(seed: int) -> torch.Generator:
    """Return a generator."""
    return torch.Generator().manual_seed(seed)


# ---------------------------------------------------------------------------------------------- the trainings


class Training(NamedTuple):
    """A training, and the ticks at which the stored run saved it, in checkpoints 1, 2, ..."""

    train: Callable[[Start], None]
    stops: Sequence[int]
    written: str
    """The revision that wrote the run."""
    ranks: int = 1


TRAININGS: dict[str, Training] = {}
MAIN = "ac8e8c1"


def stored(
    *stops: int, written: str = MAIN, ranks: int = 1
) -> Callable[[Callable[[Start], None]], Callable[[Start], None]]:
    """Add a training to those whose runs are stored."""

    def add(train: Callable[[Start], None]) -> Callable[[Start], None]:
        TRAININGS[train.__name__.replace("_", "-")] = Training(train, stops, written, ranks)
        return train

    return add


@stored(5, written="884df13")
def before_rooms(start: Start) -> None:
    """Trains in single precision; saved after each epoch too."""
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loader = DataLoader(Noisy(), 2, shuffle=True)
    with start.load(loader, model=model, optimizer=optimizer, scheduler=scheduler) as state:
        for _ in state.epochs(3):
            for batch in state.batches():
                fit(model, optimizer, batch.float())
                start.tick(state, batch)
            scheduler.step()
            state.save(loss=1.0)


@dataclasses.dataclass
class Kept:
    """What a training has beside its models."""

    bodies: int
    last: Tensor


class Counter:
    """An object of the script's, with a state."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {"largest": torch.zeros(4, dtype=torch.float64)}

    def state_dict(self) -> dict[str, Any]:
        return self.found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.found = state


@stored(5, 8)
def parts(start: Start) -> None:
    """Every kind of part, in mid-epoch and at an epoch's end."""
    models = {"main": Weights(), "others": nn.ModuleList([row(), row(), row()])}
    first, second, third = models["others"]
    optimizers = {
        "main": sgd(models["main"]),
        "adam": torch.optim.AdamW(first.parameters(), lr=0, betas=(0.5, 0.5), amsgrad=True),
        "rms": torch.optim.RMSprop(second.parameters(), lr=0, alpha=0.5, momentum=0.5),
        "adagrad": torch.optim.Adagrad(third.parameters(), lr=0),
    }
    schedulers = {
        "step": torch.optim.lr_scheduler.StepLR(optimizers["main"], 2, gamma=0.5),
        "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers["main"], factor=0.5, patience=0),
    }
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    average = AveragedModel(models["main"], multi_avg_fn=get_ema_multi_avg_fn(0.5))
    dice, counter, kept = np.random.default_rng(3), Counter(), Kept(0, torch.zeros(4, dtype=torch.float64))
    losses: list[float] = []
    lists: dict[str, Any] = {"losses": losses, "same": losses, "inner": {"pair": (1, "one")}}
    extra = {"average": average, "dice": dice, "counter": counter, "kept": kept, "lists": lists}
    loader = DataLoader(Noisy(), 2, shuffle=True)
    given = {"model": models, "optimizer": optimizers, "scheduler": schedulers, "scaler": scaler}
    with start.load(loader, **given, extra=extra) as state:
        for _ in state.epochs(3):
            first = random.randrange(4)
            for batch in state.batches():
                x = batch + first + int(dice.bit_generator.random_raw() % 4)
                optimizers["main"].zero_grad()
                scaler.scale(models["main"](x).sum()).backward()
                scaler.step(optimizers["main"])
                scaler.update()
                for one, name in zip(models["others"], ("adam", "rms", "adagrad"), strict=True):
                    fit(one, optimizers[name], x)
                average.update_parameters(models["main"])
                kept.bodies += 1
                kept.last.copy_(x[0])
                lists["losses"].append(float(x.sum()))
                counter.found["largest"] = torch.maximum(counter.found["largest"], x[-1])
                state.vars["samples"] = state.vars.get("samples", 0) + len(x)
                state.vars["last"] = x[-1].clone()
                state.mean(loss=x.sum(), weight=len(x))
                start.tick(state, batch, x)
            schedulers["step"].step()
            schedulers["plateau"].step(state.means["loss"])
            start.tick(state)


@stored(3, 6)
def several_loaders(start: Start) -> None:
    """Every kind of loader without workers: at its end, at its last batch, in the middle, not begun."""
    model = row()
    optimizer = sgd(model)
    loaders = {
        "first": DataLoader(Numbered(2), 2, shuffle=True),
        "weighted": DataLoader(Augmented(), None, sampler=WeightedRandomSampler([1, 2, 1, 2, 1, 1], 3)),
        "turning": DataLoader(Numbered(4), batch_sampler=Turning(4)),
        "counting": DataLoader(Counting(), 2),
        "own": Own(),
        "list": [one.unsqueeze(0) for one in torch.arange(8, dtype=torch.float64).split(4)],
        "last": DataLoader(Numbered(2), 2, shuffle=True),
    }

    def drawn() -> Iterator[Tensor]:
        return (sample(index).unsqueeze(0) for index in torch.randperm(3).tolist())

    together = [name for name in loaders if name not in ("first", "last")]
    with start.load(loaders, model=model, optimizer=optimizer) as state:
        for _ in state.epochs(2):
            for batch in state.batches("first"):
                fit(model, optimizer, batch)
                start.tick(state, batch)
            iterators = [*map(iter, [*map(state.batches, together), state.batches(drawn)])]
            while batches := [one for one in (next(each, None) for each in iterators) if one is not None]:
                fit(model, optimizer, *batches)
                start.tick(state, *batches)
            for batch in state.batches("last"):
                fit(model, optimizer, batch)
                start.tick(state, batch)
            start.tick(state)


@stored(5, 8)
def workers(start: Start) -> None:
    """A loader with persistent workers, and a stream whose worker begins with each epoch."""
    model = row()
    optimizer = sgd(model)
    loaders = {
        "kept": DataLoader(Noisy(), 2, shuffle=True, num_workers=2, persistent_workers=True),
        "stream": DataLoader(Stream(), 2, num_workers=1),
    }
    with start.load(loaders, model=model, optimizer=optimizer) as state:
        for _ in state.epochs(3):
            for several in zip(*map(state.batches, loaders), strict=False):
                fit(model, optimizer, *several)
                start.tick(state, *several)
            start.tick(state)


def ahead(batches: Iterator[Any]) -> Iterator[Any]:
    """Load one batch ahead of the training."""
    waiting = next(batches, None)
    while waiting is not None:
        now, waiting = waiting, next(batches, None)
        yield now


@stored(3)
def begun_in_mid_epoch(start: Start) -> None:
    """Begins by `begin_at`, and loads ahead by `through=`."""
    model = row()
    optimizer = sgd(model)
    loader = DataLoader(Noisy(), 1, shuffle=True, generator=seeded(1))
    with start.load(loader, model=model, optimizer=optimizer) as state:
        if not state.resumed:
            state.begin_at(epoch=1, batch=1, step=7, samples=7, best=16.0)
        for _ in state.epochs(3):
            for batch in state.batches(through=ahead):
                fit(model, optimizer, batch)
                start.tick(state, batch)


@stored(5)
def steps(start: Start) -> None:
    """Counts steps, in the second pass over samples with seeds, in the middle of an accumulation window."""
    model = row()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    loader = DataLoader(Noisy(), 2, sampler=RandomSampler(Numbered(), replacement=True))
    given = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    with start.load(loader, **given, sample_seeds=True) as state:
        batches = Again(state)
        for step in state.steps(9):
            batch = next(batches)
            model(batch).sum().backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
            if step % 4 == 3:
                scheduler.step()
            start.tick(state, batch)


@stored(3)
def steps_in_epochs(start: Start) -> None:
    """Counts steps within epochs, on data that it draws; a loader that RunState was not given evaluates."""
    model = row()
    optimizer = sgd(model)
    noise, coin = seeded(3), random.Random(3)
    held_out = DataLoader(Noisy(), 6, num_workers=1, persistent_workers=True)
    with start.load(model=model, optimizer=optimizer, extra={"noise": noise, "coin": coin}) as state:
        for epoch in state.epochs(3):
            for _ in state.steps(2 * (epoch + 1)):
                batch = torch.randint(4, (2, 4), generator=noise).double() + coin.getrandbits(2)
                fit(model, optimizer, batch)
                start.tick(state, batch)
            state.vars["score"] = [model(batch).sum().item() for batch in held_out]


@stored(4, ranks=2)
def ranks(start: Start) -> None:
    """Two processes: one model is replicated by DDP, the other one sharded by FSDP2."""
    from torch.distributed.fsdp import fully_shard

    rank = torch.distributed.get_rank()
    torch.manual_seed(1 + rank)
    sharded = nn.Linear(4, 2, bias=False, dtype=torch.float64)
    nn.init.zeros_(sharded.weight)
    fully_shard(sharded)
    models = {"whole": nn.parallel.DistributedDataParallel(row()), "sharded": sharded}
    optimizers = {name: sgd(model) for name, model in models.items()}
    sampler: Any = DistributedSampler(Noisy(8), 2, rank)
    loader = DataLoader(Noisy(8), 2, sampler=sampler)
    with start.load(loader, model=models, optimizer=optimizers) as state:
        for epoch in state.epochs(3):
            sampler.set_epoch(epoch)
            for batch in state.batches():
                for name, model in models.items():
                    fit(model, optimizers[name], batch)
                start.tick(state, batch)
            start.tick(state)


# ----------------------------------------------------------------------------------------------- running them


def run(name: str, run_dir: Path, stop: int | None = None, resume: Any = "auto") -> list[Log]:
    """Start a training, in processes of its own if it has several; return what each has noted."""
    training = TRAININGS[name]
    if training.ranks == 1:
        return [start(0, name, run_dir, stop, resume)]
    with tempfile.TemporaryDirectory() as folder:
        ended = gloo.run(training.ranks, start, name, run_dir, stop, resume, folder=Path(folder))
    for one in ended:
        if one.error:
            raise one.error
    return [one.value for one in ended]


def start(_: int, name: str, run_dir: Path, stop: int | None, resume: Any) -> Log:
    """Start a training in this process."""
    start = Start(run_dir, stop, resume)
    with contextlib.suppress(Stopped):
        TRAININGS[name].train(start)
    return start.log


def write(revision: str, folder: Path) -> None:
    """Write the runs of a revision, each stopped and started again at its ticks."""
    for name, training in TRAININGS.items():
        if training.written == revision and not (folder / name).exists():
            done = 0
            for stop in training.stops:
                run(name, folder / name, stop - done)
                done = stop
            _forget_machine(folder / name)


def _forget_machine(run_dir: Path) -> None:
    """Remove what is of the machine that wrote a run; one of the histories stays."""
    for path in (run_dir / name for name in (".lock", "best", "newest")):
        path.unlink(missing_ok=True)
    history = run_dir / "history.jsonl"
    if run_dir.name == "parts":
        lines = [json.loads(line) for line in history.read_text().splitlines()]
        own = {"host": "host", "pid": 1, "argv": ["train.py"], "boot": "boot"}
        told = [{key: own.get(key, value) for key, value in line.items()} for line in lines]
        history.write_text("".join(f"{json.dumps(line)}\n" for line in told))
    else:
        history.unlink()


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
