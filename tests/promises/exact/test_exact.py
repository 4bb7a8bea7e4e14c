"""Promises 1 and 2: a training stopped anywhere and resumed is the plain training, bit for bit."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import compare
import numpy as np
import pytest
import torch
from compare import Trail
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from resumable import RunState

EPOCHS = 3
Batch = tuple[torch.Tensor, torch.Tensor]


class Augmented(Dataset[Batch]):
    """Samples with noise from Python's, numpy's and torch's generators; it counts how often it is asked."""

    def __init__(self, length: int = 19) -> None:
        self.length = length
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Batch:
        self.asked.append(index)
        noise = random.gauss(0, 1) + np.random.randn() + torch.randn(())
        return torch.full((1, 4), float(index)) / 10 + noise, torch.tensor(index % 3)


class WithGenerators(Augmented):
    """The same, with generators of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.transforms = [np.random.default_rng(seed), {"flip": random.Random(seed)}]
        self.torch_generator = torch.Generator().manual_seed(seed)

    def __getitem__(self, index: int) -> Batch:
        image, label = super().__getitem__(index)
        numpy_generator, others = self.transforms
        noise = torch.rand((), generator=self.torch_generator)
        return image + numpy_generator.random() * others["flip"].random() * noise, label


class Stream(IterableDataset[Batch]):
    """An iterable dataset whose noise comes from the global generators."""

    def __iter__(self) -> Iterator[Batch]:
        return (Augmented()[index] for index in range(19))


class ShuffledBatches(Sampler[list[int]]):
    """A batch sampler that shuffles with Python's generator when the epoch begins."""

    def __iter__(self) -> Iterator[list[int]]:
        order = random.sample(range(19), 19)
        return iter([order[i : i + 4] for i in range(0, 19, 4)])

    def __len__(self) -> int:
        return 5


class DrawnBatches(ShuffledBatches):
    """A batch sampler that draws from numpy's global generator at every batch."""

    def __iter__(self) -> Iterator[list[int]]:
        return (np.random.randint(0, 19, 4).tolist() for _ in range(5))


def shared_generator(seed: int) -> DataLoader[Any]:
    loader: DataLoader[Any] = DataLoader(WithGenerators(seed), batch_size=4, shuffle=True)
    loader.generator = loader.sampler.generator = loader.dataset.torch_generator  # type: ignore[attr-defined]
    return loader


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


Loaders = DataLoader[Any] | dict[str, DataLoader[Any]]
Make = Callable[[int], Loaders]
LOADERS: dict[str, Make] = {
    "sequential": lambda seed: DataLoader(Augmented(), 4),
    "shuffle": lambda seed: DataLoader(Augmented(), 4, shuffle=True),
    "shuffle by a generator": lambda seed: DataLoader(
        Augmented(), 4, shuffle=True, generator=generator(seed)
    ),
    "even batches": lambda seed: DataLoader(Augmented(16), 4, shuffle=True, generator=generator(seed)),
    "a generator shared with the dataset": shared_generator,
    "weighted": lambda seed: DataLoader(Augmented(), 4, sampler=WeightedRandomSampler(range(1, 20), 19)),
    "weighted by a generator": lambda seed: DataLoader(
        Augmented(), 4, sampler=WeightedRandomSampler(range(1, 20), 19, generator=generator(seed))
    ),
    "with replacement": lambda seed: DataLoader(
        Augmented(), 8, sampler=RandomSampler(range(19), True, 40, generator(seed))
    ),
    "subset": lambda seed: DataLoader(Augmented(), 4, sampler=SubsetRandomSampler([1, 2, 3, 5, 8, 13])),
    "shuffled batches": lambda seed: DataLoader(Augmented(), batch_sampler=ShuffledBatches()),
    "drawn batches": lambda seed: DataLoader(Augmented(), batch_sampler=DrawnBatches()),
    "no batches": lambda seed: DataLoader(Augmented(5), batch_size=None, shuffle=True),
    "drop last": lambda seed: DataLoader(Augmented(), 4, shuffle=True, drop_last=True),
    "a dataset with generators": lambda seed: DataLoader(WithGenerators(seed), 4, shuffle=True),
    "a stream without batches": lambda seed: DataLoader(Stream(), batch_size=None),
    "a stream": lambda seed: DataLoader(Stream(), 4),
    "workers": lambda seed: DataLoader(Augmented(), 4, shuffle=True, num_workers=2),
    "workers of a stream": lambda seed: DataLoader(Stream(), 4, num_workers=2),
}


