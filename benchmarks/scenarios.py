"""The scenarios: which training, which contenders, how often; each adds its figures to the result."""

from __future__ import annotations

import contextlib
import shutil
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from . import alone, batches, busy, fresh, listing, measures, start
from .apart import SMALL, SmallApart
from .contenders import CONTENDERS, Contender, missing
from .limits import Limits
from .rounds import Figures, Values, in_turns, reason_of, tell
from .training import Training, bytes_of, gpt, layers, tensors_of

ALL = "everything"
_OURS = "resumable"
_SAVED = {"call", "durable"}
_MEMORY = 1 << 30
"""Bytes that the raw ways write again and again: beside six gigabytes and their image, there is no more."""
_BUSY = _STARTS = 5
"""Rounds of what keeps the cores busy, and of what starts with the import of torch."""
_PATIENCE = 6.0
"""Seconds for one contender's small tensors: some take that long for one save."""


@dataclass(frozen=True)
class Settings:
    """How much is measured."""

    size: float
    """Megabytes of weights and moments."""
    device: str
    rounds: int
    budget: float
    """Seconds after which a contender is not repeated in a scenario."""
    small: int
    """How many small tensors."""
    checkpoints: int
    """How many checkpoints in a run."""
    contenders: tuple[str, ...]
    sizes: tuple[float, ...] = ()
    """Megabytes of further states, of which only a durable save is measured."""
    others: tuple[int, ...] = ()
    """How many other processes keep the cores busy."""


@dataclass
class Result:
    """What was measured, as it is stored."""

    settings: dict[str, Any]
    machine: dict[str, str] = field(default_factory=dict)
    state: dict[str, float] = field(default_factory=dict)
    contenders: dict[str, Values] = field(default_factory=dict)
    limits: dict[str, list[float]] = field(default_factory=dict)
    listing: Values = field(default_factory=dict)
    sizes: dict[str, Values] = field(default_factory=dict)
    """Of each further size, the seconds of a durable save and of the raw ways to write."""
    fresh: Values = field(default_factory=dict)
    batches: dict[str, Values] = field(default_factory=dict)
    start: dict[str, Values] = field(default_factory=dict)
    busy: dict[str, Values] = field(default_factory=dict)
    """By how many other processes there were."""
    errors: dict[str, dict[str, str]] = field(default_factory=dict)
    """Of each contender, what could not be measured and why."""
    seconds: float = 0.0

    def add(self, values: Mapping[str, Values]) -> None:
        """Add what the contenders' rounds gave."""
        for name, columns in values.items():
            self.contenders.setdefault(name, {}).update(columns)


def measure(settings: Settings, folder: Path, result: Result, scenarios: Iterable[str]) -> None:
    """Add the figures of some scenarios to a result."""
    for name in settings.contenders:
        if reason := missing(name):
            result.errors[name] = {ALL: reason}
    for name in scenarios:
        if name in SHARED or _OURS in _names(result):
            SCENARIOS[name](settings, folder, result)


def _names(result: Result) -> list[str]:
    # What fails or hangs in a process of its own must not do it among the others.
    return [name for name in result.settings["contenders"] if ALL not in result.errors.get(name, {})]


@contextlib.contextmanager
def _made(
    training: Callable[[], Training], folder: Path, result: Result
) -> Iterator[tuple[Training, dict[str, Contender]]]:
    """Make a training and its contenders; close them and remove what they saved."""
    made: dict[str, Contender] = {}
    it = training()
    for name in _names(result):
        try:
            made[name] = CONTENDERS[name](it.parts, folder / name, it.device)
        except Exception as exc:
            result.errors.setdefault(name, {})[folder.name] = reason_of(exc)
    try:
        yield it, made
    finally:
        for name, contender in made.items():
            try:
                contender.close()
            except Exception as exc:
                result.errors.setdefault(name, {}).setdefault(folder.name, reason_of(exc))
        shutil.rmtree(folder, ignore_errors=True)


def _turn(
    measured: Callable[..., Figures], training: Training, contender: Contender, numbered: bool = False
) -> Callable[[int], Figures]:
    """Return what `in_turns` calls with the number of the round."""

    def turn(number: int) -> Figures:
        try:
            return measured(training, contender, **({"number": number} if numbered else {}))
        except Exception:
            # It holds what the others need: files open by the ten thousand, a hook on the optimizer.
            with contextlib.suppress(Exception):
                contender.close()
            raise

    return turn


def _alone(settings: Settings, folder: Path, result: Result) -> None:
    for name in _names(result):
        tell(f"in a process of its own: {name}")
        place = folder / "alone" / name
        try:
            figures = alone.measure(name, settings.size, settings.device, place, limit=600.0)
            result.add({name: {column: [value] for column, value in figures.items()}})
        except Exception as exc:
            result.errors[name] = {ALL: reason_of(exc)}
        finally:
            shutil.rmtree(place, ignore_errors=True)


def _saves(settings: Settings, folder: Path, result: Result) -> None:
    make = partial(gpt, settings.size, settings.device)
    with _made(make, folder / "saves", result) as (training, contenders):
        size = bytes_of(training.parts)
        result.state = {
            "bytes": size,
            "tensors": len(tensors_of(training.parts)),
            "step_seconds": training.step_seconds,
        }
        limits = Limits(size, folder / "limits", settings.device)
        jobs = {name: _turn(measures.save_and_load, training, c) for name, c in contenders.items()}
        ways = _ways(limits)
        taken = in_turns("save and load", jobs | ways, settings.rounds, settings.budget, result.errors)
        limits.close()
        result.limits = {name: taken.pop(name)["seconds"] for name in ways if name in taken}
        result.add(taken)


