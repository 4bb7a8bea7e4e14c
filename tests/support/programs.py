"""Random training scripts, and what becomes of each when it is stopped and started again.

`write(seed)` renders a script. `examine(program)` runs it once without a stop. Then it stops it at its ticks
by a save, a signal or a kill, starts it again and compares. A *tick* is a call `t(x)` in the script: it
digests the batch, the weights, the optimizers and the global random generators.

    python tests/support/programs.py --seeds 0:300
    python tests/support/programs.py --show 17
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import linecache
import os
import pickle
import random
import re
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partialmethod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from resumable import ResumableError, errors
from resumable.errors import ResumableWarning

Kind = Literal["save", "signal", "kill"]
KINDS: tuple[Kind, ...] = ("save", "signal", "kill")
Record = tuple[str, str]
"""A tick: the digest of what is trained, and the digest of the random generators."""
OUTCOMES = ("exact", "warned", "refused", "misled", "silent", "crashed")
"""From the best to the worst; a program has the worst of all its stops."""
BAD = ("misled", "silent", "crashed")
"""Those that a script must not have: "misled" is one that was told of a cause that it does not have."""


# ------------------------------------------------------------------------------------------- writing a script


class Program(NamedTuple):
    """A script that trains something, and how it came about."""

    seed: int
    shape: str
    traits: tuple[str, ...]
    source: str


IMPORTS = """\
import copy
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from resumable import Preempt, Preempted, RunState


class Hiccup(Exception):
    pass

"""


class Script:
    """The text of a script while it is being written."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.traits: list[str] = []
        self.setup: list[str] = []
        self.body: list[str] = []
        self.depth = 1
        self.given: dict[str, str] = {}
        """The arguments of `RunState.load`."""
        self.extra: dict[str, str] = {}
        self.noise = "torch.randn_like({})"
        self.watched: dict[str, str] = {"model": "model"}
        """What each tick digests, beside the batch."""
        self.batch_size = dice.choice([2, 3, 4])
        self.epochs = dice.choice([2, 2, 3])
        self.steps = dice.randint(5, 8)
        self.per_step: list[str] = []
        """What a body does after its update."""
        self.per_epoch: list[str] = []
        """What the epoch's body does after its loops."""
        self.top: list[str] = []
        """What the epoch's body does before its loops."""
        self.noisy = False
        self.zero = ("optimizer.zero_grad()", False)
        """How gradients are zeroed, and whether that is after the step."""

    def chance(self, share: float, trait: str = "") -> bool:
        """Roll the dice; note the trait if they say yes."""
        is_so = self.dice.random() < share
        if is_so and trait:
            self.traits.append(trait)
        return is_so

    def choose(self, trait: str, *choices: Any) -> Any:
        """Choose one, and note which."""
        chosen = self.dice.choice(choices)
        self.traits.append(f"{trait} {chosen}" if trait else str(chosen))
        return chosen

    def add(self, *lines: str) -> None:
        """Add lines to the loop."""
        for line in lines:
            self.body += ["    " * self.depth + one for one in line.split("\n")]

    @contextlib.contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Add a compound statement; what is added inside is its body."""
        self.add(head)
        self.depth += 1
        before = len(self.body)
        yield
        if len(self.body) == before:
            self.add("pass")
        self.depth -= 1

    def render(self, seed: int) -> str:
        """Return the whole script."""
        seeds = ["torch.manual_seed(1)", "np.random.seed(1)", "random.seed(1)"]
        if "unseeded" in self.traits:
            seeds = []
        if self.extra:
            parts = ", ".join(f'"{name}": {value}' for name, value in self.extra.items())
            self.given["extra"] = "{" + parts + "}"
        given = "".join(f"    {name}={value},\n" for name, value in self.given.items())
        load = f"with RunState.load(\n    run_dir,\n{given}    every=every,\n    progress=False,\n) as state:"
        watched = ", ".join(f"{name}={value}" for name, value in self.watched.items())
        lines = [*seeds, *self.setup, load, f"    t.watch(state, {watched})", *self.body]
        return IMPORTS + "\n" + "\n".join(lines) + "\n"


MODELS = {
    "linear": "nn.Linear(4, 4)",
    "dropout": "nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 4))",
    "norm": "nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=True), nn.Linear(4, 4))",
}
OPTIMIZERS = {
    "sgd": "torch.optim.SGD({}, lr=0.05, momentum=0.9)",
    "plain": "torch.optim.SGD({}, lr=0.05)",
    "adam": "torch.optim.Adam({}, lr=0.01)",
    "adamw": "torch.optim.AdamW({}, lr=0.01, amsgrad=True)",
    "fused": "torch.optim.Adam({}, lr=0.01, fused=True)",
}
NOISY = """\
class Noisy(Dataset):
    def __len__(self):
        return {n}

    def __getitem__(self, index):
        noise = torch.randn(4) + float(np.random.standard_normal()) + random.random()
        return index / 10 + 0.1 * noise
"""
STREAM = """\
class Stream(IterableDataset):
    def __iter__(self):
        for index in range({n}):
            yield torch.full((4,), index / 10){noise}
"""
SHUFFLED = """\
class Shuffled(IterableDataset):
    def __iter__(self):
        buffer = []
        for index in range({n}):
            buffer.append(torch.full((4,), index / 10))
            if len(buffer) == 4:
                yield buffer.pop(random.randrange(4))
        random.shuffle(buffer)
        yield from buffer
"""
STATEFUL = """\
class Stateful(IterableDataset):
    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < {n}:
            self.at += 1
            yield torch.full((4,), self.at / 10)
        self.at = 0

    def state_dict(self):
        return {{"at": self.at}}

    def load_state_dict(self, state):
        self.at = state["at"]
"""


def add_model(s: Script, *, optimizer: bool = True) -> None:
    """Make a model, and an optimizer for it."""
    kind = s.choose("", *MODELS)
    s.setup.append(f"model = {MODELS[kind]}")
    s.given["model"] = "model"
    if optimizer:
        s.setup.append("optimizer = " + OPTIMIZERS[s.choose("", *OPTIMIZERS)].format("model.parameters()"))
        s.given["optimizer"] = "optimizer"
        s.watched["optimizer"] = "optimizer"


def loader(s: Script, name: str, *, kind: str | None = None, batches: int | None = None) -> str:
    """Return the expression of a loader; what it needs is in the setup."""
    kind = kind or s.dice.choice(
        ["tensor"] * 7 + ["noisy"] * 2 + ["replacement", "own", "stream", "stateful", "shuffled"]
    )
    size = s.batch_size
    whole = (batches or s.dice.choice([2, 3, 3, 4])) * size
    # A batch of one sample has no variance to be normalized with
    n = whole - (s.dice.choice([0, 0, 1]) if size > 2 else 0)
    s.traits.append(f"{kind} data")
    if kind in ("tensor", "own", "replacement"):
        s.setup.append(f"{name} = torch.randn({n}, 4, generator=torch.Generator().manual_seed(7))")
        shuffle = "shuffle=True" if s.dice.random() < 0.8 else "shuffle=False"
        if kind == "own":
            shuffle = "shuffle=True, generator=torch.Generator().manual_seed(5)"
        if kind == "replacement":
            shuffle = f"sampler=RandomSampler({name}, replacement=True, num_samples={n})"
        return f"DataLoader({name}, batch_size={size}, {shuffle}{workers(s)})"
    text, made = {
        "noisy": (NOISY, "Noisy()"),
        "stream": (STREAM, "Stream()"),
        "stateful": (STATEFUL, "Stateful()"),
        "shuffled": (SHUFFLED, "Shuffled()"),
    }[kind]
    noise = " + torch.randn(4)" if s.dice.random() < 0.5 else ""
    made_class = text.format(n=n, noise=noise)
    made_class = made_class.replace(made.removesuffix("()"), f"{made.removesuffix('()')}_{name}")
    made = f"{made.removesuffix('()')}_{name}()"
    s.setup += ["", made_class]
    if kind == "noisy" and s.chance(0.1, "sample seeds"):
        s.given["sample_seeds"] = "True"
    shuffle = ", shuffle=True" if kind == "noisy" and s.dice.random() < 0.8 else ""
    return f"DataLoader({made}, batch_size={size}{shuffle}{workers(s)})"


def workers(s: Script) -> str:
    """Return the arguments for workers; few loaders have them, since they are slow."""
    if not s.chance(0.015, "workers"):
        return ""
    return ", num_workers=1" + s.dice.choice(["", ", persistent_workers=True"])


def add_loader(s: Script, **options: Any) -> None:
    """Give the training one loader."""
    made = loader(s, "data", **options)
    s.setup.append(f"loader = {made}")
    s.given["loader"] = "loader"


def add_loaders(s: Script, *names: str, **options: Any) -> None:
    """Give the training several loaders."""
    for name in names:
        s.setup.append(f"loader_{name} = {loader(s, f'data_{name}', **options)}")
    s.given["loader"] = "{" + ", ".join(f'"{name}": loader_{name}' for name in names) + "}"


def add_extras(s: Script, *, epochs: bool = True) -> None:
    """Add, at random, what ordinary trainings have beside a model and an optimizer."""
    choose_zero(s)
    s.noisy = s.chance(0.3, "noise")
    if s.noisy and s.chance(0.25, "own generator"):
        s.setup.append("generator = torch.Generator().manual_seed(3)")
        s.extra["generator"] = "generator"
        s.noise = "torch.randn({}.shape, generator=generator)"
    s.chance(0.1, "unseeded")
    if s.chance(0.35):
        add_scheduler(s, epochs=epochs)
    if s.chance(0.12, "ema"):
        s.setup.append("average = torch.optim.swa_utils.AveragedModel(model)")
        s.extra["average"] = "average"
        s.watched["average"] = "average"
        s.per_step.append("average.update_parameters(model)")
    if s.chance(0.15, "vars"):
        s.per_step.append('state.vars["total"] = state.vars.get("total", 0.0) + loss.item()')
        s.watched["vars"] = "state.vars"
    if s.chance(0.06, "history in vars"):
        s.per_step.append('state.vars.setdefault("losses", []).append(loss.item())')
        s.watched["vars"] = "state.vars"
    if epochs:
        add_epoch_extras(s)


def choose_zero(s: Script) -> None:
    """Choose how all loops of the script zero the gradients."""
    zero = s.dice.choice(["optimizer.zero_grad()"] * 4 + ["optimizer.zero_grad(set_to_none=False)"])
    if s.chance(0.03, "zero forgotten"):
        zero = f"if state.step % 2 == 0:\n    {zero}"
    elif s.chance(0.02, "gradients decay"):
        zero = "for p in model.parameters():\n    if p.grad is not None:\n        p.grad.mul_(0.5)"
    s.zero = zero, s.chance(0.2, "zero after")


def add_scheduler(s: Script, *, epochs: bool) -> None:
    """Add a scheduler that is stepped in each body or after each epoch."""
    kind = s.choose("", "cosine", "onecycle", "plateau", "step")
    made = {
        "cosine": "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7)",
        "onecycle": "torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 100, cycle_momentum=False)",
        "plateau": "torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)",
        "step": "torch.optim.lr_scheduler.StepLR(optimizer, 2)",
    }[kind]
    s.setup.append(f"scheduler = {made}")
    s.given["scheduler"] = "scheduler"
    s.watched["scheduler"] = "scheduler"
    if not epochs or s.dice.random() < 0.5:
        s.per_step.append(f"scheduler.step({'loss.item()' if kind == 'plateau' else ''})")
    elif kind == "plateau":
        s.top.append('total = state.vars.setdefault("sum", [])')
        s.per_step.append('state.vars["sum"].append(loss.item())')
        s.per_epoch += ['scheduler.step(sum(state.vars["sum"]))', 'state.vars["sum"] = []']
    else:
        s.per_epoch.append("scheduler.step()")


def add_epoch_extras(s: Script) -> None:
    """Add what a training does before and after the loop over an epoch's batches."""
    if s.chance(0.15, "draw at top"):
        s.top.append(s.dice.choice(["factor = random.random()", "factor = float(torch.rand(()))"]))
        s.noisy_factor = True  # type: ignore[attr-defined]
    if s.chance(0.15, "means"):
        s.per_step.append("state.mean(loss=loss, weight=len(x))")
        s.per_epoch.append(
            s.dice.choice(["state.save(**state.means)", 'state.vars["mean"] = dict(state.means)'])
        )
        s.watched["vars"] = "state.vars"
    if s.chance(0.25, "validation"):
        add_validation(s)
    if s.chance(0.15, "draw after"):
        s.per_epoch.append(s.dice.choice(["torch.randn(3)", "random.random()", "np.random.rand(2)"]))
    if s.chance(0.4, "save after"):
        s.per_epoch.append(s.dice.choice(["state.save()", "state.save(loss=0.5)"]))