class Training:
    """All objects of one training, made from one seed, and what it has been fed."""

    def __init__(self, seed: int, make: Make, trail: Trail | None = None) -> None:
        self.trail = trail
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.loader = make(seed)
        self.model = nn.Sequential(
            nn.Conv1d(1, 3, 2), nn.BatchNorm1d(3), nn.Dropout(0.3), nn.Flatten(), nn.Linear(9, 3)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=7)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.noise = np.random.default_rng(seed)
        self.fed: list[str] = []
        self.lrs: list[float] = []

    def train(self, batch: Batch) -> None:
        images, labels = batch
        self.fed.append(hashlib.sha256(images.numpy().tobytes() + labels.numpy().tobytes()).hexdigest())
        self.optimizer.zero_grad()
        logits = self.model(images.reshape(-1, 1, 4).repeat(2, 1, 1) * self.noise.random())
        loss = nn.functional.cross_entropy(logits, labels.reshape(-1).repeat(2))
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.lrs += self.scheduler.get_last_lr()
        if self.trail:
            self.trail.note(len(self.fed), self.parts(), self.fed[-1:])

    def parts(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "extra": {"noise": self.noise},
        }

    def load(self, run_dir: Path, **more: Any) -> RunState:
        """Bind everything to the run, and continue from its newest checkpoint."""
        state = RunState.load(run_dir, **self.parts(), loader=self.loader, **more)
        self.fed, self.lrs = state.vars.setdefault("seen", ([], []))
        if state.resumed:
            # What is drawn before the loops continue must not count.
            self.draw()
        return state

    def draw(self) -> list[float]:
        """Return the next number of every generator: equal numbers are equal states."""
        drawn = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]
        drawn += [torch.rand(()).item(), torch.randn(()).item(), self.noise.random()]
        loaders = self.loader.values() if isinstance(self.loader, dict) else [self.loader]
        return drawn + [value for loader in loaders for value in next(iter(loader))[0].flatten().tolist()]

    def outcome(self) -> dict[str, Any]:
        """Return all that two equal trainings have in common, as bytes and numbers."""
        tensors = {name: value.numpy().tobytes() for name, value in self.model.state_dict().items()}
        moments = self.optimizer.state_dict()["state"]
        return {
            "fed": self.fed,
            "lrs": self.lrs,
            "weights": tensors,
            "moments": {i: {k: v.numpy().tobytes() for k, v in m.items()} for i, m in moments.items()},
            "scaler": self.scaler.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "drawn": self.draw(),
        }


def never_stopped(make: Make, trail: Trail | None = None) -> Training:
    """Train with the plain DataLoader, and without anything of ours."""
    training = Training(0, make, trail)
    for _ in range(EPOCHS):
        for batch in training.loader:  # type: ignore[union-attr]
            training.train(batch)
    return training


def assert_is_the_plain_one(stopped: Training, plain: Callable[..., Training]) -> None:
    """Compare all there is in the end; if it differs, train the plain one again, and say where they part."""
    assert stopped.outcome() == plain().outcome(), where_they_part(stopped, plain)


def where_they_part(stopped: Training, plain: Callable[..., Training]) -> str:
    trail = Trail()
    plain(trail)
    return compare.first(trail, stopped.trail or Trail())


def leg(
    run_dir: Path, seed: int, make: Make, batches: int, trail: Trail | None = None, *, save: bool = True
) -> Training | None:
    """Go on for some batches, save in the body of the last one, and stop; return the training if it ended."""
    training = Training(seed, make, trail)
    state = training.load(run_dir, keep=1)
    for _ in state.epochs(EPOCHS):
        for batch in state.batches():
            training.train(batch)
            batches -= 1
            if not batches:
                if save:
                    state.save()
                state.close()
                return None
    state.close()
    return training


def chain(run_dir: Path, make: Make, batches: int, *, each_twice: bool = False) -> Training:
    """Train in legs of some batches, each of freshly made objects, until the training has ended."""
    trail = Trail()
    for seed in itertools.count():
        if each_twice:
            # Killed before its save: the next leg stands where this one did.
            leg(run_dir, seed + 1000, make, 1, save=False) if seed else None
        if training := leg(run_dir, seed, make, batches, trail):
            return training
    raise AssertionError("not reached")


@pytest.mark.proves("exact")
# It keeps nothing of what it draws
@pytest.mark.filterwarnings("ignore:Stream and the training draw from the same generators")
@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.sampled(3)
@pytest.mark.quick(3)
def test_a_training_stopped_at_every_batch_is_the_plain_one(run_dir: Path, name: str) -> None:
    stopped = chain(run_dir, LOADERS[name], batches=1)

    assert_is_the_plain_one(stopped, partial(never_stopped, LOADERS[name]))


@pytest.mark.parametrize("batches", [2, 3, 4, 7])
@pytest.mark.parametrize("name", ["shuffle by a generator", "a dataset with generators", "drawn batches"])
@pytest.mark.sampled(5)
def test_a_training_in_longer_legs_is_the_plain_one(run_dir: Path, name: str, batches: int) -> None:
    stopped = chain(run_dir, LOADERS[name], batches)

    assert_is_the_plain_one(stopped, partial(never_stopped, LOADERS[name]))


