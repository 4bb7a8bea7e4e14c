"""What loads ahead of the training, given as through= or wrapped around the batches, keeps the position."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from resumable import ResumableWarning, RunState, UsageError

pytestmark = [
    # What Python says of every worker that is forked while a save, or a thread, is on its way.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
    pytest.mark.filterwarnings("ignore:loader keeps no position"),
]

EPOCHS, SAMPLES, BATCH = 2, 23, 4
"""Six batches an epoch, the last one short; two workers have four of them in flight."""

Seen = list[Any]


# What people put between a loader and their training.


class Background(threading.Thread):
    """The generator that loads in a thread, as everyone copies it; it also passes errors on."""

    running: ClassVar[list[Background]] = []

    def __init__(self, batches: Iterable[Any]) -> None:
        super().__init__(daemon=True)
        self.queue: queue.Queue[Any] = queue.Queue(2)
        self.batches = batches
        self.error: BaseException | None = None
        self.running.append(self)
        self.start()

    def run(self) -> None:
        try:
            for batch in self.batches:
                self.queue.put(batch)
        except BaseException as error:
            self.error = error
        self.queue.put(None)

    def __iter__(self) -> Background:
        return self

    def __next__(self) -> Any:
        batch = self.queue.get()
        if batch is None:
            raise self.error or StopIteration
        return batch


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    yield
    until = time.monotonic() + 60
    while Background.running:
        thread = Background.running.pop()
        while thread.is_alive():
            assert time.monotonic() < until, "a thread does not end: it waits for a batch that never comes"
            thread.batches = ()
            try:
                thread.queue.get(timeout=0.01)
            except queue.Empty:
                thread.join(timeout=0.01)


class Prefetcher:
    """The prefetcher of apex: always one batch ahead, in the training's own thread."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = iter(batches)
        self.preload()

    def preload(self) -> None:
        self.following = next(self.batches, None)

    def next(self) -> Any:
        batch = self.following
        if batch is not None:
            self.preload()
        return batch


def one_ahead(batches: Iterable[Any]) -> Iterator[Any]:
    prefetcher = Prefetcher(batches)
    while (batch := prefetcher.next()) is not None:
        yield batch


def plain(state: RunState) -> Iterable[Any]:
    return state.batches()


def three_threads(batches: Iterator[Any]) -> Iterable[Any]:
    return Background(Background(one_ahead(batches)))


LOOPS: dict[str, Callable[[RunState], Iterable[Any]]] = {
    "plain": plain,
    "one ahead": lambda state: state.batches(through=one_ahead),
    "list": lambda state: state.batches(through=list),
    "device, one ahead": lambda state: state.batches(device="cpu", through=one_ahead),
    "thread": lambda state: state.batches(through=Background),
    "threads": lambda state: state.batches(through=three_threads),
    "device, thread": lambda state: state.batches(device="cpu", through=Background),
    "tqdm, thread": lambda state: tqdm(state.batches(through=Background)),
    "around: one ahead": lambda state: one_ahead(state.batches()),
    "around: thread": lambda state: Background(state.batches()),
    "around: device, thread": lambda state: Background(state.batches(device="cpu")),
}


# One training, which is stopped and continues.


class Images(Dataset[torch.Tensor]):
    """Samples that are told by their index, augmented."""

    failing = -1

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.failing:
            raise OSError(f"image {index} cannot be read")
        return torch.tensor([index, *draw()])


def draw() -> list[float]:
    return [random.random(), np.random.rand(), torch.rand(()).item()]