def add_validation(s: Script) -> None:
    """Evaluate after each epoch, with a loader that is not given to RunState."""
    kind = s.dice.choices(["plain", "workers", "persistent", "tensor"], [6, 0.3, 0.3, 4])[0]
    s.traits.append(f"validation {kind}")
    s.setup.append("held_out = torch.randn(6, 4, generator=torch.Generator().manual_seed(8))")
    more = {"workers": ", num_workers=1", "persistent": ", num_workers=1, persistent_workers=True"}.get(
        kind, ""
    )
    source = "held_out.split(3)" if kind == "tensor" else "validation"
    if kind != "tensor":
        s.setup.append(f"validation = DataLoader(held_out, batch_size=3{more})")
    s.per_epoch.append(
        "model.eval()\n"
        "with torch.no_grad():\n"
        f'    state.vars["score"] = sum(model(v).mean().item() for v in {source})\n'
        "model.train()"
    )
    s.watched["vars"] = "state.vars"


def update(s: Script, x: str = "x") -> None:
    """Train on a batch: the usual five lines."""
    if s.noisy:
        s.add(f"{x} = {x} + 0.1 * {s.noise.format(x)}")
    if getattr(s, "noisy_factor", False):
        s.add(f"{x} = {x} * factor")
    zero, is_after = s.zero
    if not is_after:
        s.add(zero)
    s.add(f"loss = (model({x}) - 1).square().mean()", "loss.backward()", "optimizer.step()")
    if is_after:
        s.add(zero)


def train(s: Script, x: str = "x", *, then: str = "") -> None:
    """Train on a batch, do what comes with it, then something else, and tick."""
    update(s, x)
    s.add(*s.per_step, *filter(None, [then]))
    s.add(f"t({x})")


def after_loops(s: Script) -> None:
    """End the epoch's body."""
    s.add(*s.per_epoch)
    if s.dice.random() < 0.7:
        s.add("t()")


@contextlib.contextmanager
def epochs(s: Script, total: int | None = None) -> Iterator[None]:
    """Write a loop over epochs, with what comes before and after its inner loops."""
    with s.block(f"for epoch in state.epochs({total or s.epochs}):"):
        s.add(*s.top)
        yield
        after_loops(s)


# ----------------------------------------------------------------------------------------------------- shapes

Shape = Callable[[Script], None]
SHAPES: dict[str, tuple[float, Shape]] = {}


def shape(weight: float) -> Callable[[Shape], Shape]:
    """Register a shape, by the name of its function."""

    def register(write: Shape) -> Shape:
        SHAPES[write.__name__.replace("_", " ")] = weight, write
        return write

    return register


@shape(24)
def epochs_and_batches(s: Script) -> None:
    add_model(s)
    add_loader(s)
    add_extras(s)
    with epochs(s), s.block("for x in state.batches():"):
        train(s)


@shape(6)
def breaks_and_continues(s: Script) -> None:
    add_model(s)
    add_loader(s, batches=4)
    add_extras(s)
    with epochs(s), s.block("for x in state.batches():"):
        way = s.choose("", "break first", "break last", "continue", "continue last")
        if way == "break first":
            with s.block(f"if state.batch == {s.dice.choice([1, 2])}:"):
                s.add("break")
        if way == "continue":
            with s.block(f"if state.batch == {s.dice.choice([0, 1, 3])}:"):
                s.add("continue")
        train(s)
        if way == "continue last":
            with s.block(f"if state.batch == {s.dice.choice([0, 1, 3])}:"):
                s.add("continue")
            s.add("loss = None")
        if way == "break last":
            with s.block(f"if state.batch == {s.dice.choice([1, 2])}:"):
                s.add("break")


@shape(6)
def accumulation(s: Script) -> None:
    add_model(s)
    add_loader(s, batches=s.dice.choice([3, 4]))
    add_extras(s)
    s.per_step = [line for line in s.per_step if not line.startswith("scheduler")]
    window = s.dice.choice([2, 2, 3])
    is_dropped = s.chance(0.3, "rest dropped")
    with epochs(s), s.block("for x in state.batches():"):
        s.add("loss = (model(x) - 1).square().mean()", f"(loss / {window}).backward()")
        last = "" if is_dropped else " or state.batch + 1 == len(loader)"
        if "stateful data" in s.traits or "stream data" in s.traits or "shuffled data" in s.traits:
            last = ""
        with s.block(f"if (state.batch + 1) % {window} == 0{last}:"):
            s.add("optimizer.step()", "optimizer.zero_grad()")
        s.add(*s.per_step, "t(x)")


@shape(4)
def accumulation_across_epochs(s: Script) -> None:
    add_model(s)
    add_loader(s, batches=s.dice.choice([2, 3]))
    add_extras(s)
    s.per_step = [line for line in s.per_step if not line.startswith("scheduler")]
    with epochs(s), s.block("for x in state.batches():"):
        if s.chance(0.3, "break in window"):
            with s.block("if state.batch == 2:"):
                s.add("break")
        s.add('n = state.vars["n"] = state.vars.get("n", 0) + 1')
        s.add("loss = (model(x) - 1).square().mean()", "loss.backward()")
        with s.block(f"if n % {s.dice.choice([2, 3])} == 0:"):
            s.add("optimizer.step()", "optimizer.zero_grad()")
        s.add(*s.per_step, "t(x)")


