"""Training time lost to a save while other processes keep the cores busy, next to torch.save in the same run.

python -m benchmarks.busy                        # 400 MB, with no, two and four other processes
python -m benchmarks.busy --size 1493 --workers 0
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import statistics
import tempfile
import time
import warnings
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from .apart import Apart
from .contenders import CONTENDERS, Contender
from .rounds import Figures, Values, in_turns
from .training import Training, gpt

NAMES = ("resumable", "torch.save")
_seconds = time.perf_counter


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep `count` other processes at work, at this one's priority, as the workers of a loader are."""
    with contextlib.ExitStack() as workers:
        started = [workers.enter_context(Apart(_work)) for _ in range(count)]
        for worker in started:
            worker.receive()
        yield


def _work(connection: Connection) -> None:
    sample = os.urandom(1 << 18)
    connection.send("at work")
    while not connection.poll():
        zlib.decompress(zlib.compress(sample, 1))


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """Let torch compute in `count` threads: several wait for each other, and on busy cores for each turn."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def lost(training: Training, contender: Contender, number: int, steps: int) -> Figures:
    """Return the training time that a save takes: so many steps with it, less the mean of those around it.

    With it: until both the steps are done and the save is durable.
    """
    before = training.each(steps)
    start = _seconds()
    wait = contender.save()
    called = _seconds()
    with_it = training.each(steps)
    stepped = _seconds()
    wait()
    ended = _seconds()
    contender.tidy()
    after = training.each(steps)
    alone = (sum(before) + sum(after)) / 2
    return {
        "lost": ended - start - alone,
        "call": called - start,
        "first_step": with_it[0] - statistics.median(before + after),
        "wait": ended - stepped,
        "noise": sum(after) - sum(before),
    }


def steps_for(training: Training, contender: Contender) -> int:
    """Return in how many steps that go on meanwhile a save is durable, and one more."""
    found = []
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            training.step()
            saved = pool.submit(contender.save())
            count = 1
            while not saved.done():
                training.step()
                count += 1
            contender.tidy()
            found.append(count)
    return max(found) + 1


def measure(size: float, others: int, rounds: int, folder: Path, names: Sequence[str] = NAMES) -> Values:
    """Return the figures of each contender, as `name: column`."""
    training = gpt(size, "cpu")
    errors: dict[str, dict[str, str]] = {}
    with busy(others), _threads(1 if others else torch.get_num_threads()):
        made = {name: CONTENDERS[name](training.parts, folder / name, "cpu") for name in names}
        training.steps(2)
        steps = max(steps_for(training, contender) for contender in made.values())
        jobs = {name: partial(lost, training, contender, steps=steps) for name, contender in made.items()}
        taken = in_turns(f"{others} other processes, {steps} steps", jobs, rounds, 600.0, errors)
        for contender in made.values():
            contender.close()
    if errors:
        raise RuntimeError(str(errors))
    found = {f"{name}: {column}": values for name, of in taken.items() for column, values in of.items()}
    if len(names) == 2:
        ours, theirs = (taken[name]["lost"] for name in names)
        found["ratio"] = [a / b for a, b in zip(ours, theirs, strict=True)]
    return found


def _row(values: Sequence[float], scale: float) -> str:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    digits = 0 if scale > 1 else 2
    return f"{scale * middle:.{digits}f} ({scale * low:.{digits}f}..{scale * high:.{digits}f})"


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser("python -m benchmarks.busy", description=__doc__)
    parser.add_argument("--size", type=float, default=400, help="megabytes of weights and moments (400)")
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[0, 2, 4], help="how many others work (0 2 4)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="how often all is repeated (7)")
    parser.add_argument("--only", nargs="+", choices=tuple(CONTENDERS), default=NAMES)
    parser.add_argument("--folder", type=Path, default=Path(), help="the disk to measure (here)")
    parser.add_argument("--out", type=Path, help="where the figures go, as JSON")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable()
    found: dict[int, Values] = {}
    for others in arguments.workers:
        with tempfile.TemporaryDirectory(prefix=".benchmark-", dir=arguments.folder) as folder:
            place = Path(folder).resolve()
            found[others] = measure(arguments.size, others, arguments.rounds, place, arguments.only)
        for name, values in found[others].items():
            print(f"{others} others, {name}: {_row(values, 1 if name == 'ratio' else 1000)}", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
