"""One training of the matrix, with or without the library, and the loops that it may have."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import signal
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matrix_loaders import LOADERS, NOISE, Background, Images, on, silence
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from tqdm import tqdm

from resumable import RunState

EPOCHS, STEPS = 3, 18
TRAIL = "trail.jsonl"


def digest(*values: Any) -> str:
    found = hashlib.blake2b(digest_size=6)
    for value in values:
        found.update(
            value.detach().numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
        )
    return found.hexdigest()


class Plain:
    """The loops of RunState over the loaders themselves: the script without the library."""

    epoch = batch = step = 0

    def __init__(self, loaders: dict[str, Any], optimizer: torch.optim.Optimizer | None = None) -> None:
        self.vars: dict[str, Any] = {}
        self._loaders = loaders
        if optimizer:
            optimizer.register_step_post_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.step += 1

    def epochs(self, total: int) -> Iterator[int]:
        while self.epoch < total:
            self.batch = 0
            yield self.epoch
            self.epoch += 1

    def steps(self, total: int) -> Iterator[int]:
        while self.step < total:
            yield self.step

    def batches(self, which: Any = "loader", through: Any = iter, **_: Any) -> Iterator[Any]:
        loader = self._loaders[which] if isinstance(which, str) else which
        # Not in a generator's body: a loader draws as its iterator is made
        batches = iter(loader() if callable(loader) else loader)
        return map(self._hand_out, itertools.count(), through(batches))

    def _hand_out(self, number: int, batch: Any) -> Any:
        self.batch = number
        return batch

    def enumerate(self) -> Iterator[Any]:
        return enumerate(self.batches())

    def save(self) -> None:
        pass

    def close(self) -> None:
        pass


class Training:
    """The objects of one start, and a trail: a line after each batch, at each lap's end, and at the end."""

    def __init__(self, case: Any, folder: Path, stop: int | None, seed: int) -> None:
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        self.make = partial(self._loaders, case)
        self.loaders = self.make()
        given = {} if LOOPS[case.loop].remakes else self.loaders
        self.window, self.stop = case.window, stop
        self.model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.3), nn.Linear(3, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.9)
        self._trail = open(folder / TRAIL, "a", buffering=1)  # noqa: SIM115
        self.scheduler = scheduler
        if stop is None:
            self.state: Any = Plain(self.loaders, self.optimizer)
        else:
            self.state = RunState.load(
                folder / "run",
                model=self.model,
                optimizer=self.optimizer,
                scheduler=scheduler,
                loader=given.get("loader", given or None),
                sample_seeds=case.loader == "sample-seeds",
                progress=False,
                every=None,
            )

    def _loaders(self, case: Any) -> dict[str, Any]:
        noise = NOISE[case.noise]
        settings = noise.settings()
        if case.workers:
            settings.update(num_workers=case.workers, persistent_workers=case.persists)
        first = LOADERS[case.loader](noise.of_a_sample(), **settings)
        if not LOOPS[case.loop].has_two:
            return {"loader": first}
        workers = {"num_workers": min(case.workers, 1), "persistent_workers": case.persists}
        return {"a": first, "b": on(Images(silence, 10), shuffle=True, **workers)}

    def train(self, *batches: torch.Tensor) -> None:
        self.learn(*batches)
        self.note("batch", *batches)

    def learn(self, *batches: torch.Tensor) -> None:
        """Train with noise of all generators; a step comes after a window of batches."""
        rows = torch.cat([batch.reshape(-1, 4) for batch in batches]).float()
        self.model(rows * (random.random() + float(np.random.rand()))).square().mean().backward()
        learned = self.state.vars["learned"] = self.state.vars.get("learned", 0) + 1
        if learned % self.window == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()

    def validate(self, batch: torch.Tensor) -> None:
        self.model.eval()
        with torch.no_grad():
            result = self.model(batch) + random.random()
        # What follows a save in a body is not in the checkpoint
        self.model.train()
        self.note("validation", batch, result)

    def begin(self, epoch: int) -> None:
        for loader in self.loaders.values():
            if set_epoch := getattr(getattr(loader, "sampler", None), "set_epoch", None):
                set_epoch(epoch)

    def note(self, kind: str, *seen: torch.Tensor) -> None:
        """Write down all there is, and save if it is the end of a lap, or where the training is killed."""
        number = self.state.vars["events"] = self.state.vars.get("events", 0) + 1
        self._write(kind, number, seen)
        if number == self.stop:
            self.state.save().wait()
        elif kind == "end":
            self.state.save()
        if self.stop in (number, -number):
            os.kill(os.getpid(), signal.SIGKILL)

    def finish(self) -> None:
        self.state.close()
        self._write("the end", None, [next_numbers(one) for one in self.loaders.values()])
        self._trail.close()

    def _write(self, kind: str, number: int | None, seen: Iterable[torch.Tensor]) -> None:
        momenta = [one for moments in self.optimizer.state.values() for one in moments.values()]
        gradients = [one.grad for one in self.model.parameters() if one.grad is not None]
        line = {
            "what": kind,
            "number": number,
            "batch": digest(*seen),
            "Python's generator": digest(random.getstate()),
            "NumPy's generator": digest(np.random.get_state()[1].tolist(), np.random.get_state()[2:]),
            "torch's generator": digest(torch.get_rng_state()),
            "weights": digest(*self.model.state_dict().values()),
            "optimizer": digest(*momenta, self.scheduler.last_epoch),
            "gradients": digest(*gradients),
        }
        print(json.dumps(line), file=self._trail)