@shape(3)
def accumulation_over_steps(s: Script) -> None:
    add_model(s)
    where = s.choose("", "drawn", "batches", "epochs without loader", "micro")
    if where in ("batches", "micro"):
        add_loader(s)
    add_extras(s, epochs=where == "epochs without loader")
    s.per_step = [line for line in s.per_step if not line.startswith("scheduler")]

    def count(x: str) -> None:
        s.add('n = state.vars["n"] = state.vars.get("n", 0) + 1')
        s.add(f"loss = (model({x}) - 1).square().mean()", "loss.backward()")
        with s.block(f"if n % {s.dice.choice([2, 3])} == 0:"):
            s.add("optimizer.step()", "optimizer.zero_grad()")

    if where == "epochs without loader":
        with epochs(s), s.block("for _ in range(2):"):
            s.add("x = torch.randn(3, 4)")
            count("x")
        return
    if where == "micro":
        with epochs(s), s.block("for x in state.batches():"):
            with s.block("for part in (x, x + 1):"):
                count("part")
            s.add(*s.per_step, "t(x)")
        return
    if where == "batches":
        s.add("iterator = iter(state.batches())")
    with s.block(f"for step in state.steps({s.steps}):"):
        next_batch(s) if where == "batches" else s.add("x = torch.randn(3, 4)")
        count("x")
        s.add(*s.per_step, "t(x)")


def next_batch(s: Script) -> None:
    """Ask for the next batch, of the next epoch if this one is over."""
    next_of(s, "x", "iterator", "")


def next_of(s: Script, batch: str, iterator: str, name: str) -> None:
    """Ask an iterator for the next batch of a loader, of the next pass if this one is over."""
    s.add(
        f"try:\n    {batch} = next({iterator})\n"
        f"except StopIteration:\n    {iterator} = iter(state.batches({name}))\n    {batch} = next({iterator})"
    )


@shape(8)
def steps_with_own_data(s: Script) -> None:
    add_model(s)
    add_extras(s, epochs=False)
    kind = s.choose("", "drawn", "by number", "permutation")
    s.setup.append("table = torch.randn(9, 4, generator=torch.Generator().manual_seed(7))")
    with s.block(f"for step in state.steps({s.steps}):"):
        s.add(
            {
                "drawn": "x = torch.randn(3, 4)",
                "by number": "x = table[torch.arange(step, step + 3) % 9]",
                "permutation": "x = table[torch.randint(9, (3,))]",
            }[kind]
        )
        train(s)
        if s.chance(0.3, "save in body"):
            with s.block("if state.step % 2 == 0:"):
                s.add("state.save()")


@shape(6)
def steps_over_batches(s: Script) -> None:
    add_model(s)
    add_loader(s)
    add_extras(s, epochs=False)
    way = s.choose("", "iterator", "for", "endless", "cycle")
    if way == "cycle":
        s.add("batches = __import__('itertools').cycle(state.batches())")
        with s.block(f"for step in state.steps({s.steps}):"):
            s.add("x = next(batches)")
            train(s)
    elif way == "iterator":
        s.add("iterator = iter(state.batches())")
        with s.block(f"for step in state.steps({s.steps}):"):
            next_batch(s)
            train(s)
    elif way == "endless":
        with s.block("def endless():"), s.block("while True:"):
            s.add("yield from state.batches()")
        with s.block(f"for step, x in zip(state.steps({s.steps}), endless()):"):
            train(s)
    else:
        with s.block(f"while state.step < {s.steps}:"), s.block("for x in state.batches():"):
            train(s)
            with s.block(f"if state.step >= {s.steps}:"):
                s.add("break")


@shape(4)
def steps_in_epochs(s: Script) -> None:
    add_model(s)
    add_extras(s)
    if s.chance(0.3, "order at top"):
        s.top.append("order = torch.randperm(9)")
        s.setup.append("table = torch.randn(9, 4, generator=torch.Generator().manual_seed(7))")
    x = "table[order[:3]]" if "order at top" in s.traits else "torch.randn(3, 4)"
    with epochs(s), s.block("for step in state.steps(3 * (epoch + 1)):"):
        s.add(f"x = {x}")
        train(s)


@shape(2)
def epochs_without_loader(s: Script) -> None:
    add_model(s)
    add_extras(s)
    s.setup.append("table = torch.randn(9, 4, generator=torch.Generator().manual_seed(7))")
    with epochs(s), s.block("for x in table[torch.randperm(9)].split(3):"):
        update(s)
        s.add(*s.per_step)


@shape(5)
def loaders_one_after_the_other(s: Script) -> None:
    add_model(s)
    add_loaders(s, "a", "b", kind=s.dice.choice([None, "tensor"]))
    add_extras(s)
    with epochs(s):
        with s.block('for x in state.batches("a"):'):
            train(s)
        if s.chance(0.3, "draw between"):
            s.add("torch.randn(2)")
        if s.chance(0.15, "save between"):
            s.add("state.save()")
        with s.block('for x in state.batches("b"):'):
            train(s)


@shape(4)
def loaders_side_by_side(s: Script) -> None:
    add_model(s)
    add_loaders(s, "a", "b", kind=s.dice.choice([None, "tensor"]), batches=3)
    add_extras(s)
    way = s.choose("", "zip", "next", "nested")
    with epochs(s):
        if way == "zip":
            with s.block('for x, y in zip(state.batches("a"), state.batches("b")):'):
                s.add("x = torch.cat([x, y])")
                train(s)
        elif way == "next":
            s.add('other = iter(state.batches("b"))')
            with s.block('for x in state.batches("a"):'):
                s.add("y = next(other, x)", "x = torch.cat([x, y])")
                train(s)
        else:
            with s.block('for x in state.batches("a"):'):
                update(s)
                s.add(*s.per_step)
                with s.block("if state.batch == 1:"), s.block('for y in state.batches("b"):'):
                    train(s, "y")
                s.add("t(x)")


@shape(3)
def a_loader_now_and_then(s: Script) -> None:
    add_model(s)
    add_loaders(s, "a", "b", kind=s.dice.choice([None, "tensor"]))
    add_extras(s)
    way = s.choose("", "now and then", "cycled", "cycled directly")
    again = "iter(loader_b)" if way == "cycled directly" else 'iter(state.batches("b"))'
    with epochs(s):
        s.add(f"other = {again}")
        with s.block('for x in state.batches("a"):'):
            if way == "now and then":
                s.add('state.vars["k"] = state.vars.get("k", 0) + 1')
                with s.block('if state.vars["k"] % 2 == 0:'):
                    s.add("x = torch.cat([x, next(other, x)])")
            else:
                s.add(
                    "try:\n    y = next(other)\n"
                    f"except StopIteration:\n    other = {again}\n    y = next(other)"
                )
                s.add("x = torch.cat([x, y])")
            train(s)
        if way == "now and then":
            s.add('state.vars["k"] = 0')


@shape(4)
def a_loader_that_goes_on(s: Script) -> None:
    way = s.choose("", "iterator", "generator", "both in steps")
    add_model(s)
    add_loaders(s, "a", "b", kind=s.dice.choice([None, "tensor"]))
    add_extras(s, epochs=way != "both in steps")
    if way == "generator":
        with s.block("def endless():"), s.block("while True:"):
            s.add('yield from state.batches("b")')
        s.add("other = endless()")
    else:
        s.add('other = iter(state.batches("b"))')

    def body() -> None:
        s.add("y = next(other)") if way == "generator" else next_of(s, "y", "other", '"b"')
        s.add("x = torch.cat([x, y])")
        train(s)

    if way == "both in steps":
        s.add('iterator = iter(state.batches("a"))')
        with s.block(f"for step in state.steps({s.steps}):"):
            next_of(s, "x", "iterator", '"a"')
            body()
    else:
        with epochs(s), s.block('for x in state.batches("a"):'):
            body()


@shape(4)
def gan(s: Script) -> None:
    s.setup += [
        "model = nn.ModuleDict({'d': nn.Linear(4, 1), 'g': nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))})",
        "optimizer_d = torch.optim.SGD(model['d'].parameters(), lr=0.05)",
        "optimizer_g = torch.optim.Adam(model['g'].parameters(), lr=0.05)",
    ]
    names = s.dice.choice([("d", "g"), ("g", "d")])
    s.given["model"] = "model"
    s.given["optimizer"] = "{" + ", ".join(f'"{name}": optimizer_{name}' for name in names) + "}"
    s.watched |= {"d": "optimizer_d", "g": "optimizer_g"}
    rate = s.choose("g at every", 1, 2, 3)
    is_kept = rate > 1 and s.chance(0.4, "g accumulates")
    data = s.choose("", "batches", "drawn")

    def body(x: str) -> None:
        s.add(f"noise = torch.randn_like({x})")
        s.add("optimizer_d.zero_grad()")
        s.add(f"(model['d']({x}).mean() - model['d'](model['g'](noise).detach()).mean()).backward()")
        s.add("optimizer_d.step()")
        when = "state.batch" if data == "batches" else "step"
        if is_kept:
            s.add("model['d'](model['g'](noise)).mean().backward()")
            with s.block(f"if {when} % {rate} == {rate - 1}:"):
                s.add("optimizer_g.step()", "optimizer_g.zero_grad()")
        else:
            with s.block(f"if {when} % {rate} == {rate - 1}:" if rate > 1 else "if True:"):
                s.add("optimizer_g.zero_grad()", "model['d'](model['g'](noise)).mean().backward()")
                s.add("optimizer_g.step()")
        s.add(f"t({x})")

    if data == "batches":
        add_loader(s)
        with s.block(f"for epoch in state.epochs({s.epochs}):"), s.block("for x in state.batches():"):
            body("x")
    else:
        with s.block(f"for step in state.steps({s.steps}):"):
            s.add("x = torch.randn(3, 4)")
            body("x")


