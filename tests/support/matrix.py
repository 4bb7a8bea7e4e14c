"""The matrix of killed trainings: which set-ups meet which stops, and how one of them is tried."""

from __future__ import annotations

import itertools
import json
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import matrix_training
from forks import Forks
from matrix_loaders import FAMILIES, FAMILY_OF, LOADERS, NOISE
from matrix_training import LOOPS, TRAIL

Lap = list[int]
"""The numbers of the events of an epoch, or of what comes near it; the last one is its end."""

STOPS: dict[str, Callable[[Lap, Lap], list[int]]] = {
    "mid-next-last": lambda a, b: [a[len(a) // 2 - 1], a[len(a) // 2], b[-2]],
    "first-next-end": lambda a, b: [a[0], a[1], a[-1]],
    "last-end-first": lambda a, b: [a[-2], a[-1], b[0]],
    "end-first-mid": lambda a, b: [a[-1], b[0], b[len(b) // 2]],
    "mid-first-end": lambda a, b: [a[len(a) // 2], b[0], b[-1]],
    "mid-unsaved-last": lambda a, b: [a[len(a) // 2 - 1], -a[len(a) // 2], b[-2]],
    "everywhere": lambda a, b: [*range(1, b[-1] + 1)],
}
"""The events after which a training is saved and killed; where one is negative, it is only killed."""

ALL = {"python", "numpy", "torch"}
KEEP_THEIR_PLACE = ("own-state", "begins-anew", "stays-at-its-end", "sticks")
"""Loaders that are no DataLoader, and have a state."""
IN_AN_ORDER = [f"torchdata{kind}" for kind in ("", "-generator", "-counting", "-dealt", "-drawn")]
LATE = {"global-late": {"torch"}, "live-batches": {"numpy"}, **dict.fromkeys(KEEP_THEIR_PLACE, ALL)}
"""The training's generators that a loader draws from during a pass."""
DRAWN = {name: {name} & ALL for name in NOISE} | dict.fromkeys(("all-three", "collate", "seeding"), ALL)
DRAWN |= {name: {"python"} for name in ("late", "partial-collate")}
"""The training's generators that a noise draws from."""


class Case(NamedTuple):
    """One cell of the matrix."""

    loader: str
    workers: int
    persists: bool
    noise: str
    loop: str
    window: int
    stops: str

    def __str__(self) -> str:
        workers = f"workers-{self.workers}" if self.workers else "in-process"
        words = [self.loader, workers, "persistent" * self.persists, self.noise, self.loop]
        return " ".join([*filter(None, words), f"window-{self.window}", self.stops])

    @property
    def family(self) -> str:
        return FAMILY_OF[self.loader]

    @property
    def ends_in_workers(self) -> bool:
        """Whether it is a stream, each worker of which comes to an end of its own."""
        is_stream = self.family == "streams" or (self.family == "stateful" and self.loader not in IN_AN_ORDER)
        return is_stream and self.loader != "endless"

    @property
    def makes_sense(self) -> bool:
        """Whether it can be made, and docs/guide/inexact.md does not name it."""
        is_in_process, is_plain = not self.workers, self.family == "plain"
        of_collate = NOISE[self.noise].settings is not dict
        is_shared = self.noise not in ("silence", "own", "nested", "module", "worker")
        wrong = [
            is_plain and (self.workers or of_collate),
            is_in_process and self.persists,
            # What only workers have
            is_in_process and (self.loader.startswith("prefetch") or self.loader == "subclass"),
            is_in_process and self.noise in ("reseeded", "seeding"),
            # It is refused
            self.loader == "subclass" and self.persists,
            # reseed() finds the noise on the dataset itself
            self.noise == "reseeded" and self.loader == "concatenated",
            # What is loaded ahead, from a generator of the training
            is_in_process and (self.loader == "buffered" or (self.loader == "ahead" and is_shared)),
            # Their state has no generator, and another object has another one
            (self.loader in KEEP_THEIR_PLACE or self.loop == "remade")
            and self.noise in ("own", "nested", "late", "module"),
            self.loader == "endless" and self.loop != "break",
            self.loader == "iterator" and self.loop != "break",
            self.loader == "remade-iterator" and self.loop != "remade",
            self.loop == "remade" and self.loader not in ("list", "function", "remade-iterator"),
            # In a thread it draws whenever it likes
            self.loop == "thread" and (is_in_process or self.family not in ("order", "own-order")),
            # Plain PyTorch differs from run to run: the worker that ends first decides how far others are
            self.persists and self.ends_in_workers and self.loop in ("break", "zip"),
            # Many starts
            self.stops == "everywhere" and not is_in_process,
        ]
        return not any(wrong)

    @property
    def is_exact(self) -> bool:
        """Whether it is exact today: of what is not, `INEXACT` has an example."""
        if self.workers or self.loop not in ("draws-ahead", "three-ahead"):
            return True
        drawn = DRAWN["all-three" if self.loop == "draws-ahead" else self.noise]
        return "counting" not in self.loader and not drawn & LATE.get(self.loader, set())

    @property
    def crew(self) -> str:
        return "persistent" if self.persists else "workers" if self.workers else "in-process"


INEXACT = [
    # The state of what is loaded in this process is that of the batches ahead
    Case("counting", 0, False, "nested", "draws-ahead", 2, "everywhere"),
    Case("global-late", 0, False, "collate", "three-ahead", 2, "end-first-mid"),
]
"""Cases that end otherwise than a plain training, without a warning."""

CREWS = {
    "in-process": [(0, False)],
    "workers": [(2, False), (3, False)],
    "persistent": [(2, True), (3, True)],
}
AXES = {
    "loader": [*LOADERS],
    "crew": [*CREWS],
    "noise": [*NOISE],
    "loop": [*LOOPS],
    "window": [1, 2, 3],
    "stops": [*STOPS],
}
MEET = [
    ("loader", "crew"),
    ("family", "loop"),
    ("loop", "stops"),
    ("family", "noise"),
    ("family", "stops"),
    ("noise", "crew"),
    ("loop", "crew"),
    ("loop", "window"),
    ("crew", "stops"),
]
"""Each value of the one meets each value of the other in a case, if there is one that makes sense."""


# The only case whose life throws batches away and is killed before each worker has had a turn
PINNED = Case("shuffle", 2, True, "all-three", "break", 1, "mid-first-end")


def pairs(case: Case) -> set[tuple[Any, ...]]:
    return {(*two, *(getattr(case, axis) for axis in two)) for two in MEET}


def chosen() -> list[Case]:
    """Return few cases in which all meets that can meet: always the same ones."""
    found, met = [PINNED], pairs(PINNED)
    for one, other in MEET:
        for values in itertools.product(AXES.get(one, FAMILIES), AXES[other]):
            if (one, other, *values) in met:
                continue
            dice = random.Random(f"{one} {other} {values}")
            if fit := fitting(dice, dict(zip((one, other), values, strict=True))):
                found.append(max(fit, key=lambda case: len(pairs(case) - met)))
                met |= pairs(found[-1])
    return sorted(found)


def fitting(dice: random.Random, fixed: dict[str, Any]) -> list[Case]:
    """Return some cases with these values: none if they cannot meet."""
    free = {**AXES, "loader": [*FAMILIES.get(fixed.get("family", ""), LOADERS)]}
    free |= {axis: [value] for axis, value in fixed.items() if axis != "family"}
    drawn = ({axis: dice.choice(values) for axis, values in free.items()} for _ in range(150))
    cases = (made(dice, **one) for one in drawn)
    return [*itertools.islice((case for case in cases if case.makes_sense and case.is_exact), 25)]


def made(dice: random.Random, loader: str, crew: str, noise: str, loop: str, window: int, stops: str) -> Case:
    return Case(loader, *dice.choice(CREWS[crew]), noise, loop, window, stops)


# One case: a plain training, one with the library that is never stopped, and one that is killed.

Line = dict[str, Any]


def trained(forks: Forks, case: Case, folder: Path, *stops: int | None) -> list[Line]:
    """Return the trail of a training that is killed at its stops, and started again under another seed."""
    folder.mkdir()
    for seed, stop in enumerate(stops):
        life = forks.call(matrix_training.start, case, folder, stop, seed, folder=folder)
        code = -signal.SIGKILL if stop else 0
        assert life.code == code, f"{folder.name}, stop {stop}: code {life.code}, {life.err[-3000:]}"
    # What was not saved is done again, and has to be the same
    lines = dict.fromkeys((folder / TRAIL).read_text().splitlines())
    return [json.loads(line) for line in lines]


def stops_of(case: Case, trail: list[Line]) -> list[int]:
    """Return the events after which the training is killed: it is saved, and the save is durable."""
    events = [line["number"] for line in trail if line["number"]]
    ends = [line["number"] for line in trail if line["what"] == "end"] or [len(events) // 2, len(events)]
    laps = [[n for n in events if a < n <= b] for a, b in itertools.pairwise([0, *ends])]
    return [*dict.fromkeys(STOPS[case.stops](*laps[:2]))]


def problem(forks: Forks, case: Case, folder: Path) -> str | None:
    """Return where the three trainings part first, if they do."""
    plain = trained(forks, case, folder / "plain", None)
    straight = trained(forks, case, folder / "straight", 0)
    # Seeds of the samples are the library's own
    if case.loader != "sample-seeds" and (found := difference(plain, straight)):
        return f"not transparent: {found}"
    stops = stops_of(case, plain)
    found = difference(straight, trained(forks, case, folder / "killed", *stops, 0))
    return f"not exact, killed after the events {stops}: {found}" if found else None


def difference(one: list[Line], other: list[Line]) -> str | None:
    """Return the first event that two trainings do not share, and what differs there."""
    for line, there in itertools.zip_longest(one, other, fillvalue={}):
        if line != there:
            what = [name for name in line or there if line.get(name) != there.get(name)]
            at = [f"{found.get('what', 'nothing')} {found.get('number') or ''}" for found in (line, there)]
            return f"at {at[0]} (there: {at[1]}) {', '.join(what)} differ"
    return None