def next_numbers(loader: Any) -> list[Any]:
    """Return what a loader's generators, its sampler's and its dataset's give next in this process."""
    if not isinstance(loader, DataLoader):
        return []
    seed = torch.rand((), generator=loader.generator)
    if isinstance(loader.dataset, IterableDataset):
        return [seed, *itertools.islice(loader.dataset, 5)]
    return [seed, [*(loader.batch_sampler or loader.sampler)], loader.dataset[0]]


def start(case: Any, folder: Path, stop: int | None, seed: int) -> None:
    """Be one start of a training: None is one without the library, 0 one that runs to its end.

    It is killed after the event of that number, and has saved there unless the number is negative.
    """
    training = Training(case, folder, stop, seed)
    LOOPS[case.loop].run(training.state, training)
    training.finish()


# The loops.


def draw() -> torch.Tensor:
    return torch.rand(()) + random.random() + float(np.random.rand())


def again(state: Any, *name: str) -> Iterator[Any]:
    while True:
        yield from state.batches(*name)


def epochs(state: Any, training: Training) -> None:
    for epoch in state.epochs(EPOCHS):
        training.begin(epoch)
        for batch in state.batches():
            training.train(batch)
        training.note("end")


def remakes(state: Any, training: Training) -> None:
    for _ in state.epochs(EPOCHS):
        for batch in state.batches(*training.make().values()):
            training.train(batch)
        training.note("end")