@pytest.mark.proves("exact")
@pytest.mark.parametrize("name", ["shuffle", "shuffle by a generator", "a dataset with generators"])
@pytest.mark.quick(3)
def test_a_checkpoint_that_is_resumed_twice_gives_the_plain_training(run_dir: Path, name: str) -> None:
    stopped = chain(run_dir, LOADERS[name], batches=2, each_twice=True)

    assert_is_the_plain_one(stopped, partial(never_stopped, LOADERS[name]))


def epoch_leg(run_dir: Path, seed: int, make: Make, trail: Trail) -> Training | None:
    """Train one epoch, save after its loop, and stop; return the training if it had ended before."""
    training = Training(seed, make, trail)
    state = training.load(run_dir)
    for _ in state.epochs(EPOCHS):
        for batch in state.batches():
            training.train(batch)
        state.save()
        state.close()
        return None
    state.close()
    return training


@pytest.mark.proves("exact")
@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.sampled(5)
def test_a_training_stopped_at_every_epochs_end_is_the_plain_one(run_dir: Path, name: str) -> None:
    make, trail = LOADERS[name], Trail()

    stopped = next(filter(None, (epoch_leg(run_dir, seed, make, trail) for seed in itertools.count())))

    assert_is_the_plain_one(stopped, partial(never_stopped, make))


@pytest.mark.proves("transparent")
def test_a_training_that_never_stops_is_the_plain_one_whether_it_saves_or_not(tmp_path: Path) -> None:
    make = LOADERS["a generator shared with the dataset"]
    outcomes = []

    for saves in range(2):
        training = Training(0, make)
        state = training.load(tmp_path / str(saves))
        for _ in state.epochs(EPOCHS):
            for batch in state.batches():
                training.train(batch)
                state.save() if saves else None
        state.close()
        outcomes.append(training.outcome())

    assert outcomes[0] == outcomes[1] == never_stopped(make).outcome()


class Plain:
    """The loops without anything of ours, for scripts that are to do the same with both."""

    def __init__(self, training: Training) -> None:
        self._loaders = training.loader
        self.batch = 0

    def epochs(self, total: int) -> Iterator[int]:
        for epoch in range(total):
            self.batch = 0
            yield epoch

    def steps(self, total: int) -> range:
        return range(total)

    def batches(self, name: str | None = None) -> Iterator[Any]:
        # Not in the generator: a loader's iterator draws when it is made
        loader = self._loaders[name] if isinstance(self._loaders, dict) else self._loaders
        return self._counted(iter(loader))

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield batch
            self.batch += 1


class Stopped(Exception):
    """Raised right after a save, as if the process had been killed there."""


Script = Callable[[Training, Any, Callable[[], None]], None]
"""A training loop: its objects, the loops of a RunState or of Plain, and where it may stop."""


def stopped_everywhere(run_dir: Path, script: Script, make: Make) -> Training:
    """Run a script from each place where it may stop to the next one, always with fresh objects."""
    trail = Trail()
    for seed in itertools.count():
        training = Training(seed, make, trail)
        state = training.load(run_dir, keep=1)

        def stop(state: RunState = state) -> None:
            state.save()
            raise Stopped

        try:
            script(training, state, stop)
        except Stopped:
            continue
        finally:
            state.close()
        return training
    raise AssertionError("not reached")


def plain(script: Script, make: Make, trail: Trail | None = None) -> Training:
    """Run a script with the plain loaders to its end."""
    training = Training(0, make, trail)
    script(training, Plain(training), lambda: None)
    return training


def draws_before_its_batches(training: Training, state: Any, stop: Callable[[], None]) -> None:
    for _ in state.epochs(EPOCHS):
        shift = torch.randn(1) + random.random() + np.random.rand() + training.noise.random()
        for images, labels in state.batches():
            training.train((images + shift, labels))
            stop()


def goes_on_after_its_batches(training: Training, state: Any, stop: Callable[[], None]) -> None:
    for _ in state.epochs(EPOCHS):
        for batch in state.batches():
            training.train(batch)
            stop()
        training.lrs.append(random.random() + torch.rand(1).item() + training.noise.random())
        stop()


def saves_before_its_batches(training: Training, state: Any, stop: Callable[[], None]) -> None:
    for epoch in state.epochs(EPOCHS):
        shift = torch.randn(1)
        if -epoch - 1.0 not in training.lrs:
            training.lrs.append(-epoch - 1.0)
            stop()
        for images, labels in state.batches():
            training.train((images + shift, labels))


def begins_with_an_epoch_without_batches(training: Training, state: Any, stop: Callable[[], None]) -> None:
    for epoch in state.epochs(EPOCHS):
        drawn = random.random() + torch.rand(1).item()
        if epoch == 0 and not training.lrs:
            training.lrs.append(drawn)
            stop()
        random.random(), torch.rand(1), training.noise.random()
        for batch in state.batches() if epoch else ():
            training.train(batch)
            stop()