@shape(4)
def two_phases(s: Script) -> None:
    add_model(s)
    way = s.choose("", "epochs epochs", "steps epochs", "a loader each", "epochs steps")
    if way == "a loader each":
        add_loaders(s, "a", "b")
    else:
        add_loader(s)
    add_extras(s)
    first, second = ('"a"', '"b"') if way == "a loader each" else ("", "")
    if way == "steps epochs":
        with s.block("for step in state.steps(3):"):
            s.add("x = torch.randn(3, 4)", "factor = 1.0" if getattr(s, "noisy_factor", False) else "pass")
            train(s)
    else:
        with epochs(s, 1 if s.dice.random() < 0.5 else 2), s.block(f"for x in state.batches({first}):"):
            train(s)
    if s.chance(0.3, "draw between phases"):
        s.add("torch.randn(2)")
    if way == "epochs steps":
        with s.block(
            "for step in state.steps(state.step + 3 if not state.vars.get('end') else state.vars['end']):"
        ):
            s.add('state.vars.setdefault("end", step + 3)')
            s.add("x = torch.randn(3, 4)", "factor = 1.0" if getattr(s, "noisy_factor", False) else "pass")
            train(s)
        return
    with epochs(s, 3), s.block(f"for x in state.batches({second}):"):
        train(s)


@shape(4)
def batches_without_epochs(s: Script) -> None:
    add_model(s)
    add_loader(s)
    add_extras(s)
    way = s.choose("", "range", "while", "one pass")
    head = {
        "range": f"for epoch in range(state.epoch, {s.epochs}):",
        "while": f"while state.epoch < {s.epochs}:",
        "one pass": "if True:",
    }[way]
    with s.block(head):
        s.add(*s.top)
        with s.block("for x in state.batches():"):
            train(s)
        if way != "one pass":
            s.add(*s.per_epoch)


@shape(4)
def loops_by_hand(s: Script) -> None:
    add_model(s)
    add_extras(s, epochs=False)
    way = s.choose("", "range", "while", "vars", "window")
    head = {
        "range": f"for step in range(state.step, {s.steps}):",
        "while": f"while state.step < {s.steps}:",
        "vars": f'for step in range(state.vars.get("i", 0), {s.steps}):',
        "window": f'for step in range(state.vars.get("i", 0), {s.steps}):',
    }[way]
    with s.block(head):
        s.add("x = torch.randn(3, 4)")
        if way == "window":
            s.add("loss = (model(x) - 1).square().mean()", "loss.backward()")
            with s.block("if step % 3 == 2:"):
                s.add("optimizer.step()", "optimizer.zero_grad()")
            s.add(*[line for line in s.per_step if not line.startswith("scheduler")])
        else:
            update(s)
            s.add(*s.per_step)
        if way in ("vars", "window"):
            s.add('state.vars["i"] = step + 1')
        if s.chance(0.7, "save in body"):
            with s.block("if state.step % 2 == 0:"):
                s.add("state.save()")
        s.add("t(x)")


@shape(3)
def next_by_hand(s: Script) -> None:
    add_model(s)
    add_loader(s)
    add_extras(s)
    is_before = s.chance(0.4, "draw before next")
    is_counted = not is_before and s.chance(0.4, "counted")
    with epochs(s):
        s.add("iterator = iter(state.batches())")
        if is_counted:
            with s.block("for _ in range(2):"):
                s.add("x = next(iterator)")
                train(s)
            return
        with s.block("while True:"):
            if is_before:
                s.add("noise = torch.randn(4)")
            s.add("x = next(iterator, None)")
            with s.block("if x is None:"):
                s.add("break")
            if is_before:
                s.add("x = x + noise")
            train(s)


@shape(3)
def wrapped_batches(s: Script) -> None:
    add_model(s)
    add_loader(s)
    add_extras(s)
    way = s.choose(
        "",
        "enumerate",
        "list",
        "one ahead",
        "islice",
        "tqdm",
        "generator",
        "zip range",
        "through",
        "device",
        "state.enumerate",
    )
    if way == "one ahead":
        s.add(
            "def marked(batches):\n    waiting = next(batches, None)\n    while waiting is not None:\n"
            "        now, waiting = waiting, next(batches, None)\n        yield now, waiting is None"
        )
    if way == "through":
        s.add(
            "def ahead(batches):\n    waiting = next(batches, None)\n    while waiting is not None:\n"
            "        now, waiting = waiting, next(batches, None)\n        yield now"
        )
    if way == "generator":
        s.add("def halved(batches):\n    for batch in batches:\n        yield batch / 2")
    heads = {
        "enumerate": "for i, x in enumerate(state.batches()):",
        "list": "for x in list(state.batches()):",
        "one ahead": "for x, is_last in marked(iter(state.batches())):",
        "islice": "for x in __import__('itertools').islice(state.batches(), 2):",
        "tqdm": "for x in __import__('tqdm').tqdm(state.batches(), disable=True):",
        "generator": "for x in halved(state.batches()):",
        "state.enumerate": "for i, x in state.enumerate():",
        "through": "for x in state.batches(through=ahead):",
        "device": 'for x in state.batches(device="cpu"):',
        "zip range": "for x, i in zip(state.batches(), range(2)):",
    }
    with epochs(s), s.block(heads[way]):
        if "enumerate" in way:
            s.add("x = x + 0.1 * i")
        train(s)


@shape(3)
def exception_in_the_body(s: Script) -> None:
    add_model(s)
    add_loader(s)
    add_extras(s)
    at = s.dice.randrange(3)
    place = s.choose("fails", "before", "between", "after")
    is_window = s.chance(0.3, "window")
    with epochs(s), s.block("for x in state.batches():"):
        with s.block("try:"):
            if place == "before":
                s.add(f'if state.batch == {at}:\n    raise Hiccup("a broken batch")')
            if is_window:
                s.add("loss = (model(x) - 1).square().mean()", "loss.backward()")
            if place == "between":
                s.add(f'if state.batch == {at}:\n    raise Hiccup("a broken batch")')
            if is_window:
                with s.block("if state.batch % 2 == 1:"):
                    s.add("optimizer.step()", "optimizer.zero_grad()")
            else:
                update(s)
            if place == "after":
                s.add(f'if state.batch == {at}:\n    raise Hiccup("a broken batch")')
            s.add("t(x)")
        with s.block("except Hiccup:"):
            s.add(s.dice.choice(["optimizer.zero_grad()", "pass", "continue"]))


FAIL = """\
if not state.vars.get("failed") and {}:
    state.vars["failed"] = True
    raise Hiccup("out of memory, say")"""


@shape(3)
def exception_around_the_loop(s: Script) -> None:
    add_model(s)
    add_loader(s)
    add_extras(s)
    condition = f"(state.epoch, state.batch) == ({s.dice.randrange(2)}, {s.dice.randrange(3)})"
    is_before = s.chance(0.5, "before step")
    is_entered = s.chance(0.5, "entered again")
    with epochs(s), s.block("for attempt in range(2):" if is_entered else "if True:"):
        with s.block("try:"):
            with s.block("for x in state.batches():"):
                if is_before:
                    s.add(FAIL.format(condition))
                train(s)
                if not is_before:
                    s.add(FAIL.format(condition))
            s.add("break" if is_entered else "pass")
        with s.block("except Hiccup:"):
            s.add("pass")


@shape(4)
def exception_around_all_loops(s: Script) -> None:
    add_model(s)
    way = s.choose("", "epochs", "steps", "steps over batches", "two loaders")
    if way == "two loaders":
        add_loaders(s, "a", "b")
    elif way != "steps":
        add_loader(s)
    add_extras(s, epochs=way in ("epochs", "two loaders"))
    is_before = s.chance(0.5, "before step")
    counted = "(state.epoch, state.batch)" if way in ("epochs", "two loaders") else "state.step"
    at = f"({s.dice.randrange(2)}, {s.dice.randrange(3)})" if "," in counted else str(s.dice.randrange(1, 5))
    fail = FAIL.format(f"{counted} == {at}")

    def body() -> None:
        if is_before:
            s.add(fail)
        train(s, then="" if is_before else fail)

    with s.block("while True:"):
        with s.block("try:"):
            if way == "epochs":
                with epochs(s), s.block("for x in state.batches():"):
                    body()
            elif way == "two loaders":
                with epochs(s):
                    with s.block('for x in state.batches("a"):'):
                        train(s)
                    with s.block('for x in state.batches("b"):'):
                        body()
            else:
                if way != "steps":
                    s.add("iterator = iter(state.batches())")
                with s.block(f"for step in state.steps({s.steps}):"):
                    next_batch(s) if way != "steps" else s.add("x = torch.randn(3, 4)")
                    body()
            s.add("break")
        with s.block("except Hiccup:"):
            s.add("pass")


@shape(2)
def preempted_and_entered_again(s: Script) -> None:
    add_model(s)
    way = s.choose("", "epochs", "steps", "two loaders", "steps over batches")
    if way == "two loaders":
        add_loaders(s, "a", "b")
    elif way != "steps":
        add_loader(s)
    add_extras(s, epochs=way in ("epochs", "two loaders"))
    s.given["preempt"] = 'Preempt(on_preempt="raise")'
    is_saved = s.chance(0.3, "saved again")
    with s.block("while True:"):
        with s.block("try:"):
            if way.startswith("steps"):
                if way != "steps":
                    s.add("iterator = iter(state.batches())")
                with s.block(f"for step in state.steps({s.steps}):"):
                    next_batch(s) if way != "steps" else s.add("x = torch.randn(3, 4)")
                    train(s)
            else:
                with epochs(s):
                    for name in ('"a"', '"b"') if way == "two loaders" else ("",):
                        with s.block(f"for x in state.batches({name}):"):
                            train(s)
            s.add("break")
        with s.block("except Preempted:"):
            s.add("state.save()" if is_saved else "pass")


