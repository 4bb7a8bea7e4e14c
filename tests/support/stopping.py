"""A training that is stopped at every tick, twice in a row, next to one that never stopped."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from resumable import RunState

Loop = Callable[[RunState, dict[str, Any], Callable[..., None]], None]
"""What trains: with the state, the objects, and a tick to be called in every body."""


class _Stop(Exception):
    pass


def _bits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().contiguous().numpy().tobytes()
    if isinstance(value, dict):
        return {key: _bits(one) for key, one in value.items()}
    return [_bits(one) for one in value] if isinstance(value, (list, tuple)) else repr(value)


def _generators() -> Any:
    # As bytes: to print the thousand numbers of the generators took a sixth of a test.
    _, numbers, place, *_ = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), numbers.tobytes(), place, random.getstate()


def _start(run_dir: Path, make: Callable[[], dict[str, Any]], loop: Loop, stop: int | None) -> list[Any]:
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    objects, log = make(), []
    names = "model", "optimizer", "loader", "extra", "preempt"
    parts = {name: objects[name] for name in names if name in objects}
    with RunState.load(run_dir, progress=False, **parts) as state:
        # Weak: a search for what a loop uses would otherwise go through all of the state
        own = weakref.ref(state)

        def tick(*seen: Any) -> None:
            log.append((_bits(seen), _generators()))
            if len(log) == stop:
                own().save().wait()
                raise _Stop

        try:
            loop(state, objects, tick)
        except _Stop:
            return log
        log.append(("end", _bits(objects["model"].state_dict()), state.epoch, state.step))
    return log


def _stopped(
    run_dir: Path, make: Callable[[], dict[str, Any]], loop: Loop, stops: tuple[int | None, ...]
) -> list[Any]:
    log: list[Any] = []
    for stop in stops:
        log += _start(run_dir, make, loop, stop)
        if log[-1][0] == "end":
            break
    return log


def differences(
    run_dir: Path, make: Callable[[], dict[str, Any]], loop: Loop, at: Collection[int] = ()
) -> list[int]:
    """Return the ticks at which a training that is stopped there, and again at the next, is another one.

    `at`: the ticks to try; without it every second one: the second stop is at the tick in between.
    """
    whole = _start(run_dir / "whole", make, loop, None)
    ticks = at or range(1, len(whole), 2)
    return [stop for stop in ticks if _stopped(run_dir / str(stop), make, loop, (stop, 1, None)) != whole]
