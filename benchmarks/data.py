"""What a resume in mid-epoch costs and how exact it is, next to other libraries, all in one run.

    python benchmarks/data.py cost
    python benchmarks/data.py exact [PART OF A SET-UP'S NAME]

Contenders that are not installed are left out: pip install torchdata accelerate lightning pytorch-ignite
Every measurement is a process of its own; a contender's error or hang is a cell of its table.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import operator
import os
import platform
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from resumable import RunState

T = TypeVar("T")
Make = Callable[[type], Any]
"""Makes the loader anew, as the script does, of the class that the contender asks for."""
Setup = Callable[[], dict[str, Any]]
"""Makes the arguments of a DataLoader."""

FORK = multiprocessing.get_context("fork")
SAMPLES, EPOCHS = 103, 3
STOPS = ((0, 5), (0, -2), (0, -1), (1, 1), (1, 6))
"""Epoch and batches done; -1 is the epoch's last batch. All are saved in the body of the loop."""
ROUNDS, LEG_SECONDS = 11, 60.0


class Stopped(Exception):
    """The training ends here, as if it were killed."""


class Failed(Exception):
    """A contender could not do it."""


class Work(Protocol):
    """What is done with the batches."""

    epochs: int

    def step(self, epoch: int, batch: Any) -> bool:
        """Work on a batch; return whether to save after it and stop."""


Contender = Callable[[Make, Work, Path, bool], Any]
"""Trains, or goes on from what it saved in the folder; returns the loader."""


# The contenders, each used as its documentation says.


def plain(make: Make, work: Work, folder: Path, resuming: bool) -> Any:
    """Loop over the plain DataLoader, which knows no resume: this is what all should be equal to."""
    loader = make(DataLoader)
    for epoch in range(work.epochs):
        set_epoch(loader, epoch)
        for batch in loader:
            work.step(epoch, batch)
    return loader


def ours(make: Make, work: Work, folder: Path, resuming: bool, **options: Any) -> Any:
    """Loop over `state.batches()`, and save in the loop's body."""
    loader = make(DataLoader)
    with RunState.load(folder / "run", loader=loader, **options) as state:
        for epoch in state.epochs(work.epochs):
            set_epoch(loader, epoch)
            for batch in state.batches():
                if work.step(epoch, batch):
                    state.save().wait()
                    raise Stopped
    return loader


def stateful(make: Make, work: Work, folder: Path, resuming: bool) -> Any:
    """Use torchdata's StatefulDataLoader; the generators are put back last, as iter() draws from them."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = make(StatefulDataLoader)
    saved = torch.load(folder / "saved", weights_only=False) if resuming else {"epoch": 0}
    if resuming:
        loader.load_state_dict(saved["loader"])
    for epoch in range(saved["epoch"], work.epochs):
        set_epoch(loader, epoch)
        batches = iter(loader)
        if resuming and epoch == saved["epoch"]:
            put_back(saved["random"])
        for batch in batches:
            if work.step(epoch, batch):
                now = {"epoch": epoch, "loader": loader.state_dict(), "random": generators()}
                torch.save(now, folder / "saved")
                raise Stopped
    return loader


def accelerated(make: Make, work: Work, folder: Path, resuming: bool) -> Any:
    """Use Accelerate's save_state, load_state and skip_first_batches, and its seedable sampler."""
    from accelerate import Accelerator, DataLoaderConfiguration

    loader = make(DataLoader)
    configuration = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    prepared = accelerator.prepare(loader)
    first = done = 0
    if resuming:
        first, done = torch.load(folder / "saved")
        accelerator.load_state(str(folder / "state"))
        with suppress(TypeError):
            first, done = first + done // len(prepared), done % len(prepared)
    for epoch in range(first, work.epochs):
        prepared.set_epoch(epoch)
        skipped = done if epoch == first else 0
        batches = accelerator.skip_first_batches(prepared, skipped) if skipped else prepared
        for number, batch in enumerate(batches, skipped + 1):
            if work.step(epoch, batch):
                accelerator.save_state(str(folder / "state"))
                torch.save((epoch, number), folder / "saved")
                raise Stopped
    return loader