@shape(4)
def saves_at_odd_places(s: Script) -> None:
    add_model(s)
    add_loader(s)
    add_extras(s)
    s.per_epoch = [line for line in s.per_epoch if "save" not in line]
    way = s.choose("saves", "first", "before step", "then breaks", "at top", "after loops", "then goes on")
    if way == "at top":
        s.top.append("state.save()")
    if way == "after loops":
        s.per_epoch.insert(0, "state.save()")
    with epochs(s), s.block("for x in state.batches():"):
        if way == "first":
            s.add("state.save()")
        if way == "before step":
            s.add("optimizer.zero_grad()", "loss = (model(x) - 1).square().mean()", "loss.backward()")
            s.add("state.save()", "optimizer.step()", *s.per_step, "t(x)")
            return
        train(s)
        if way == "then breaks":
            s.add("state.save()")
            with s.block("if state.batch == 1:"):
                s.add("break")
        if way == "then goes on":
            s.add("state.save()", 'state.vars["late"] = state.vars.get("late", 0) + 1')


@shape(3)
def several_steps_in_a_body(s: Script) -> None:
    s.setup.append("model = nn.Linear(4, 4)")
    s.given["model"] = "model"
    way = s.choose("", "twice", "super", "super and plain", "lbfgs", "closure", "none", "own optimizer")
    made = "torch.optim.Adam(model.parameters(), lr=0.01)"
    if way.startswith("super"):
        s.setup += [
            "",
            "class Clipped(torch.optim.Adam):\n    def step(self, closure=None):\n"
            "        nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
            "        return super().step(closure)\n",
        ]
        made = "Clipped(model.parameters(), lr=0.01)"
        if way == "super and plain":
            s.setup.append("torch.optim.Adam([nn.Parameter(torch.zeros(1))])")
    if way == "lbfgs":
        made = "torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)"
    if way != "none":
        s.setup.append(f"optimizer = {made}")
        s.given["optimizer"] = s.watched["optimizer"] = "optimizer"
    loop = s.choose("", "epochs", "steps")
    if loop == "epochs":
        add_loader(s)
    if s.chance(0.4, "vars"):
        s.per_step.append('state.vars["total"] = state.vars.get("total", 0.0) + float(x.sum())')
        s.watched["vars"] = "state.vars"

    def body() -> None:
        gradients = "optimizer.zero_grad()\nloss = (model(x) - 1).square().mean()\nloss.backward()"
        if way in ("lbfgs", "closure"):
            with s.block("def closure():"):
                s.add(gradients, "return loss")
            s.add("optimizer.step(closure)")
        elif way == "none":
            s.add("model.zero_grad()\nloss = (model(x) - 1).square().mean()\nloss.backward()")
            with s.block("with torch.no_grad():"), s.block("for p in model.parameters():"):
                s.add("p -= 0.1 * p.grad")
        else:
            s.add(gradients, "optimizer.step()")
            if way == "twice":
                s.add(gradients, "optimizer.step()")
        s.add(*s.per_step, "t(x)")

    if loop == "epochs":
        with s.block(f"for epoch in state.epochs({s.epochs}):"), s.block("for x in state.batches():"):
            body()
    else:
        with s.block(f"for step in state.steps({s.steps}):"):
            s.add("x = torch.randn(3, 4)")
            body()


@shape(2)
def scaler(s: Script) -> None:
    add_model(s)
    loop = s.choose("", "epochs", "steps")
    if loop == "epochs":
        add_loader(s)
    s.setup.append('scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)')
    s.given["scaler"] = "scaler"
    s.watched["scaler"] = "scaler"
    is_window = s.chance(0.3, "window")
    is_skipped = s.chance(0.4, "skips")

    def body(when: str) -> None:
        s.add("optimizer.zero_grad()" if not is_window else "pass", "loss = (model(x) - 1).square().mean()")
        if is_skipped:
            s.add(f"if {when} == 1:\n    loss = loss * float('inf')")
        s.add("scaler.scale(loss).backward()")
        with s.block(f"if {when} % 2 == 1:" if is_window else "if True:"):
            s.add("scaler.step(optimizer)", "scaler.update()")
            if is_window:
                s.add("optimizer.zero_grad()")
        s.add("t(x)")

    if loop == "epochs":
        with s.block(f"for epoch in state.epochs({s.epochs}):"), s.block("for x in state.batches():"):
            body("state.batch")
    else:
        with s.block(f"for step in state.steps({s.steps}):"):
            s.add("x = torch.randn(3, 4)")
            body("step")


@shape(4)
def draws_before_the_loop(s: Script) -> None:
    add_model(s)
    loop = s.choose("", "epochs", "steps", "by hand")
    if loop == "epochs":
        add_loader(s)
    add_extras(s, epochs=loop == "epochs")
    s.add(
        s.choose(
            "",
            "fixed = torch.randn(4)",
            "fixed = random.random()",
            "fixed = nn.Linear(4, 1).bias.mean().item()",
        )
    )
    s.watched["vars"] = "state.vars"
    if loop == "epochs":
        with epochs(s), s.block("for x in state.batches():"):
            s.add("x = x + fixed")
            train(s)
    else:
        head = "state.steps({})" if loop == "steps" else "range(state.step, {})"
        with s.block(f"for step in {head.format(s.steps)}:"):
            s.add("x = torch.randn(3, 4) + fixed")
            train(s)


@shape(3)
def state_of_its_own(s: Script) -> None:
    add_model(s)
    way = s.choose(
        "", "dict in extra", "leaf in extra", "leaf in vars", "same list twice", "view", "rebound", "queue"
    )
    is_leaf = way.startswith("leaf")
    s.setup.append("own = {}")
    if is_leaf:
        s.setup[-1] = 'own = {"scale": torch.ones(1, requires_grad=True)}'
        s.setup.append('optimizer.add_param_group({"params": [own["scale"]]})')
    if way == "same list twice":
        s.setup[-1] = "seen = []\nown = {'a': seen, 'b': seen}"
    if way == "view":
        s.setup[-1] = "table = torch.zeros(3, 4)\nown = {'table': table, 'row': table[0]}"
    if way == "queue":
        s.setup[-1] = "own = {'queue': []}"
    if way != "leaf in vars":
        s.extra["own"] = "own"
        s.watched["own"] = "own"
    else:
        s.add('state.vars.setdefault("scale", own["scale"])', "own = state.vars")
    if way == "rebound":
        s.add("state.vars = {**state.vars}")
    data = s.choose("", "epochs", "steps")
    if data == "epochs":
        add_loader(s)

    def body() -> None:
        s.add("optimizer.zero_grad()")
        factor = {"leaf in extra": ' * own["scale"]', "leaf in vars": ' * state.vars["scale"]'}.get(way, "")
        factor = factor or {"view": ' + own["table"].sum()', "queue": ' + sum(own["queue"])'}.get(way, "")
        s.add(f"loss = ((model(x) - 1){factor}).square().mean()", "loss.backward()", "optimizer.step()")
        more = {
            "dict in extra": 'own["n"] = own.get("n", 0) + 1',
            "same list twice": 'own["a"].append(loss.item())',
            "view": 'own["row"].add_(0.01)',
            "rebound": 'state.vars["n"] = state.vars.get("n", 0) + 1\nloss = loss',
            "queue": 'own["queue"] = [*own["queue"], loss.item()][-3:]',
        }
        s.add(*([more[way]] if way in more else []))
        s.add("t(x, state.vars, own)")

    if data == "epochs":
        with s.block(f"for epoch in state.epochs({s.epochs}):"), s.block("for x in state.batches():"):
            body()
    else:
        with s.block(f"for step in state.steps({s.steps}):"):
            s.add("x = torch.randn(3, 4)")
            body()


@shape(2)
def names_of_the_loop(s: Script) -> None:
    add_model(s)
    add_loader(s)
    add_extras(s)
    way = s.choose("", "save(loss)", "sum in vars", "plateau", "plateau on mean")
    s.per_epoch = [line for line in s.per_epoch if "save" not in line and "scheduler" not in line]
    s.given.pop("scheduler", None)
    s.watched.pop("scheduler", None)
    s.per_step = [line for line in s.per_step if "scheduler" not in line]
    if way == "sum in vars":
        s.per_step.append('state.vars["sum"] = state.vars.get("sum", 0.0) + loss.item()')
        s.per_epoch += ['total, state.vars["sum"] = state.vars["sum"], 0.0', "state.save(loss=total)"]
    if way == "save(loss)":
        s.per_epoch.insert(0, "state.save(loss=loss.item())")
    if way == "plateau on mean":
        s.per_step.append("state.mean(loss=loss)")
    if way.startswith("plateau"):
        s.setup.append("scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)")
        s.given["scheduler"] = s.watched["scheduler"] = "scheduler"
        what = 'state.means["loss"]' if way == "plateau on mean" else "loss.item()"
        s.per_epoch.insert(0, f"scheduler.step({what})")
    s.watched["vars"] = "state.vars"
    with epochs(s), s.block("for x in state.batches():"):
        train(s)