def steps(state: Any, training: Training) -> None:
    batches = again(state)
    for step in state.steps(STEPS // training.window):
        window = [next(batches) for _ in range(training.window)]
        for batch in window:
            training.learn(batch)
        training.note("end" if step % 3 == 2 else "batch", *window)


def steps_in_epochs(state: Any, training: Training) -> None:
    batches = again(state)
    for epoch in state.epochs(3):
        shift = draw()
        for _ in state.steps((epoch + 1) * STEPS // training.window // 3):
            window = [next(batches) + shift for _ in range(training.window)]
            for batch in window:
                training.learn(batch)
            training.note("batch", *window)
        training.note("end")


def bare(state: Any, training: Training) -> None:
    for batch in state.batches():
        training.train(batch)


def breaks(state: Any, training: Training) -> None:
    for _ in state.epochs(EPOCHS):
        for batch in state.batches():
            if state.batch == 3:
                break
            training.train(batch)
        training.note("end")


def enumerates(state: Any, training: Training) -> None:
    for _ in state.epochs(EPOCHS):
        for number, batch in state.enumerate():
            training.train(batch + number)
        training.note("end")


def with_a_bar(state: Any, training: Training) -> None:
    for _ in state.epochs(EPOCHS):
        for batch in tqdm(state.batches(), disable=None):
            training.train(batch)
        training.note("end")


def on_a_device(state: Any, training: Training) -> None:
    for _ in state.epochs(EPOCHS):
        for batch in state.batches(device="cpu"):
            training.train(batch)
        training.note("end")


def by_hand(state: Any, training: Training) -> None:
    for _ in state.epochs(EPOCHS):
        batches = iter(state.batches())
        while (batch := next(batches, None)) is not None:
            training.train(batch)
        training.note("end")


def draws_ahead(batches: Iterator[Any]) -> Iterator[Any]:
    return one_ahead(batch + draw() for batch in batches)


def one_ahead(batches: Iterator[Any]) -> Iterator[Any]:
    following = next(batches, None)
    while (batch := following) is not None:
        following = next(batches, None)
        yield batch


def three_ahead(batches: Iterator[Any]) -> Iterator[Any]:
    return one_ahead(one_ahead(one_ahead(batches)))


def through(ahead: Any) -> Callable[[Any, Training], None]:
    def loop(state: Any, training: Training) -> None:
        for _ in state.epochs(EPOCHS):
            for batch in state.batches(through=ahead):
                training.train(batch)
            training.note("end")

    return loop


def first_lines(state: Any, training: Training) -> None:
    for _ in state.epochs(EPOCHS):
        shift = draw()
        for batch in state.batches():
            training.train(batch + shift)
        training.note("end")


def saves_first(state: Any, training: Training) -> None:
    begun = state.vars.setdefault("begun", [])
    for epoch in state.epochs(EPOCHS):
        shift = draw()
        has_batches = epoch < EPOCHS - 1
        if has_batches and epoch not in begun:
            begun.append(epoch)
            training.note("begin")
        for batch in state.batches() if has_batches else ():
            training.train(batch + shift)
        training.note("end")


def last_lines(state: Any, training: Training) -> None:
    shift = draw()
    for _ in state.epochs(EPOCHS):
        for batch in state.batches():
            training.train(batch + shift)
        draw()
        training.note("end")


def two_phases(state: Any, training: Training) -> None:
    for total in (1, EPOCHS):
        for _ in state.epochs(total):
            for batch in state.batches():
                training.train(batch * total)
            training.note("end")


def validates(state: Any, training: Training) -> None:
    for _ in state.epochs(EPOCHS):
        for batch in state.batches("a"):
            training.train(batch)
        for batch in state.batches("b"):
            training.validate(batch)
        training.note("end")


def zips(state: Any, training: Training) -> None:
    for _ in state.epochs(EPOCHS):
        for batch, other in zip(state.batches("a"), state.batches("b"), strict=False):
            training.train(batch, other)
        training.note("end")


def beside(state: Any, training: Training) -> None:
    others = again(state, "b")
    for _ in state.epochs(EPOCHS):
        for batch in state.batches("a"):
            training.train(batch, next(others))
        training.note("end")


def kept(state: Any, training: Training) -> None:
    others = iter(state.batches("b"))
    for _ in state.epochs(EPOCHS):
        for batch in state.batches("a"):
            if (other := next(others, None)) is None:
                others = iter(state.batches("b"))
                other = next(others)
            training.train(batch, other)
        training.note("end")


def nested(state: Any, training: Training) -> None:
    for batch in state.batches("a"):
        training.train(batch, *state.batches("b"))


class Loop(NamedTuple):
    """A loop, over the batches of one loader or of two, or of one that is made again for each epoch."""

    run: Callable[[Any, Training], None]
    has_two: bool = False
    remakes: bool = False


LOOPS = {
    "epochs": Loop(epochs),
    "steps": Loop(steps),
    "steps-in-epochs": Loop(steps_in_epochs),
    "bare": Loop(bare),
    "break": Loop(breaks),
    "remade": Loop(remakes, remakes=True),
    "enumerate": Loop(enumerates),
    "tqdm": Loop(with_a_bar),
    "device": Loop(on_a_device),
    "by-hand": Loop(by_hand),
    "draws-ahead": Loop(through(draws_ahead)),
    "three-ahead": Loop(through(three_ahead)),
    "thread": Loop(through(Background)),
    "first-lines": Loop(first_lines),
    "saves-first": Loop(saves_first),
    "last-lines": Loop(last_lines),
    "two-phases": Loop(two_phases),
    "validation": Loop(validates, has_two=True),
    "zip": Loop(zips, has_two=True),
    "beside": Loop(beside, has_two=True),
    "kept": Loop(kept, has_two=True),
    "nested": Loop(nested, has_two=True),
}