def lightning(make: Make, work: Work, folder: Path, resuming: bool) -> Any:
    """Use Lightning's Trainer with a StatefulDataLoader; hooks keep the generators, which it does not."""
    from lightning.pytorch import LightningModule, Trainer
    from torchdata.stateful_dataloader import StatefulDataLoader

    class Module(LightningModule):
        random: Any = None

        def configure_optimizers(self) -> None: ...

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["random"] = generators()

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.random = checkpoint["random"]

        def on_train_start(self) -> None:
            if self.random:
                put_back(self.random)

        def training_step(self, batch: Any, number: int) -> None:
            self.must_stop = work.step(self.current_epoch, batch)

        def on_train_batch_end(self, *_: Any) -> None:
            if self.must_stop:
                self.trainer.save_checkpoint(folder / "saved")
                raise Stopped

    loader = make(StatefulDataLoader)
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=work.epochs,
        use_distributed_sampler=False,
        default_root_dir=folder,
        **dict.fromkeys(off, False),
    )
    going_on = {"ckpt_path": folder / "saved", "weights_only": False} if resuming else {}
    trainer.fit(Module(), loader, **going_on)
    return loader


def ignite(make: Make, work: Work, folder: Path, resuming: bool) -> Any:
    """Use Ignite's DeterministicEngine, which seeds every epoch again."""
    from ignite.engine import DeterministicEngine, Events

    loader = make(DataLoader)
    engine = DeterministicEngine(lambda engine, batch: work.step(engine.state.epoch - 1, batch))
    engine.add_event_handler(Events.EPOCH_STARTED, lambda: set_epoch(loader, engine.state.epoch - 1))

    @engine.on(Events.ITERATION_COMPLETED)
    def save() -> None:
        if engine.state.output:
            torch.save(engine.state_dict(), folder / "saved")
            raise Stopped

    if resuming:
        engine.load_state_dict(torch.load(folder / "saved", weights_only=False))
    engine.run(loader, max_epochs=work.epochs)
    return loader


CONTENDERS: dict[str, Contender] = {
    "plain": plain,
    "resumable": ours,
    "StatefulDataLoader": stateful,
    "Accelerate": accelerated,
    "Lightning": lightning,
    "Ignite": ignite,
}
NEEDS = {
    "plain": "torch.utils",
    "resumable": "resumable.state",
    "StatefulDataLoader": "torchdata.stateful_dataloader",
    "Accelerate": "accelerate.state",
    "Lightning": "lightning.pytorch",
    "Ignite": "ignite.engine",
}


def set_epoch(loader: Any, epoch: int) -> None:
    """Do what the script of a DistributedSampler does at the beginning of an epoch."""
    if isinstance(loader.sampler, DistributedSampler):
        loader.sampler.set_epoch(epoch)