@shape(2)
def data_or_model_that_grows(s: Script) -> None:
    add_model(s)
    ways = "data grows", "data grows in mid epoch", "data that is not given grows"
    way = s.choose("", *ways, "parameter group", "unfrozen")
    if way in ways:
        s.setup.append("samples = [*torch.randn(6, 4, generator=torch.Generator().manual_seed(7))]")
        s.setup.append("loader = DataLoader(samples, batch_size=3, shuffle=True)")
        s.given["loader"] = "loader"
        if way != "data that is not given grows":
            s.extra["own"] = '{"samples": samples}'
    else:
        add_loader(s)
    if way == "parameter group":
        s.setup.append("scale = nn.Parameter(torch.ones(1))\nmodel.register_parameter('scale', scale)")
        s.setup.append("optimizer = torch.optim.Adam([*model.parameters()][1:], lr=0.01)")
    add_extras(s)
    if way in ways:
        place = s.per_step if way == "data grows in mid epoch" else s.per_epoch
        place.append("for number in range(3):\n    samples.append(torch.full((4,), epoch + number / 10))")
    if way == "parameter group":
        s.per_epoch.append(
            "if epoch == 0:\n    optimizer.add_param_group({'params': [*model.parameters()][:1]})"
        )
    if way == "unfrozen":
        s.top.append("for p in [*model.parameters()][:1]:\n    p.requires_grad_(epoch > 0)")
    with epochs(s), s.block("for x in state.batches():"):
        train(s)


@shape(8)
def something_is_forgotten(s: Script) -> None:
    add_model(s)
    what = s.choose("", *FORGOTTEN)
    loop = s.choose("", "epochs", "steps")
    if loop == "epochs":
        add_loader(s)
    if what == "scheduler":
        choose_zero(s)
    else:
        add_extras(s, epochs=loop == "epochs")
    setup, before, after = FORGOTTEN[what]
    s.setup.append(setup)
    if what == "own optimizer":
        s.setup.insert(-1, "model.register_parameter('scale', nn.Parameter(torch.ones(1)))")
    s.watched |= {"forgotten": "forgotten"} if what in ("ema", "copy", "scheduler", "own optimizer") else {}

    def body() -> None:
        s.add(*([before] if before else []))
        train(s, then=after)

    if loop == "epochs":
        with epochs(s), s.block("for x in state.batches():"):
            body()
    else:
        with s.block(f"for step in state.steps({s.steps}):"):
            s.add("x = torch.randn(3, 4)")
            body()


FORGOTTEN = {
    "ema": (
        "forgotten = torch.optim.swa_utils.AveragedModel(model)",
        "",
        "forgotten.update_parameters(model)",
    ),
    "copy": (
        "forgotten = copy.deepcopy(model)",
        "",
        "with torch.no_grad():\n    for old, new in zip(forgotten.parameters(), model.parameters()):\n"
        "        old.lerp_(new, 0.1)",
    ),
    "scheduler": (
        "forgotten = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)",
        "",
        "forgotten.step()",
    ),
    "own optimizer": (
        "forgotten = torch.optim.Adam([model.scale], lr=0.1)",
        "x = x * model.scale",
        "forgotten.step()\nforgotten.zero_grad()",
    ),
    "generator": (
        "forgotten = torch.Generator().manual_seed(3)",
        "x = x + torch.randn(x.shape, generator=forgotten)",
        "",
    ),
    "numpy generator": (
        "forgotten = np.random.default_rng(3)",
        "x = x + float(forgotten.standard_normal())",
        "",
    ),
    "weight": ("forgotten = 1.0", "x = x * forgotten", "forgotten = 0.9 * forgotten"),
    "teacher": (
        "forgotten = torch.zeros(4)",
        "x = x + forgotten",
        "forgotten = 0.9 * forgotten + 0.1 * x.mean(0)",
    ),
    "value of a function": (
        "forgotten = 1.0\ndef fade():\n    global forgotten\n    forgotten = 0.9 * forgotten\n"
        "    return forgotten",
        "x = x * fade()",
        "",
    ),
    "element": (
        "forgotten = torch.zeros(4)",
        "x = x + forgotten.mean()",
        "forgotten[state.step % 4] = x.mean()",
    ),
}
"""What is in no part, the line before the update that uses it, and the one after it that changes it.

Counts and lists are seen at the second save of a process only, so they are not among these.
"""


@shape(3)
def means_over_steps(s: Script) -> None:
    add_model(s)
    data = s.choose("", "drawn", "batches", "loop by hand")
    if data == "batches":
        add_loader(s)
    add_extras(s, epochs=False)
    s.watched["vars"] = "state.vars"
    if data == "batches":
        s.add("iterator = iter(state.batches())")
    by_hand = data == "loop by hand"
    head = f"range(state.step, {s.steps})" if by_hand else f"state.steps({s.steps})"
    with s.block(f"for step in {head}:"):
        next_batch(s) if data == "batches" else s.add("x = torch.randn(3, 4)")
        update(s)
        s.add(*s.per_step, "state.mean(loss=loss, weight=len(x))")
        with s.block(f"if (step + 1) % {s.dice.choice([2, 3])} == 0:"):
            s.add(
                s.choose(
                    "",
                    'state.vars["mean"] = dict(state.means.reset())',
                    "state.save(**state.means.reset())",
                    'for group in optimizer.param_groups:\n    group["lr"] = 0.01 * state.means["loss"]',
                )
            )
        s.add("t(x)")


@shape(1.5)
def validation_with_workers(s: Script) -> None:
    add_model(s)
    add_loader(s)
    add_extras(s)
    s.per_epoch = [line for line in s.per_epoch if "model.eval()" not in line]
    where = s.choose("validated", "after", "at top", "in mid epoch", "before the load")
    persistent = s.choose("", "persistent_workers=True", "")
    s.setup.append("held_out = torch.randn(6, 4, generator=torch.Generator().manual_seed(9))")
    s.setup.append(f"other = DataLoader(held_out, batch_size=3, num_workers=1, {persistent})")
    s.setup.append(
        "def validate():\n    model.eval()\n    with torch.no_grad():\n"
        "        score = sum(model(v).mean().item() for v in other)\n    model.train()\n    return score"
    )
    s.watched["vars"] = "state.vars"
    if where == "before the load":
        s.setup.append("validate()")
    if where in ("after", "before the load"):
        s.per_epoch.insert(0, 'state.vars["other"] = validate()')
    if where == "at top":
        s.top.append('state.vars["other"] = validate()')
    with epochs(s), s.block("for x in state.batches():"):
        train(s, then='state.vars["other"] = validate()' if where == "in mid epoch" else "")


def write(seed: int, only: str | None = None) -> Program:
    """Write the script of a seed; the same one forever, as long as the shapes stay as they are."""
    dice = random.Random(seed)
    names = [*SHAPES]
    name = dice.choices(names, [SHAPES[one][0] for one in names])[0]
    name = only or name
    script = Script(dice)
    SHAPES[name][1](script)
    return Program(seed, name, tuple(script.traits), script.render(seed))


# ------------------------------------------------------------------------------------------------- running it


class Stopped(BaseException):
    """Ends a script at a tick; no script catches it."""


class Endless(Exception):
    """The script does not come to its end."""


class Leg(NamedTuple):
    """One start of a script, until it ended or was stopped."""

    log: list[Record]
    told: list[tuple[int, str]]
    """The library's warnings, each with the number of ticks before it."""
    error: BaseException | None
    has_ended: bool
    has_saved: bool = False
    """Whether it was saved where it was stopped: it goes on with the very next tick then."""


class Ticker:
    """What a script calls `t`."""

    def __init__(self, stop: int | None, kind: Kind, dies: Callable[[Ticker], None] | None = None) -> None:
        self.log: list[Record] = []
        self.told: list[tuple[int, str]] = []
        """The library's warnings, each with the number of ticks before it."""
        self._stop, self._kind, self._dies = stop, kind, dies
        self._state: Any = None
        self.has_saved = False
        self.goes_on = False
        """Whether the script goes on after the save: the library may warn of what follows it."""
        self._watched: dict[str, Any] = {}

    def watch(self, state: Any, **watched: Any) -> None:
        """Digest these at each tick."""
        self._state, self._watched = state, watched

    def _tick(self, *info: Any) -> None:
        self.log.append((self.digest(*info), digest_of_generators()))
        if len(self.log) == self._stop:
            self._end()

    # Not a method that RunState follows: that it stops the script is no part of the script.
    __call__ = partialmethod(_tick)

    def digest(self, *info: Any) -> str:
        """Return the digest of everything that is watched."""
        live = dict(self._watched)
        if "vars" in live:
            live["vars"] = self._state.vars
        return digest(info, [(name, content(one)) for name, one in live.items()])

    def end(self) -> None:
        """Note the end of the script."""
        state = self._state
        # A break out of the batches, without epochs(), ends the epoch only if the script continues
        counts = f"step {state.step}, {state.samples} samples" if state else ""
        self.log.append((self.digest(), f"{digest_of_generators()} {counts}"))

    def _end(self) -> None:
        if self._kind == "save":
            self._state.save().wait()
            self.has_saved = True
            if self.goes_on:
                return
        if self._kind == "signal":
            before = signal.getsignal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR1)
            if before is not _not_watched:
                return
        if self._dies:
            self._dies(self)
        raise Stopped


