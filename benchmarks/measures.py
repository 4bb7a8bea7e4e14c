"""What is measured of a contender: each function is one turn of it and returns its figures."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from . import files
from .contenders import Contender
from .rounds import Figures
from .training import Training, bytes_of

_seconds = time.perf_counter
_BEFORE = 2  # steps


def save_and_load(training: Training, contender: Contender) -> Figures:
    """Save and wait for the disk, then load what has just been saved from the page cache."""
    saved = save(training, contender)
    files.warm(contender.path)
    training.synchronize()
    start = _seconds()
    contender.load()
    training.synchronize()
    loaded = _seconds() - start
    training.settle()
    contender.tidy()
    return {**saved, "load": loaded}


def save(training: Training, contender: Contender) -> Figures:
    """Save a state that differs from the one before, and wait until it is durable."""
    training.steps(1)
    start = _seconds()
    wait = contender.save()
    call = _seconds() - start
    wait()
    return {"call": call, "durable": _seconds() - start}


def steps_for(training: Training, figures: Figures) -> int:
    """Return how many steps a background write fits into, when both compete for the cores."""
    background = figures["durable"] - figures["call"]
    return max(2, math.ceil(2.5 * background / training.step_seconds) + 1)


def lost(training: Training, contender: Contender, steps: int, number: int) -> Figures:
    """Return the training time that a save takes: so many steps and two before it, with it and without.

    With it: until both the steps are done and the save is durable. Which of the two comes first
    alternates. The save begins in a running loop, in which the processor is ahead of a GPU.
    """
    alone: list[float] = []
    training.synchronize()
    if number % 2:
        alone = training.each(_BEFORE + steps)
    start = _seconds()
    training.each(_BEFORE, ends=False)
    wait = contender.save()
    with_it = training.each(steps)
    wait()
    total = _seconds() - start
    contender.tidy()
    if not alone:
        alone = training.each(_BEFORE + steps)
    return {"lost": total - sum(alone), "slowest_step": max(with_it) - statistics.median(alone)}


def longest_item(training: Training, contender: Contender, steps: int) -> Figures:
    """Return how much longer a save makes the longest step of a loop that reads its loss in every step."""
    training.synchronize()
    alone = training.each(steps, reads=True)
    wait = contender.save()
    with_it = training.each(steps, reads=True)
    wait()
    contender.tidy()
    return {"item": max(with_it) - statistics.median(alone)}


def pause(training: Training, contender: Contender) -> Figures:
    """Return for how long the main thread, which does nothing but look at the clock, is kept from it."""
    training.steps(1)
    start = _seconds()
    wait = contender.save()
    call = _seconds() - start
    worst = worst_gap(wait)
    contender.tidy()
    return {"pause": max(call, worst)}


def worst_gap(job: Callable[[], object]) -> float:
    """Look at the clock while a thread does the job; return the longest time between two looks."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(job)
        last, worst = _seconds(), 0.0
        while not future.done():
            now = _seconds()
            worst = max(worst, now - last)
            last = now
        future.result()
    return worst


def frozen(whole: tuple[Training, Contender], part: tuple[Training, Contender], number: int) -> Figures:
    """Save all layers changed, and one of ten; return what the second takes of the first."""
    taken: dict[bool, tuple[float, float]] = {}
    for is_part in (False, True) if number % 2 else (True, False):
        training, contender = part if is_part else whole
        before = files.sizes(contender.folder)
        seconds = save(training, contender)["durable"]
        new = {inode: size for inode, size in files.sizes(contender.folder).items() if inode not in before}
        taken[is_part] = seconds, sum(new.values()) / bytes_of(training.parts)
        contender.tidy()
    return {
        "frozen_durable": taken[True][0],
        "frozen_time": taken[True][0] / taken[False][0],
        "frozen_bytes": taken[True][1],
    }