def seed() -> None:
    """Seed the generators as a script does when it starts, also when it resumes."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def generators() -> tuple[Any, ...]:
    """Return the states of the global generators."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def put_back(states: tuple[Any, ...]) -> None:
    """Put the global generators into the states that were saved."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


# The set-ups.


def drawn(index: int) -> list[float]:
    """Return numbers of all three generators; every other gaussian number is drawn one ahead."""
    gauss = random.gauss(0, 1) if index % 3 == 0 else random.random()
    return [gauss, np.random.standard_normal(), np.random.random_sample(), torch.rand(()).item()]


def sample(index: int, *numbers: float, augmented: bool) -> torch.Tensor:
    """Return a sample."""
    return torch.tensor([index, *numbers, *(drawn(index) if augmented else ())], dtype=torch.float64)


class Samples(Dataset[torch.Tensor]):
    """A map-style dataset, with a generator of its own or without."""

    def __init__(self, augmented: bool = False, count: int = SAMPLES, own: bool = False) -> None:
        self.augmented, self.count = augmented, count
        self.generator = np.random.default_rng(1) if own else None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        numbers = [self.generator.normal()] if self.generator else []
        return sample(index, *numbers, augmented=self.augmented)


class WorkerSamples(Samples):
    """A map-style dataset that looks at which worker it is in."""

    def __getitem__(self, index: int) -> torch.Tensor:
        info = get_worker_info()
        return sample(index, info.id, info.seed % 1_000_003, augmented=self.augmented)


class Images(Dataset[torch.Tensor]):
    """Images of a byte a channel."""

    def __len__(self) -> int:
        return 20_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3, 64, 64), index % 256, dtype=torch.uint8)


class Stream(IterableDataset[torch.Tensor]):
    """An iterable dataset in shards of uneven length, which cannot say where it is."""

    def __init__(self, augmented: bool = False, buffer: int = 0) -> None:
        self.augmented, self.buffer = augmented, buffer

    def __iter__(self) -> Iterator[torch.Tensor]:
        waiting: list[int] = []
        for index in shard():
            waiting.append(index)
            if len(waiting) > self.buffer:
                yield self.out_of(waiting)
        while waiting:
            yield self.out_of(waiting)

    def out_of(self, waiting: list[int]) -> torch.Tensor:
        """Return one of the samples that wait, a random one where they are shuffled."""
        index = waiting.pop(random.randrange(len(waiting)) if self.buffer else 0)
        return sample(index, augmented=self.augmented)


class StatefulStream(Stream):
    """An iterable dataset with a state of its own."""

    at: int | None = None
    passes = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.at = shard().start if self.at is None else self.at
        while self.at < shard().stop:
            self.at += 1
            yield sample(self.at, self.passes, augmented=self.augmented)
        self.at, self.passes = None, self.passes + 1

    def state_dict(self) -> dict[str, Any]:
        """Return where it is."""
        return {"at": self.at, "passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go there."""
        self.at, self.passes = state["at"], state["passes"]


class IteratorStream(Stream):
    """An iterable dataset whose iterator has a state of its own."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return StreamIterator(shard(), self.augmented)


class StreamIterator:
    """An iterator with a state."""

    def __init__(self, span: range, augmented: bool) -> None:
        self.at, self.stop, self.augmented = span.start, span.stop, augmented

    def __iter__(self) -> StreamIterator:
        return self

    def __next__(self) -> torch.Tensor:
        if self.at == self.stop:
            raise StopIteration
        self.at += 1
        return sample(self.at, augmented=self.augmented)

    def state_dict(self) -> dict[str, Any]:
        """Return where it is."""
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go there."""
        self.at = state["at"]


