"""The goals of this library, and what a result says of each."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .contenders import CONTENDERS
from .ratios import COLUMNS, OURS, batch, durable, fresh, middle, over, pairs, ratios, seconds
from .scenarios import Result

Value = Callable[[Result], float | None]


@dataclass(frozen=True)
class Goal:
    """A figure that this library is to reach."""

    what: str
    limit: float
    value: Value
    is_floor: bool = False

    def is_met(self, value: float) -> bool:
        """Return whether the goal is reached."""
        return value >= self.limit if self.is_floor else value <= self.limit


def _of(key: str) -> Value:
    column = next(column for column in COLUMNS if column.key == key)
    return lambda result: middle(ratios(result, OURS, column))


def _milliseconds(key: str) -> Value:
    def value(result: Result) -> float | None:
        found = seconds(result, OURS, key)
        return None if found is None else found * 1e3

    return value


def _over_best_async(result: Result) -> float | None:
    peers = [name for name, contender in CONTENDERS.items() if contender.is_async and name != OURS]
    found = [lost for name in peers if (lost := seconds(result, name, "lost")) is not None]
    return over(seconds(result, OURS, "lost"), min(found, default=None))


def _durable(megabytes: float) -> Value:
    return lambda result: middle(durable(result, megabytes))


def _busy(result: Result) -> float | None:
    # The worst of them, however busy the cores are.
    return max((statistics.median(values["ratio"]) for values in result.busy.values()), default=None)


def _microseconds_more(setup: str) -> Value:
    def value(result: Result) -> float | None:
        more = [(ours - plain) * 1e6 for ours, plain in zip(*batch(result, setup, "main"), strict=False)]
        return middle(more)

    return value


def _throughput(setup: str) -> Value:
    def value(result: Result) -> float | None:
        ours, plain = batch(result, setup, "batch")
        return middle(pairs(plain, ours))

    return value


def _start(kind: str, figure: str) -> Value:
    def value(result: Result) -> float | None:
        found = middle(result.start.get(kind, {}).get(figure, []))
        return None if found is None else found * 1e3

    return value


def _listed(what: str) -> Value:
    return lambda result: middle(
        pairs(result.listing.get(f"{what}_many", []), result.listing.get(f"{what}_few", []))
    )


def _fresh(result: Result) -> float | None:
    return middle(fresh(result))


def _small() -> Iterator[Goal]:
    for kind in ("tensors", "parameters"):
        yield Goal(f"10,000 {kind} of 256 B: load, ms", 30, _milliseconds(f"{kind}_load"))
        yield Goal(f"10,000 {kind} of 256 B: save, ms", 12, _milliseconds(f"{kind}_durable"))
        yield Goal(f"10,000 {kind} of 256 B: call, ms", 8, _milliseconds(f"{kind}_call"))


def _mapped(result: Result) -> float | None:
    return over(seconds(result, "torch.save, tuned", "load"), seconds(result, OURS, "load"))


GOALS: Sequence[Goal] = (
    *(
        Goal(f"until durable / raw write: {size}", 1.2, _durable(megabytes))
        for size, megabytes in (("100 MB", 100), ("1.5 GB", 1493), ("6 GB", 6000))
    ),
    Goal("training time lost / torch.save and fsync", 0.11, _of("lost")),
    Goal("training time lost / best background save of a peer", 0.22, _over_best_async),
    Goal("training time lost, cores busy / torch.save and fsync, the worst", 0.3, _busy),
    Goal("load, verified, live objects / raw read", 2.1, _of("load")),
    Goal("load, verified, fresh process / raw read into memory as fresh", 1.4, _fresh),
    Goal("torch.load(mmap=True), every page touched / load", 3.0, _mapped, is_floor=True),
    *_small(),
    Goal(
        "a batch, no workers, nothing drawn: us more than the plain loader",
        8,
        _microseconds_more("0 workers, nothing drawn"),
    ),
    Goal(
        "a batch, no workers, numbers drawn: us more than the plain loader",
        8,
        _microseconds_more("0 workers, numbers drawn"),
    ),
    Goal(
        "batches of 8 scalars, 2 workers, numbers drawn: throughput / plain",
        0.95,
        _throughput("2 workers, numbers drawn"),
        is_floor=True,
    ),
    Goal("a small run begins, torch imported, ms", 10, _start("fresh", "load")),
    Goal("a small run resumes, torch imported, ms", 10, _start("resume", "load")),
    Goal("from resumable import RunState, torch imported, ms", 40, _start("resume", "import")),
    Goal("import resumable, nothing imported before, ms", 40, _start("alone", "import_alone")),
    Goal("many checkpoints: a run opens / one with ten", 1.05, _listed("load")),
    Goal("many checkpoints: a save / one among ten", 1.02, _listed("save")),
    Goal("peak extra memory / state", 1.02, _of("memory")),
    Goal("90 % frozen: bytes written / state", 0.101, _of("frozen_bytes")),
    Goal("90 % frozen: time / nothing frozen", 0.25, _of("frozen_time")),
)
