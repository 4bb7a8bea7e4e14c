"""The matrix of killed trainings: which set-ups meet which stops, and how one of them is tried."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import matrix_training
from matrix_loaders import FAMILIES, FAMILY_OF, LOADERS, NOISE
from matrix_training import LOOPS, TRAIL

Lap = list[int]
"""The numbers of the events of an epoch, or of what comes near it; the last one is its end."""

STOPS: dict[str, Callable[[Lap, Lap], list[int]]] = {
    "mid-next-last": lambda a, b: [a[len(a) // 2 - 1], a[len(a) // 2], b[-2]],
    "first-next-end": lambda a, b: [a[0], a[1], a[-1]],
    "last-end-first": lambda a, b: [a[-2], a[-1], b[0]],
    "end-first-mid": lambda a, b: [a[-1], b[0], b[len(b) // 2]],
    "mid-end-end": lambda a, b: [a[len(a) // 2], a[-1], b[-1]],
    "everywhere": lambda a, b: [*range(1, b[-1] + 1)],
}


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
    def makes_sense(self) -> bool:
        """Whether it can be made, and a resume of it is promised to be exact (docs/guide/inexact.md)."""
        is_in_process, is_plain = not self.workers, self.family == "plain"
        of_collate = NOISE[self.noise].settings is not dict
        wrong = [
            is_plain and (self.workers or of_collate),
            is_in_process and self.persists,
            # What only workers have
            is_in_process and (self.loader.startswith("prefetch") or self.noise == "reseeded"),
            # reseed() finds the noise on the dataset itself
            self.noise == "reseeded" and self.loader == "concatenated",
            # A buffer that shares a generator with the training
            is_in_process and self.loader in ("buffered", "ahead") and not self.is_private,
            self.loader == "endless" and self.loop != "break",
            # In a thread it draws whenever it likes
            self.loop == "thread" and (is_in_process or self.family not in ("order", "own-order")),
            # Many starts
            self.stops == "everywhere" and not is_in_process,
        ]
        return not any(wrong)

    @property
    def is_private(self) -> bool:
        """Whether the samples draw from none of the generators that the training draws from."""
        return self.loader != "buffered" and self.noise in ("silence", "own", "nested", "module", "worker")

    @property
    def crew(self) -> str:
        return "persistent" if self.persists else "workers" if self.workers else "in-process"


CREWS = {"in-process": [(0, False)], "workers": [(2, False), (3, False)], "persistent": [(2, True), (3, True)]}
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


def pairs(case: Case) -> set[tuple[Any, ...]]:
    return {(*two, *(getattr(case, axis) for axis in two)) for two in MEET}


def chosen() -> list[Case]:
    """Return few cases in which all meets that can meet: always the same ones."""
    dice = random.Random(0)
    found: list[Case] = []
    met: set[tuple[Any, ...]] = set()
    for one, other in MEET:
        for values in itertools.product(AXES.get(one, FAMILIES), AXES[other]):
            if (one, other, *values) not in met and (fit := fitting(dice, {one: values[0], other: values[1]})):
                best = max(fit, key=lambda case: len(pairs(case) - met))
                met |= pairs(best)
                found.append(best)
    return sorted(found)


def fitting(dice: random.Random, fixed: dict[str, Any]) -> list[Case]:
    """Return some cases with these values: none if they cannot meet."""
    free = {**AXES, "loader": [*FAMILIES.get(fixed.get("family", ""), LOADERS)]}
    free |= {axis: [value] for axis, value in fixed.items() if axis != "family"}
    drawn = ({axis: dice.choice(values) for axis, values in free.items()} for _ in range(150))
    cases = (made(dice, **one) for one in drawn)
    return [*itertools.islice((case for case in cases if case.makes_sense), 25)]


def made(dice: random.Random, loader: str, crew: str, noise: str, loop: str, window: int, stops: str) -> Case:
    return Case(loader, *dice.choice(CREWS[crew]), noise, loop, window, stops)


# One case: a plain training, one with the library that is never stopped, and one that is killed.

Line = dict[str, Any]


def trained(case: Case, folder: Path, stops: list[int] | None) -> list[Line]:
    """Return the trail of a training that is killed at its stops, and started again by the same command."""
    folder.mkdir()
    for _ in range(len(stops or ()) + 1):
        life = call(matrix_training.start, case, folder, stops)
        if life[0] == 0:
            break
        assert life[0] == -signal.SIGKILL, f"{folder.name} has failed: {life[1][-3000:]}"
    else:
        raise AssertionError(f"{folder.name} has come to its stops again: {stops}")
    return [json.loads(line) for line in (folder / TRAIL).read_text().splitlines()]


def stops_of(case: Case, trail: list[Line]) -> list[int]:
    """Return the events after which the training is killed: it is saved, and the save is durable."""
    events = [line["number"] for line in trail if line["number"]]
    ends = [line["number"] for line in trail if line["what"] == "end"]
    laps = [[n for n in events if a < n <= b] for a, b in itertools.pairwise([0, *ends])]
    return sorted({*STOPS[case.stops](laps[0], laps[min(1, len(laps) - 1)])})


def problem(case: Case, folder: Path) -> str | None:
    """Return where the three trainings part first, if they do."""
    plain = trained(case, folder / "plain", None)
    straight = trained(case, folder / "straight", [])
    if case.loader != "sample-seeds" and (found := difference(plain, straight)):
        return f"not transparent: {found}"
    stops = stops_of(case, plain)
    found = difference(straight, trained(case, folder / "killed", stops))
    return f"not exact, killed after the events {stops}: {found}" if found else None


def difference(one: list[Line], other: list[Line]) -> str | None:
    """Return the first event that two trainings do not share, and what differs there."""
    for line, there in itertools.zip_longest(one, other, fillvalue={}):
        if line != there:
            what = [name for name in line or there if line.get(name) != there.get(name)]
            at = [f"{found.get('what', 'nothing')} {found.get('number') or ''}" for found in (line, there)]
            return f"at {at[0]} (there: {at[1]}) {', '.join(what)} differ"
    return None


def call(function, case, folder, stops):
    err = folder / "err"
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.setsid()
            signal.alarm(60)
            fd = os.open(err, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
            os.dup2(fd, 2), os.dup2(fd, 1)
            function(case, folder, stops)
            import multiprocessing.util

            multiprocessing.util._exit_function()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    _, status, usage = os.wait4(pid, 0)
    global CPU
    CPU += usage.ru_utime + usage.ru_stime
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    return os.waitstatus_to_exitcode(status), err.read_text()


CPU = 0.0

if __name__ == "__main__":
    import sys
    import time
    import shutil
    import resource
    import torch._dynamo
    import gc

    torch.set_num_threads(1)
    gc.freeze()

    words = sys.argv[1:]
    cases = [case for case in chosen() if all(word in str(case).split() or word.isdigit() for word in words)]
    part = [int(w) for w in words if w.isdigit()]
    if part: cases = cases[part[0]::part[1]]
    base = Path("/tmp/matrix-tmp"); shutil.rmtree(base, ignore_errors=True); base.mkdir()
    total = 0
    for k, case in enumerate(cases):
        folder = base / str(k); folder.mkdir()
        CPU = 0.0; t = time.time()
        try:
            found = problem(case, folder)
        except AssertionError as exc:
            found = str(exc)
        total += CPU
        print(f"{'BAD' if found else 'ok '} {CPU:.1f} s cpu {time.time() - t:.1f} s: {case}", f"\n      {found}" if found else "", flush=True)
        if not found: shutil.rmtree(folder)
    print(f"{total:.0f} s")