def shard() -> range:
    """Return this worker's part of the stream: the first one's is the shortest or the longest."""
    info = get_worker_info()
    if info is None:
        return range(SAMPLES)
    first, others = 31, info.num_workers - 1
    cuts = [0, *(first + (SAMPLES - first) * number // others for number in range(info.num_workers))]
    return range(cuts[info.id], cuts[info.id + 1])


class OwnOrder(Sampler[int]):
    """A sampler with a generator of its own."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(2)

    def __iter__(self) -> Iterator[int]:
        return iter(self.generator.permutation(SAMPLES).tolist())

    def __len__(self) -> int:
        return SAMPLES


class RandomSizes(Sampler[list[int]]):
    """A batch sampler with batches of many sizes, in an order that Python's generator gives."""

    def __iter__(self) -> Iterator[list[int]]:
        left = random.sample(range(SAMPLES), SAMPLES)
        while left:
            size = 4 + left[0] % 9
            yield left[:size]
            left = left[size:]


class LiveDraws(Sampler[list[int]]):
    """A batch sampler that draws from NumPy's global generator at every batch."""

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(13):
            yield np.random.choice(SAMPLES, 8, replace=False).tolist()

    def __len__(self) -> int:
        return 13


def reseed(worker: int) -> None:
    """Seed a worker's generators as scripts do."""
    info = get_worker_info()
    np.random.seed((info.seed + 7) % 2**32)
    info.dataset.generator = np.random.default_rng(info.seed)


def torch_generator() -> torch.Generator:
    """Return a generator for a loader or a sampler."""
    return torch.Generator().manual_seed(42)


def shuffled(dataset: Any, **settings: Any) -> dict[str, Any]:
    """Return the settings of a loader that shuffles with the global generator."""
    return {"dataset": dataset, "shuffle": True, **settings}


def generated(dataset: Any, **settings: Any) -> dict[str, Any]:
    """Return the settings of a loader that shuffles with a generator of its own."""
    return shuffled(dataset, generator=torch_generator(), **settings)


def sampled(sampler: Any, **settings: Any) -> dict[str, Any]:
    """Return the settings of a loader with augmenting samples in the order of a sampler."""
    return {"dataset": Samples(True), "sampler": sampler, **settings}


def distributed() -> dict[str, Any]:
    """Return the settings of the loader of one process of two."""
    dataset = Samples(True, count=2 * SAMPLES - 1)
    sampler = DistributedSampler(dataset, num_replicas=2, rank=1, seed=3)
    return {"dataset": dataset, "sampler": sampler, **W2}


WEIGHTS = torch.arange(1.0, SAMPLES + 1)
W2 = {"num_workers": 2}
W3 = {"num_workers": 3}
W2P = {**W2, "persistent_workers": True}
W3P = {**W3, "persistent_workers": True}

SETUPS: dict[str, Setup] = {
    "map plain sequential W0": lambda: {"dataset": Samples()},
    "map plain sequential W2": lambda: {"dataset": Samples(), **W2},
    "map plain shuffle+generator W0": lambda: generated(Samples()),
    "map plain shuffle+generator W2": lambda: generated(Samples(), **W2),
    "map plain shuffle W0": lambda: shuffled(Samples()),
    "map plain shuffle W2": lambda: shuffled(Samples(), **W2),
    "map augmented sequential W0": lambda: {"dataset": Samples(True)},
    "map augmented sequential W2": lambda: {"dataset": Samples(True), **W2},
    "map augmented shuffle+generator W0": lambda: generated(Samples(True)),
    "map augmented shuffle+generator W2": lambda: generated(Samples(True), **W2),
    "map augmented shuffle W0": lambda: shuffled(Samples(True)),
    "map augmented shuffle W2": lambda: shuffled(Samples(True), **W2),
    "map augmented shuffle+generator W2p": lambda: generated(Samples(True), **W2P),
    "map augmented shuffle W2p": lambda: shuffled(Samples(True), **W2P),
    "map augmented shuffle W3 prefetch 4": lambda: shuffled(Samples(True), prefetch_factor=4, **W3),
    "map own generator W0": lambda: generated(Samples(True, own=True)),
    "map own generator W2": lambda: generated(Samples(True, own=True), **W2),
    "map own generator init_fn W2p": lambda: generated(Samples(True, own=True), worker_init_fn=reseed, **W2P),
    "map reads worker's id W2": lambda: generated(WorkerSamples(), **W2),
    "map weighted W2": lambda: sampled(WeightedRandomSampler(WEIGHTS, SAMPLES), **W2),
    "map weighted+generator W2": lambda: sampled(
        WeightedRandomSampler(WEIGHTS, SAMPLES, generator=torch_generator()), **W2
    ),
    "map replacement+generator W2": lambda: sampled(
        RandomSampler(range(SAMPLES), replacement=True, generator=torch_generator()), **W2
    ),
    "map subset W2": lambda: sampled(SubsetRandomSampler(range(SAMPLES)), **W2),
    "map distributed W2": distributed,
    "map batch sampler, sizes W2": lambda: {"dataset": Samples(True), "batch_sampler": RandomSizes(), **W2},
    "map batch sampler, sizes W0": lambda: {"dataset": Samples(True), "batch_sampler": RandomSizes()},
    "map batch sampler, live W2": lambda: {"dataset": Samples(True), "batch_sampler": LiveDraws(), **W2},
    "map sampler's own generator W2": lambda: sampled(OwnOrder(), **W2),
    "map batch_size=None W2": lambda: shuffled(Samples(True), batch_size=None, **W2),
    "map drop_last W2": lambda: shuffled(Samples(True), drop_last=True, **W2),
    "map in_order=False W2, never repeats": lambda: generated(Samples(True), in_order=False, **W2),
    "iterable plain W0": lambda: {"dataset": Stream()},
    "iterable plain W2": lambda: {"dataset": Stream(), **W2},
    "iterable augmented W0": lambda: {"dataset": Stream(True)},
    "iterable augmented W2": lambda: {"dataset": Stream(True), **W2},
    "iterable augmented W3p": lambda: {"dataset": Stream(True), **W3P},
    "iterable shuffle buffer W2": lambda: {"dataset": Stream(True, buffer=10), **W2},
    "iterable stateful plain W0": lambda: {"dataset": StatefulStream()},
    "iterable stateful plain W2": lambda: {"dataset": StatefulStream(), **W2},
    "iterable stateful augmented W0": lambda: {"dataset": StatefulStream(True)},
    "iterable stateful augmented W2": lambda: {"dataset": StatefulStream(True), **W2},
    "iterable stateful augmented W2p": lambda: {"dataset": StatefulStream(True), **W2P},
    "iterable stateful iterator W2": lambda: {"dataset": IteratorStream(True), **W2},
    "iterable stateful iterator W3p": lambda: {"dataset": IteratorStream(True), **W3P},
}


def build(setup: Setup, kind: type) -> Any:
    """Make the loader of a set-up, of a class that takes what a DataLoader takes."""
    settings = setup()
    return kind(**({} if "batch_sampler" in settings else {"batch_size": 8}) | settings)


# A process for every measurement.


def leg(job: Callable[[], T]) -> T:
    """Do a job in a fresh process, which ends with all of its workers; Failed if it fails or hangs."""
    here, there = FORK.Pipe(duplex=False)
    process = FORK.Process(target=in_process, args=(job, there))
    process.start()
    there.close()
    try:
        done, outcome = here.recv() if here.poll(LEG_SECONDS) else (False, "hang")
    except EOFError:
        done, outcome = False, "died"
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    if not done:
        raise Failed(outcome)
    return outcome


def in_process(job: Callable[[], Any], there: Connection) -> None:
    """Do a job, say how it went, and wait for the end."""
    os.setsid()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    seed()
    try:
        outcome = True, job()
    except BaseException as exc:
        outcome = False, f"{type(exc).__name__}: {str(exc).splitlines()[0] if str(exc) else ''}"
    there.send(outcome)
    signal.pause()


# How exact it is.


class Training:
    """A training that draws random numbers in every step, as dropout does, and notes its batches."""

    epochs = EPOCHS

    def __init__(self, stop: tuple[int, int] | None) -> None:
        self.seen: list[list[Any]] = [[] for _ in range(EPOCHS)]
        self.stop = stop

    def step(self, epoch: int, batch: torch.Tensor) -> bool:
        """Train on a batch."""
        self.seen[epoch].append(batch.tolist())
        drawn(0)
        return self.stop == (epoch, len(self.seen[epoch]))


Trace = tuple[list[list[Any]], list[float]]
"""The batches of every epoch, and the next numbers of all generators."""


def trace(contender: str, setup: str, stop: tuple[int, int] | None, folder: Path, resuming: bool) -> Trace:
    """Train to the stop, or from it, or without one to the end."""
    training, make = Training(stop), partial(build, SETUPS[setup])
    try:
        loader = CONTENDERS[contender](make, training, folder, resuming)
    except Stopped:
        return training.seen, []
    owners = loader, loader.sampler, loader.dataset
    own = [found for owner in owners if (found := getattr(owner, "generator", None)) is not None]
    return training.seen, drawn(0) + [next_number(generator) for generator in own]


def next_number(generator: torch.Generator | np.random.Generator) -> float:
    """Return the next number that a generator gives."""
    if isinstance(generator, np.random.Generator):
        return generator.random()
    return torch.rand((), generator=generator).item()


@dataclass(frozen=True, slots=True)
class Cell:
    """How a contender does in a set-up."""

    exact: int = 0
    batches: int = 0
    """In how many stops at least the batches are exact."""
    is_plain: bool = False
    """Whether it, never stopped, gives what the plain DataLoader gives."""
    errors: tuple[str, ...] = ()

    def __str__(self) -> str:
        batches = f" ({self.batches})" if self.batches > self.exact else ""
        kinds = sorted({f" {error.partition(':')[0]}" for error in self.errors})
        return f"{self.exact}{'' if self.is_plain else '*'}{batches}{''.join(kinds)}"


def compare(setup: str, contender: str) -> Cell:
    """Stop a contender in all five places, and compare with its run that is never stopped."""
    errors, same = [], []
    nowhere = Path(tempfile.mkdtemp())
    try:
        reference = leg(partial(trace, "plain", setup, None, nowhere, False))
        whole = leg(partial(trace, contender, setup, None, nowhere, False))
    except Failed as failed:
        return Cell(errors=(str(failed),))
    for stop in STOPS:
        try:
            left, resumed = stopped(contender, setup, stop, whole)
            same.append([resumed == left, resumed[0] == left[0]])
        except Failed as failed:
            errors.append(str(failed))
    exact, batches = (sum(column) for column in zip([0, 0], *same, strict=True))
    return Cell(exact, batches, whole == reference, tuple(errors))


def stopped(contender: str, setup: str, stop: tuple[int, int], whole: Trace) -> tuple[Trace, Trace]:
    """Stop a training and continue in another process; return what there was left to do, and what it did."""
    (epoch, batch), (batches, numbers) = stop, whole
    done = batch if batch > 0 else len(batches[epoch]) + 1 + batch
    folder = Path(tempfile.mkdtemp())
    leg(partial(trace, contender, setup, (epoch, done), folder, False))
    resumed = leg(partial(trace, contender, setup, None, folder, True))
    shutil.rmtree(folder)
    return ([[] for _ in range(epoch)] + [batches[epoch][done:]] + batches[epoch + 1 :], numbers), resumed


def exact(contenders: Sequence[str], part: str) -> None:
    """Print in how many of five stops each contender continues exactly, set-up by set-up."""
    print(
        "\nIn how many of five stops all is exact: the rest of the epoch, the epochs after it, and at the end"
        "\nthe next number of every generator (in brackets: in how many the batches are). Compared with the"
        "\ncontender's own run that is never stopped; * where that is not the plain DataLoader's."
        "\nW2: two workers, W2p: two persistent ones.\n"
    )
    setups = [name for name in SETUPS if part in name]
    columns: dict[str, list[Cell]] = {name: [] for name in contenders if name != "plain"}
    row("", *columns, width=20)
    with ProcessPoolExecutor(os.cpu_count(), FORK) as pool:
        jobs = {(setup, name): pool.submit(compare, setup, name) for setup in setups for name in columns}
        for (setup, name), job in jobs.items():
            columns[name].append(job.result())
            if name == contenders[-1]:
                row(setup, *(cells[-1] for cells in columns.values()), width=20)
    every = len(STOPS)
    summaries: dict[str, Callable[[Cell], bool]] = {
        f"exact in all five, of {len(setups)}": lambda cell: cell.exact == every,
        "  and equal to the plain loader": lambda cell: cell.exact == every and cell.is_plain,
        "  the batches alone": lambda cell: cell.batches == every,
    }
    for what, holds in summaries.items():
        row(what, *(sum(map(holds, cells)) for cells in columns.values()), width=20)
    for name, cells in columns.items():
        for error, times in Counter(error for cell in cells for error in cell.errors).items():
            print(f"{name}, {times} x {error[:150]}")


def row(*cells: object, width: int = 14) -> None:
    """Print a line of a table."""
    print(f"{cells[0]!s:36}" + "".join(f"{cell!s:>{width}}" for cell in cells[1:]), flush=True)


# What it costs.


class Clock:
    """A training that does nothing but look at the clock."""

    epochs = 1

    def __init__(self, warm_up: int, batches: int, saves: bool) -> None:
        self.warm_up, self.last, self.saves = warm_up, warm_up + batches, saves
        self.done = 0
        self.started = time.perf_counter(), time.process_time()

    def step(self, epoch: int, batch: Any) -> bool:
        """Count a batch; after the last one look at the clock."""
        self.done += 1
        if self.done == self.warm_up:
            self.started = time.perf_counter(), time.process_time()
        if self.done < self.last:
            return False
        self.wall = time.perf_counter() - self.started[0]
        self.cpu = time.process_time() - self.started[1]
        if not self.saves:
            raise Stopped
        return True


@dataclass(frozen=True, slots=True)
class Timed:
    """A job for `leg`: the seconds of a contender for some batches, and the main process's CPU time."""

    contender: Contender
    setup: Setup
    batches: int = 1
    warm_up: int = 0
    saves_in: Path | None = None
    goes_on_from: Path | None = None

    def __call__(self) -> tuple[float, float]:
        """Measure once."""
        clock = Clock(self.warm_up, self.batches, self.saves_in is not None)
        folder = self.saves_in or self.goes_on_from or Path(tempfile.mkdtemp())
        with suppress(Stopped):
            self.contender(partial(build, self.setup), clock, folder, self.goes_on_from is not None)
        return clock.wall, clock.cpu


Rounds = list[tuple[float, float]]
"""Of each round the seconds a batch, and the main process's CPU time among them."""


def in_turns(jobs: Mapping[str, Timed]) -> dict[str, Rounds]:
    """Measure in turns, so that a noisy machine is noisy for all; what fails is reported and left out."""
    taken: dict[str, Rounds] = {name: [] for name in jobs}
    for name in [*jobs] * ROUNDS:
        try:
            if name in taken:
                wall, cpu = leg(jobs[name])
                taken[name].append((wall / jobs[name].batches, cpu / jobs[name].batches))
        except Failed as failed:
            row(name, failed)
            del taken[name]
    return taken


def micro(seconds: float) -> str:
    """Return a time in microseconds."""
    return f"{seconds * 1e6:.1f}"


def cost_of_batches(contenders: Sequence[str], what: str) -> None:
    """Print the time of a batch, all in all and in the main process, and how they compare with plain's.

    The throughput is that of the best rounds, and the median of what the rounds say one by one.
    """
    setup, batches = WORKLOADS[what]
    print(f"\n{what}, 2 workers: microseconds a batch, {ROUNDS} rounds of {batches} batches in turns")
    row("", "best", "median", "throughput", "in rounds", "CPU of main", "median", "over plain's")
    taken = in_turns({name: Timed(CONTENDERS[name], setup, batches, warm_up=50) for name in contenders})
    plain_wall, plain_cpu = zip(*taken["plain"], strict=True)
    for name, rounds in taken.items():
        wall, cpu = zip(*rounds, strict=True)
        throughput = min(plain_wall) / min(wall), statistics.median(map(operator.truediv, plain_wall, wall))
        over = statistics.median(map(operator.sub, cpu, plain_cpu))
        times = [micro(figure(column)) for column in (wall, cpu) for figure in (min, statistics.median)]
        row(name, *times[:2], *(f"{share:.1%}" for share in throughput), *times[2:], micro(over))


def cost_of_resuming(contenders: Sequence[str], workers: int) -> None:
    """Print the time until the first batch, from a fresh start and at 90 % of an epoch."""
    print(f"\n1,000,000 samples, shuffled, {workers} workers: seconds until the first batch, {ROUNDS} rounds")
    row("", "best", "median", "over fresh")
    setup = partial(generated, range(1_000_000), batch_size=64, num_workers=workers)
    jobs = {name: Timed(CONTENDERS[name], setup) for name in contenders}
    for name in contenders[1:]:
        folder = Path(tempfile.mkdtemp())
        try:
            leg(replace(jobs[name], batches=900_000 // 64, saves_in=folder))
            jobs[f"{name}, at 90 %"] = replace(jobs[name], goes_on_from=folder)
        except Failed as failed:
            row(f"{name}, stopped at 90 %", failed)
    taken = {name: [wall for wall, _ in rounds] for name, rounds in in_turns(jobs).items()}
    for name, times in taken.items():
        fresh = min(taken.get(name.partition(",")[0], times))
        row(
            name,
            *(f"{figure(times):.3f}" for figure in (min, statistics.median)),
            f"{min(times) - fresh:+.3f}",
        )


def cost_of_seeds(workers: int, augmented: bool) -> None:
    """Print what a seed for every sample costs."""
    setup = partial(shuffled, Samples(augmented, count=50_000), batch_size=100, num_workers=workers)
    ways = {"without": ours, "with": partial(ours, sample_seeds=True)}
    taken = in_turns({way: Timed(contender, setup, 200, warm_up=20) for way, contender in ways.items()})
    best = [min(wall for wall, _ in rounds) / 100 for rounds in taken.values()]
    what = f"{'all three drawn' if augmented else 'nothing drawn'}, {workers or 'no'} workers"
    row(what, *map(micro, best), micro(best[-1] - best[0]))


WORKLOADS: dict[str, tuple[Setup, int]] = {
    "batches of 8 scalars, nothing drawn": (partial(shuffled, Samples(count=20_000), **W2), 1000),
    "batches of 8 scalars, all three drawn": (partial(shuffled, Samples(True, count=20_000), **W2), 1000),
    "64 images of 3 x 64 x 64 bytes": (partial(shuffled, Images(), batch_size=64, **W2), 200),
}


def cost(contenders: Sequence[str]) -> None:
    """Print what a batch costs, what continuing in mid-epoch does, and what a seed for every sample does."""
    for what in WORKLOADS:
        cost_of_batches(contenders, what)
    for workers in (0, 2):
        cost_of_resuming(contenders, workers)
    print(f"\nsample_seeds=True, batches of 100 scalars: microseconds a sample, best of {ROUNDS} rounds")
    row("", "without", "with", "more")
    for workers in (0, 1):
        for augmented in (False, True):
            cost_of_seeds(workers, augmented)


def main() -> None:
    """Print the tables that were asked for."""
    if sys.argv[1:2] not in (["cost"], ["exact"]):
        sys.exit(__doc__)
    warnings.simplefilter("ignore")
    logging.disable()
    torch.set_num_threads(1)
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    contenders = [name for name in CONTENDERS if is_installed(name)]
    with tempfile.TemporaryDirectory() as scratch:
        tempfile.tempdir = scratch
        if sys.argv[1] == "cost":
            cost(contenders)
        else:
            exact(contenders, " ".join(sys.argv[2:]))


def is_installed(contender: str) -> bool:
    """Import what a contender needs, once: the process of each measurement is a copy of this one."""
    package, _, module = NEEDS[contender].partition(".")
    try:
        print(f"{contender}: {package} {importlib.import_module(package).__version__}")
        importlib.import_module(f"{package}.{module}")
    except ImportError as exc:
        print(f"{contender} is left out: {exc}")
        return False
    return True


if __name__ == "__main__":
    main()