class Training:
    """A script: a model with dropout, an optimizer, a loader; all are new in every process."""

    def __init__(self, workers: int, seed: int = 0, dataset: Any = None) -> None:
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 2), nn.Dropout(), nn.Linear(2, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.loader = DataLoader(dataset or Images(), BATCH, shuffle=True, num_workers=workers)

    def load(self, run_dir: Path, **options: Any) -> RunState:
        return RunState.load(
            run_dir, model=self.model, optimizer=self.optimizer, loader=self.loader, **options
        )

    def step(self, batch: torch.Tensor) -> list[Any]:
        """Train on a batch and return what nobody could guess: it, the loss, a random number."""
        loss = self.model(batch).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return [batch.tolist(), loss.item(), *draw()]

    def epoch(self, batches: Iterable[Any]) -> None:
        for batch in batches:
            self.step(batch)


@cache
def uninterrupted(workers: int) -> Seen:
    """Return what a training sees that loops over the loader itself."""
    training, seen = Training(workers), []
    for epoch in range(EPOCHS):
        seen += [[epoch, *training.step(batch)] for batch in training.loader]
        seen.append([epoch, "end", draw()])
    return seen


def leg(
    run_dir: Path, loop: Callable[[RunState], Iterable[Any]], workers: int, stop: int | str, seed: int
) -> Seen:
    """Go on from the newest checkpoint up to a save: after so many steps, or at the first epoch's end."""
    training, seen = Training(workers, seed), []
    with training.load(run_dir) as state:
        for epoch in state.epochs(EPOCHS):
            for batch in loop(state):
                seen.append([epoch, *training.step(batch)])
                if state.step == stop:
                    state.save()
                    return seen
            seen.append([epoch, "end", draw()])
            if stop == "end" and epoch == 0:
                state.save()
                return seen
    return seen


def chain(
    run_dir: Path, loop: Callable[[RunState], Iterable[Any]], workers: int, stops: Iterable[Any]
) -> Seen:
    """Return what a training sees that is stopped again and again; each leg has another seed."""
    legs = enumerate([*stops, "never"])
    return [event for seed, stop in legs for event in leg(run_dir, loop, workers, stop, seed)]


@pytest.mark.parametrize("stops", [[], [4, "end", 7, 11], [6, 12]])
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.quick(36)
def test_what_was_only_loaded_ahead_is_not_counted(run_dir: Path, name: str, stops: list[Any]) -> None:
    if name.startswith("around"):  # where a step belongs to no batch that is known
        stops = [stop for stop in stops if stop not in (6, 12)]

    assert chain(run_dir, LOOPS[name], 2, stops) == uninterrupted(2)


@pytest.mark.quick(6)
@pytest.mark.parametrize("name", ["plain", "one ahead", "list", "around: one ahead"])
def test_what_was_loaded_ahead_in_process_is_loaded_again(run_dir: Path, tmp_path: Path, name: str) -> None:
    # What is loaded ahead in this process draws before the training does, with us as without us
    expected = chain(tmp_path / "one", LOOPS[name], 0, [])

    assert chain(run_dir, LOOPS[name], 0, [1, 2, 5, "end", 10]) == expected


@pytest.mark.parametrize("name", ["thread", "device, thread", "one ahead", "around: thread"])
@pytest.mark.quick(4)
def test_a_restore_while_a_thread_loads_goes_back_again_and_again(run_dir: Path, name: str) -> None:
    training, seen, backs = Training(2), [], 0
    with training.load(run_dir, keep=None) as state:
        for epoch in state.epochs(EPOCHS):
            for batch in LOOPS[name](state):
                seen.append([epoch, *training.step(batch)])
                if state.step == 3 and not backs:
                    state.save()
                if state.step == (5, 4, 8, 99)[backs]:
                    backs += 1
                    state.restore(1)
                    del seen[3:]
                    if name == "around: thread":
                        break  # its queue still has batches from before
            if len(seen) > 3:
                seen.append([epoch, "end", draw()])

    assert seen == uninterrupted(2)
    assert backs == 3


@pytest.mark.parametrize("name", ["thread", "device, thread", "one ahead", "around: one ahead"])
@pytest.mark.quick(4)
def test_an_epoch_left_early_is_left_whatever_was_loaded_ahead(run_dir: Path, name: str) -> None:
    def leg(loop: Callable[[Any], Iterable[Any]], path: Path, stop: int | None, seed: int) -> Iterator[Any]:
        training = Training(2, seed)
        with training.load(path) as state:
            for epoch in state.epochs(4):
                for number, batch in enumerate(loop(state)):
                    yield [epoch, *training.step(batch)]
                    if number == 2:
                        break
                if epoch == stop:
                    state.save()
                    return

    seen = [
        event for seed, stop in enumerate([0, 1, None]) for event in leg(LOOPS[name], run_dir, stop, seed)
    ]

    assert [event[0] for event in seen] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert seen == [*leg(plain, run_dir.parent / "one", None, 0)]


@pytest.mark.parametrize(
    "name",
    [
        *("plain", "thread", "device, thread"),
        pytest.param("one ahead", marks=pytest.mark.heavy),
        pytest.param("around: thread", marks=pytest.mark.heavy),
    ],
)
@pytest.mark.heavy
def test_a_resume_continues_where_a_broken_sample_ended_the_training(run_dir: Path, name: str) -> None:
    broken = Images()
    broken.failing = int(uninterrupted(1)[3][1][0][0])
    seen = leg(run_dir, LOOPS[name], 1, 2, 0)

    for seed in 1, 2:
        training = Training(1, seed, broken)
        # A save at the end, where the place is known, would have a batch that this test does not see.
        loaded = training.load(run_dir, every=None)
        with loaded as state, pytest.raises(OSError, match="cannot be read"):
            training.epoch(LOOPS[name](state))
    seen += leg(run_dir, LOOPS[name], 1, "never", 3)

    assert seen == uninterrupted(1)


def test_the_counters_are_those_of_what_was_handed_out(run_dir: Path) -> None:
    counters = []
    training = Training(2)
    with training.load(run_dir) as state:
        for _ in state.epochs(1):
            for batch in state.batches(through=list):
                counters.append((state.batch, state.step, state.samples))
                training.step(batch)

    assert counters == [(n, n, n * BATCH) for n in range(6)]
    assert (state.batch, state.step, state.samples) == (0, 6, SAMPLES)


def test_the_length_of_batches_is_that_of_the_epoch_whatever_loads_them(run_dir: Path) -> None:
    leg(run_dir, plain, 2, 2, 0)

    with Training(2).load(run_dir) as state:
        assert len(state.batches(through=Background)) == len(state.batches(device="cpu")) == 6


def repeated(batches: Iterator[Any]) -> Iterator[Any]:
    for batch in batches:
        yield from (batch, batch)


def test_more_batches_than_were_loaded_are_a_usage_error(run_dir: Path) -> None:
    with (
        Training(0).load(run_dir) as state,
        pytest.raises(UsageError, match="more batches than it was given"),
    ):
        for _ in state.batches(through=repeated):
            pass


def test_a_thread_without_a_step_for_every_batch_is_reported(run_dir: Path) -> None:
    training = Training(1)
    with training.load(run_dir) as state:
        epochs = state.epochs(1)
        next(epochs)
        training.epoch([*Background(state.batches())][::2])
        with pytest.warns(ResumableWarning, match="3 batches of the epoch were loaded by another thread"):
            next(epochs, None)


def test_more_steps_than_a_thread_has_loaded_batches_are_reported(run_dir: Path) -> None:
    training = Training(1)
    with training.load(run_dir) as state:
        batches = [*Background(state.batches())]
        training.epoch(batches)
        with pytest.warns(ResumableWarning, match="more steps than another thread has loaded batches"):
            training.epoch(batches[:1])


def test_an_epoch_that_ends_before_a_thread_does_is_reported(run_dir: Path) -> None:
    training = Training(1)
    with training.load(run_dir, every=None) as state:
        epochs = state.epochs(2)
        next(epochs)
        thread = iter(Background(state.batches()))
        training.epoch([next(thread)])
        with pytest.warns(ResumableWarning, match="before another thread had come to the end"):
            next(epochs)


def test_a_device_that_is_not_there_is_refused_before_loading(run_dir: Path) -> None:
    with Training(0).load(run_dir) as state:
        with pytest.raises(UsageError, match=r"this process sees \d+ devices"):
            state.batches(device="cuda:99")

        assert [len(batch) for batch in state.batches()] == [4, 4, 4, 4, 4, 3]