def _too_long(number: int, frame: object) -> None:
    raise Endless(f"no end in {LONGEST} seconds")


def _not_watched(number: int, frame: object) -> None:
    """Stand for the signal's default action: see `Ticker._end`."""


def content(one: Any) -> Any:
    """Return what of an object counts."""
    if isinstance(one, torch.optim.Optimizer):
        groups = [{k: v for k, v in group.items() if k != "params"} for group in one.param_groups]
        return groups, [dict(one.state.get(p, {})) for group in one.param_groups for p in group["params"]]
    if hasattr(one, "state_dict"):
        return {k: v for k, v in one.state_dict().items() if not callable(v)}
    return one


def digest(*values: Any) -> str:
    """Return a short digest of tensors, arrays, containers and plain values."""
    found = hashlib.sha1()

    def take(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value = value.detach()
            found.update(f"{value.dtype}{tuple(value.shape)}".encode())
            found.update(
                value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
            )
        elif isinstance(value, dict):
            for key in value:
                found.update(repr(key).encode())
                take(value[key])
        elif isinstance(value, (list, tuple)):
            found.update(b"[")
            for one in value:
                take(one)
        else:
            found.update(repr(value).encode())

    take(values)
    return found.hexdigest()[:12]


def digest_of_generators() -> str:
    """Return a digest of the global random generators."""
    array, position = np.random.get_state()[1:3]
    found = hashlib.sha1(torch.get_rng_state().numpy().tobytes())
    found.update(array.tobytes())
    found.update(f"{position} {hash(random.getstate())}".encode())
    return found.hexdigest()[:12]


def start(program: Program, folder: Path, ticker: Ticker, every: int | None, salt: int) -> Leg:
    """Run the script once, as a process would that starts with it."""
    torch.manual_seed(salt)
    np.random.seed(salt)
    random.seed(salt)
    name = f"<program {program.seed}>"
    linecache.cache[name] = (len(program.source), None, program.source.splitlines(True), name)
    told = ticker.told
    error, has_ended, has_saved = None, False, False
    scope = {"__name__": "__main__", "run_dir": folder, "every": every, "t": ticker}
    before = signal.signal(signal.SIGUSR1, _not_watched)
    signal.signal(signal.SIGVTALRM, _too_long)
    signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", ResumableWarning)
            warnings.showwarning = lambda message, category, *_: (  # type: ignore[assignment]
                told.append((len(ticker.log), str(message))) if category is ResumableWarning else None
            )
            exec(compile(program.source, name, "exec"), scope)
            ticker.end()
            has_ended = True
    except Stopped:
        has_saved = ticker.has_saved
    except SystemExit:
        has_saved = True
    except Exception as exc:
        error = exc
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGUSR1, before)
    return Leg(ticker.log, told, error, has_ended, has_saved)


def start_and_kill(program: Program, folder: Path, stop: int | None, every: int | None, salt: int) -> Leg:
    """Run the script in a fork of this process, which ends by SIGKILL at a tick."""
    reads, writes = os.pipe()
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        os.close(reads)

        def tell(log: list[Record], told: list[tuple[int, str]], error: str, has_ended: bool) -> None:
            os.write(writes, json.dumps([log, told, error, has_ended]).encode())
            os.kill(os.getpid(), signal.SIGKILL)

        ticker = Ticker(stop, "kill", lambda one: tell(one.log, one.told, "", False))
        leg = start(program, folder, ticker, every, salt)
        tell(leg.log, leg.told, repr(leg.error) if leg.error else "", leg.has_ended)
    os.close(writes)
    is_there, _, _ = select.select([reads], [], [], 6 * LONGEST)
    with open(reads) as answer:
        if not is_there:
            os.kill(child, signal.SIGKILL)
        text = answer.read()
    os.waitpid(child, 0)
    if not is_there:
        return Leg([], [], Endless("the fork said nothing"), False)
    log, told, error, has_ended = json.loads(text)
    kind = getattr(errors, error.partition("(")[0], None)
    failure = ResumableError(error, fix="") if kind else RuntimeError(error) if error else None
    return Leg([tuple(one) for one in log], [tuple(one) for one in told], failure, has_ended)


# -------------------------------------------------------------------------------------------------- comparing


class Stops(NamedTuple):
    """How a script is stopped: each number is the tick of one process at which it ends."""

    kind: Kind
    ticks: tuple[int, ...]
    every: int | None = None
    in_fork: bool = False

    def __str__(self) -> str:
        where = ", ".join(map(str, self.ticks))
        more = f", every={self.every}" if self.every else ""
        return f"{self.kind} at {where}{more}{', SIGKILL' if self.in_fork else ''}"


class Found(NamedTuple):
    """What became of a script under these stops."""

    outcome: str
    stops: Stops | None
    text: str


@dataclass
class Verdict:
    """What became of a script."""

    program: Program
    found: list[Found] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    """The warnings in the run without a stop."""

    @property
    def worst(self) -> Found:
        """Return the worst of all."""
        return max(self.found, key=lambda one: OUTCOMES.index(one.outcome))

    @property
    def is_false_alarm(self) -> bool:
        """Whether the library warned of a script that is exact."""
        return self.worst.outcome == "exact" and bool(self.warned)


LONGEST = 10
"""Seconds of a processor that a start may take."""
CAUSES = {
    r"changed after save\(\) in the same body": r"(?m)^ +(t\(.*|.*save\(.*)\n +\S",
    r"keeps gradients after a step": r"if state\.step % 2 == 0:\n +optimizer\.zero_grad|p\.grad\.mul_",
    r"drawn before next\(\)": r"rand.*\n(.*\n){0,3}.*next\(",
    r"drawn between reading state\.step": r"state\.(step|epoch)[^(]",
    r"runs in the body of another such loop": r"(?s)in state\.batches.*for .* in state\.batches",
    r"has not been looped over in it": r"(?s)state\.save\(.*in state\.batches",
    r"is cut by (\w+)\(\)": r"{0}\(",
    r"left right after save\(\)|was left by a break": r"\b(break|raise)\b",
    r"name '(\w+)' is not defined": r"(?m)^ +{0} = ",
    r"loader\.(\w+) was given .* not in a loop over state\.batches": r"iter\(loader_{0}\)",
    r"have been looped over already": r"(?s)state\.batches.*state\.batches",
    r"(\w+) controls this loop and": r"(?m)^ +{0}( |\.append|\[)",
    r"(\w+) is summed over the epoch": r"(?m)^ +{0} (\+|=|\w)",
    r"(\w+) has weights that change as this loop runs": r"(?m)^{0} = (copy|torch\.optim\.swa_utils)\.",
    r"random generators that are in no checkpoint \((\w+)\)": r"(?m)^{0} = (torch|np\.random)\.",
    r"a scheduler \((\w+)\) has changed the learning rate": r"(?m)^forgotten = .*{0}\(",
    r"an optimizer \((\w+)\) trains a model that was given": r"(?m)^forgotten = .*{0}\(",
    r"(\w+)\(\) has asked for two batches": r"def {0}\(",
    r"the dataset has \d+ items": r"samples\.append",
    r"the checkpoint does not fit the objects": r"add_param_group",
    r"all batches of the epoch were asked for": r"list\(state\.batches",
    r"two loops over this loader's batches": r"iterator = iter\(",
    r"^StopIteration": r"next\(",
    r"itertools\.cycle\(\) repeats only": r"cycle\(state\.batches",
    r"next\(\) took \d+ of the epoch's batches": r"next\(iterator\)",
    r"persistent_workers=True (began|had begun)|look alike": r"persistent_workers=True",
}
"""What a warning or an error says, and what the script has to have then: else it names another cause."""
UNRELATED = re.compile(r"save\(\) has waited|cannot flush folders|room")


def stops_of(program: Program, ticks: int, kinds: Sequence[Kind], most: int | None) -> Iterator[Stops]:
    """Yield how to stop a script with so many ticks.

    Without `most` it is stopped in every way, at each tick. With it, at each tick in turn by one kind, each
    start continuing from the stop before, and by the others so often.
    """
    dice = random.Random(program.seed + 1)
    each = ("save", "signal")[program.seed % 2]
    # A start with workers is slow
    has_workers = "num_workers" in program.source
    count = 1 if has_workers else most
    for kind in kinds:
        at = [*range(1, ticks)]
        if kind != "kill" and (most is None or (kind == each and not has_workers)) and ticks > 2:
            yield Stops(kind, (1,) * (ticks + 3))
            at = at if most is None else []
        if most is not None and len(at) > count:
            at = sorted(dice.sample(at, count))
        for first in at:
            every = dice.choice([1, 2]) if kind == "kill" else None
            second = dice.choice([1, 1, 2, 3]) + (2 if kind == "kill" else 0)
            yield Stops(kind, (first, second), every, kind == "kill" and dice.random() < 0.1)


def examine(program: Program, kinds: Sequence[Kind] = KINDS, most: int | None = 2) -> Verdict:
    """Run a script without a stop, and with stops; say for each whether it is exact."""
    verdict = Verdict(program)
    top = Path(tempfile.mkdtemp(prefix="program-", dir=_memory()))
    try:
        whole = start(program, top / "whole", Ticker(None, "save"), None, 1)
        verdict.warned = _related(whole.told)
        if whole.error is not None:
            verdict.found.append(named_rightly(_failed(whole.error, None), program))
            return verdict
        for number, stops in enumerate(stops_of(program, len(whole.log) - 1, kinds, most)):
            folder = top / str(number)
            verdict.found.append(_judge(program, folder, stops, whole, verdict.warned))
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        shutil.rmtree(top, ignore_errors=True)
    verdict.found = verdict.found or [Found("exact", None, "")]
    return verdict