def _ways(limits: Limits) -> dict[str, Callable[[int], Figures]]:
    return {name: lambda number, w=way: {"seconds": w()} for name, way in limits.ways.items()}


def _lost(settings: Settings, folder: Path, result: Result) -> None:
    make = partial(gpt, settings.size, settings.device)
    with _made(make, folder / "lost", result) as (training, contenders):
        steps = {
            name: measures.steps_for(training, {key: statistics.median(found[key]) for key in _SAVED})
            for name in contenders
            if (found := result.contenders.get(name, {})).keys() >= _SAVED
        }
        result.add({name: {"steps": [float(count)]} for name, count in steps.items()})
        jobs = {
            name: _turn(partial(measures.lost, steps=count), training, contenders[name], numbered=True)
            for name, count in steps.items()
        }
        result.add(in_turns("training time", jobs, settings.rounds, settings.budget, result.errors))


def _pauses(settings: Settings, folder: Path, result: Result) -> None:
    make = partial(gpt, settings.size, settings.device)
    with _made(make, folder / "pauses", result) as (training, contenders):
        jobs = {name: _turn(measures.pause, training, contender) for name, contender in contenders.items()}
        result.add(in_turns("pauses", jobs, settings.rounds, settings.budget, result.errors))


def _sizes(settings: Settings, folder: Path, result: Result) -> None:
    for megabytes in settings.sizes:
        make = partial(gpt, megabytes, settings.device)
        where = folder / f"{megabytes:g}"
        ours = replace(settings, contenders=(_OURS,))
        with _made(make, where, replace(result, settings=asdict(ours))) as (training, contenders):
            limits = Limits(bytes_of(training.parts), where / "limits", settings.device, _MEMORY)
            jobs = {name: _turn(measures.save, training, c) for name, c in contenders.items()}
            writes = {name: way for name, way in _ways(limits).items() if name.startswith("write:")}
            taken = in_turns(
                f"{megabytes:g} MB", jobs | writes, settings.rounds, settings.budget, result.errors
            )
            limits.close()
        columns = {name: "durable" if name in jobs else "seconds" for name in taken}
        result.sizes[f"{megabytes:g}"] = {name: taken[name][column] for name, column in columns.items()}


def _frozen(settings: Settings, folder: Path, result: Result) -> None:
    megabytes = min(settings.size, 400.0)
    whole = partial(layers, megabytes, settings.device, 10)
    part = partial(layers, megabytes, settings.device, 1)
    with (
        _made(whole, folder / "whole", result) as (training, wholes),
        _made(part, folder / "part", result) as (other, parts),
    ):
        jobs = {
            name: lambda number, n=name: measures.frozen((training, wholes[n]), (other, parts[n]), number)
            for name in wholes.keys() & parts.keys()
        }
        rounds = settings.rounds
        result.add(in_turns("90 % frozen", jobs, rounds, settings.budget, result.errors))


def _small(settings: Settings, folder: Path, result: Result) -> None:
    for kind in SMALL:
        where = folder / kind
        with contextlib.ExitStack() as processes:
            jobs = {
                name: processes.enter_context(
                    SmallApart(kind, name, settings.small, settings.device, where / name)
                )
                for name in _names(result)
            }
            # They take milliseconds, of which the median wants more than a few.
            rounds = 3 * settings.rounds
            taken = in_turns(
                f"{settings.small} {kind}", jobs, rounds, min(settings.budget / 3, _PATIENCE), result.errors
            )
        shutil.rmtree(where, ignore_errors=True)
        for values in taken.values():
            for column in list(values):
                values[f"{kind}_{column}"] = values.pop(column)
        result.add(taken)


def _listing(settings: Settings, folder: Path, result: Result) -> None:
    result.listing = listing.measure(settings.checkpoints, folder / "listing")


def _fresh(settings: Settings, folder: Path, result: Result) -> None:
    result.fresh = fresh.measure(settings.size, settings.rounds, folder / "fresh", result.errors)


def _batches(settings: Settings, folder: Path, result: Result) -> None:
    result.batches = batches.measure(settings.rounds, folder / "batches", result.errors)


def _start(settings: Settings, folder: Path, result: Result) -> None:
    result.start = start.measure(min(settings.rounds, _STARTS), folder / "start", result.errors)


def _busy(settings: Settings, folder: Path, result: Result) -> None:
    for others in settings.others:
        place = folder / f"busy-{others}"
        size = min(settings.size, 400.0)
        result.busy[str(others)] = busy.measure(size, others, min(settings.rounds, _BUSY), place)


SHARED = ("alone", "saves", "lost", "pauses", "frozen", "small")
"""The scenarios of all contenders; the others are of this library alone."""
SCENARIOS: Mapping[str, Callable[[Settings, Path, Result], None]] = {
    # First, while this process is small: what it holds would be in the way of the others.
    "alone": _alone,
    "fresh": _fresh,
    "start": _start,
    "batches": _batches,
    "saves": _saves,
    # After the saves, which say how many steps a save takes.
    "lost": _lost,
    "pauses": _pauses,
    "frozen": _frozen,
    "small": _small,
    "sizes": _sizes,
    "busy": _busy,
    "listing": _listing,
}