def breaks_after_three(training: Training, state: Any, stop: Callable[[], None]) -> None:
    for _ in state.epochs(EPOCHS):
        for batch in state.batches():
            if state.batch == 3:
                break
            training.train(batch)
            stop()
        stop()


def breaks_once_three_are_trained(training: Training, state: Any, stop: Callable[[], None]) -> None:
    for _ in state.epochs(EPOCHS):
        for number, batch in enumerate(state.batches(), start=state.batch + 1):
            training.train(batch)
            if number >= 3:
                break
        stop()


def shows_its_progress(training: Training, state: Any, stop: Callable[[], None]) -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    for _ in state.epochs(EPOCHS):
        for batch in tqdm(state.batches(), disable=None):
            training.train(batch)
            stop()


def accumulates(training: Training, state: Any, stop: Callable[[], None]) -> None:
    for _ in state.epochs(EPOCHS):
        images = []
        for batch in state.batches():
            images.append(batch[0])
            if len(images) == 2:
                training.train((torch.cat(images), torch.zeros(len(torch.cat(images)), dtype=torch.long)))
                images = []
                stop()


def trains_by_steps(training: Training, state: Any, stop: Callable[[], None]) -> None:
    def for_ever() -> Iterator[Batch]:
        while True:
            yield from state.batches()

    batches = for_ever()
    for _ in state.steps(13):
        training.train(next(batches))
        stop()


SCRIPTS = [
    draws_before_its_batches,
    saves_before_its_batches,
    goes_on_after_its_batches,
    begins_with_an_epoch_without_batches,
    breaks_after_three,
    breaks_once_three_are_trained,
    shows_its_progress,
    accumulates,
    trains_by_steps,
]


@pytest.mark.parametrize("name", ["shuffle", "a generator shared with the dataset"])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
@pytest.mark.sampled(5)
@pytest.mark.quick(3)
def test_a_script_stopped_at_every_save_is_the_plain_one(run_dir: Path, script: Script, name: str) -> None:
    stopped = stopped_everywhere(run_dir, script, LOADERS[name])

    assert_is_the_plain_one(stopped, partial(plain, script, LOADERS[name]))


def two_loaders(seed: int) -> Loaders:
    return {"train": shared_generator(seed), "val": DataLoader(Augmented(7), 2, shuffle=True)}


def validates(training: Training, state: Any, stop: Callable[[], None]) -> None:
    for _ in state.epochs(EPOCHS):
        for batch in state.batches("train"):
            training.train(batch)
            stop()
        training.model.eval()
        for images, _ in state.batches("val"):
            training.lrs.append(training.model(images.reshape(-1, 1, 4)).sum().item() + random.random())
            stop()
        training.model.train()
        stop()


def zips(training: Training, state: Any, stop: Callable[[], None]) -> None:
    for _ in state.epochs(EPOCHS):
        for batch, (images, _) in zip(state.batches("train"), state.batches("val"), strict=False):
            training.train(batch)
            training.lrs.append(images.sum().item())
            stop()
        stop()


@pytest.mark.parametrize("script", [validates, zips], ids=lambda script: script.__name__)
@pytest.mark.quick(2)
def test_a_script_with_two_loaders_stopped_at_every_save_is_the_plain_one(
    run_dir: Path, script: Script
) -> None:
    stopped = stopped_everywhere(run_dir, script, two_loaders)

    assert_is_the_plain_one(stopped, partial(plain, script, two_loaders))


def test_samples_that_were_trained_before_the_stop_are_not_loaded_again(run_dir: Path) -> None:
    make = LOADERS["shuffle"]
    leg(run_dir, 0, make, 3)
    leg(run_dir, 1, make, 1)

    training = Training(2, make)
    state = training.load(run_dir)
    training.loader.dataset.asked.clear()  # type: ignore[union-attr]
    batch = next(iter(state.batches()))

    assert len(training.loader.dataset.asked) == len(batch[1]) == 3  # type: ignore[union-attr]


@pytest.mark.proves("exact")
@pytest.mark.heavy
def test_separate_interpreters_with_other_hash_seeds_give_the_plain_training(run_dir: Path) -> None:
    for seed in range(2):
        command = [sys.executable, __file__, str(run_dir), str(seed)]
        env = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run(command, env=env, check=True)

    training = leg(run_dir, 2, LOADERS["a dataset with generators"], 100, Trail())

    assert training is not None
    assert_is_the_plain_one(training, partial(never_stopped, LOADERS["a dataset with generators"]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    leg(Path(sys.argv[1]), int(sys.argv[2]), LOADERS["a dataset with generators"], 4)