def examine_all(seeds: Sequence[int], most: int | None, path: Path) -> None:
    """Examine the scripts of these seeds, and leave the verdicts in a file."""
    path.write_bytes(pickle.dumps([examine(write(seed), most=most) for seed in seeds]))


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _related(told: Sequence[tuple[int, str]]) -> list[str]:
    return [text for _, text in told if not UNRELATED.search(text)]


def _failed(error: BaseException, stops: Stops | None) -> Found:
    text = f"{type(error).__name__}: {error}".split("\n")[0][:300]
    if isinstance(error, ResumableError) or _names_us(error):
        return Found("refused", stops, text)
    tail = "".join(traceback.format_exception(type(error), error, error.__traceback__)[-6:])
    return Found("crashed", stops, f"{text}\n{tail}")


def named_rightly(found: Found, program: Program) -> Found:
    """Return what became of a script; "misled" if a message names a cause that it does not have."""
    for said, needed in CAUSES.items():
        match = re.search(said, found.text)
        if match and re.search(needed.format(*match.groups()) if match.groups() else needed, program.source):
            return found
    return found._replace(outcome="misled") if found.outcome in ("warned", "refused") else found


def _names_us(error: BaseException) -> bool:
    return any("resum" in note for note in getattr(error, "__notes__", ()))


def _judge(program: Program, folder: Path, stops: Stops, whole: Leg, warned: list[str]) -> Found:
    """Start the script as often as it takes, and compare what it trains with the run without a stop."""
    done, told, has_saved = 0, [*warned], True
    for starts, tick in enumerate((*stops.ticks, None)):
        # Nothing saved: a script without seeds begins another training
        salt = 1 if not starts or not any((folder / "checkpoints").glob("[0-9]*")) else 1 + starts
        if stops.in_fork and tick is not None:
            leg = start_and_kill(program, folder, tick, stops.every, salt)
        else:
            leg = start(program, folder, Ticker(tick, stops.kind), stops.every, salt)
        # What is reported after a resume comes too late, but for what is reported at the load
        told += _related(leg.told if starts == 0 else [one for one in leg.told if one[0] == 0])
        begins = _matches(leg, whole.log, done, is_kill=not has_saved)
        if begins is None:
            if stops.kind == "save" and not told:
                told = _related(_saved_at(done, program, folder).told)
            if told:
                return named_rightly(Found("warned", stops, told[0]), program)
            return Found("silent", stops, _difference(leg, whole.log, done))
        if leg.error is not None:
            return named_rightly(_failed(leg.error, stops), program)
        if leg.has_ended:
            return Found("exact", stops, "")
        done, has_saved = begins + len(leg.log), leg.has_saved
        told += _related(leg.told)
    return Found(
        "crashed", stops, f"the script did not come to its end (at tick {done} of {len(whole.log) - 1})"
    )


def _saved_at(tick: int, program: Program, folder: Path) -> Leg:
    """Run the script with a save at a tick, and no stop."""
    ticker = Ticker(tick, "save")
    ticker.goes_on = True
    return start(program, folder.with_name(f"{folder.name}-saved"), ticker, None, 1)


def _matches(leg: Leg, whole: list[Record], done: int, *, is_kill: bool) -> int | None:
    """Return the tick of the run without a stop where this one began; None if it trained something else."""
    if leg.has_ended:
        first = len(whole) - len(leg.log)
        places = [first] if 0 <= first <= done and (is_kill or first == done) else []
    else:
        places = [*range(done, -1, -1)] if is_kill else [done]
    return next((at for at in places if whole[at : at + len(leg.log)] == leg.log), None)


def _difference(leg: Leg, whole: list[Record], done: int) -> str:
    want = whole[done:]
    pairs = enumerate(zip(leg.log, want, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(leg.log), len(want)))
    if at == len(leg.log) or at == len(want):
        return f"{len(leg.log)} ticks after the resume, {len(want)} wanted"
    what = [
        name for name, a, b in zip(("training", "generators"), leg.log[at], want[at], strict=False) if a != b
    ]
    again = " (a tick from before the stop)" if leg.log[at] in whole[:done] else ""
    again = " (a later tick: something was skipped)" if leg.log[at] in want else again
    if done + at < len(whole) - 1:
        return f"tick {done + at + 1} of {len(whole) - 1}: other {' and '.join(what)}{again}"
    now, then = leg.log[at][1], want[at][1]
    return f"the end: other {' and '.join(what)}; {now} instead of {then}"


def shrink(verdict: Verdict) -> Program:
    """Return a smaller script that fails under the same stops."""
    program, stops, outcome = verdict.program, verdict.worst.stops, verdict.worst.outcome
    at = 0
    while stops and (smaller := _without(program, at)):
        if smaller is not program and _outcome(smaller, stops) == outcome:
            program, at = smaller, 0
        else:
            at += 1
    return program


def _without(program: Program, number: int) -> Program | None:
    """Return the script without one of the statements in its loops, or with a block's body in its place."""
    lines = program.source.splitlines()
    first = next(i for i, one in enumerate(lines) if "t.watch(" in one) + 1
    index, is_opened = first + number // 2, number % 2
    if index >= len(lines):
        return None
    depth = _depth(lines[index])
    end = next((i for i in range(index + 1, len(lines)) if _depth(lines[i]) <= depth), len(lines))
    text = lines[index].strip()
    if text.startswith("t(") or (is_opened and not text.startswith(("if", "try"))):
        return program
    if not is_opened and any(one.strip().startswith("t(") for one in lines[index:end]):
        return program
    inside = [one[4:] for one in lines[index + 1 : end]] if is_opened else []
    return program._replace(source="\n".join([*lines[:index], *inside, *lines[end:]]) + "\n")


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def _outcome(program: Program, stops: Stops) -> str:
    top = Path(tempfile.mkdtemp(prefix="program-", dir=_memory()))
    try:
        compile(program.source, "", "exec")
        whole = start(program, top / "whole", Ticker(None, "save"), None, 1)
        if whole.error is not None:
            return ""
        return _judge(program, top / "stopped", stops, whole, _related(whole.told)).outcome
    except SyntaxError:
        return ""
    finally:
        shutil.rmtree(top, ignore_errors=True)


# ----------------------------------------------------------------------------------------------- command line


def line(verdict: Verdict) -> str:
    """Return what became of a script, and how to see it."""
    program, worst = verdict.program, verdict.worst
    traits = ", ".join(program.traits)
    return f"{program.seed}: {worst.outcome}: {program.shape} ({traits}), {worst.stops}: {worst.text}"


def table(verdicts: Sequence[Verdict]) -> str:
    """Return how many scripts of each shape had which outcome."""
    heads = ["shape", "programs", *OUTCOMES, "false alarms"]
    rows = [heads]
    names = [*SHAPES, "all"]
    for name in names:
        mine = [one for one in verdicts if name in ("all", one.program.shape)]
        counts = Counter(one.worst.outcome for one in mine)
        if mine:
            alarms = sum(one.is_false_alarm for one in mine)
            rows.append(
                [name, str(len(mine)), *[str(counts[o] or ".") for o in OUTCOMES], str(alarms or ".")]
            )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=False))]
        )
        for row in rows
    )


def main() -> None:
    """Examine scripts, or show one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", default="0:300", help="FIRST:END, or one seed")
    parser.add_argument("--shape", choices=[*SHAPES], help="this shape alone")
    parser.add_argument("--stop", choices=KINDS, help="this way to stop alone")
    parser.add_argument(
        "--most", type=int, default=2, help="pairs of stops of each kind; 0: one at every tick"
    )
    parser.add_argument("--show", type=int, metavar="SEED", help="print the script of a seed")
    parser.add_argument("--shrink", action="store_true", help="print a smaller script of each failure")
    parser.add_argument("--all", action="store_true", help="list warned and refused scripts too")
    given = parser.parse_args()
    torch.set_num_threads(1)
    # The first optimizer imports torch's compiler.
    torch.optim.SGD([torch.zeros(1)])
    if given.show is not None:
        program = write(given.show, given.shape)
        print(f"# seed {program.seed}: {program.shape} ({', '.join(program.traits)})\n{program.source}")
        return
    first, _, end = given.seeds.partition(":")
    seeds = range(int(first), int(end or int(first) + 1))
    kinds = (given.stop,) if given.stop else KINDS
    verdicts = []
    for seed in seeds:
        program = write(seed, None)
        if given.shape and program.shape != given.shape:
            continue
        began = time.perf_counter()
        verdicts.append(verdict := examine(program, kinds, given.most or None))
        took = time.perf_counter() - began
        shown = (*BAD, *(("warned", "refused") if given.all else ()))
        worst = verdict.worst
        if worst.outcome in shown or took > 5:
            print(f"{line(verdict)} [{took:.1f}s]", flush=True)
            if given.shrink and worst.outcome in BAD:
                print(shrink(verdict).source.removeprefix(IMPORTS), flush=True)
    print(table(verdicts))


if __name__ == "__main__":
    main()
