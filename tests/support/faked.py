"""Scripts that train nothing, for what only reads what trainings have written down."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from resumable.trace import trace_file
from resumable.trace.trace_file import At, Record

KINDS = {
    "model": "model",
    "optimizer": "optimizer",
    "scheduler": "scheduler",
    "extra.noise": "generator",
    "vars": "vars",
    "position": "position",
    "random": "random",
}


def boundaries(epochs: int, batches: int) -> Iterator[At]:
    """Yield those of a training whose loops are ours."""
    for epoch in range(epochs):
        for batch in range(1, batches + 1):
            yield At("batch", epoch, batch, epoch * batches + batch)
        yield At("epoch", epoch + 1, 0, (epoch + 1) * batches)


def steps(total: int) -> Iterator[At]:
    """Yield those of a training that counts steps."""
    for step in range(1, total + 1):
        yield At("step", 0, 0, step)


class Start(NamedTuple):
    """How a script was started, for what it does to depend on."""

    trial: int
    """How many trainings were begun before."""
    resumes: int
    environment: Mapping[str, str]
    plan: Mapping[str, Any]


FAILED = """Traceback (most recent call last):
  File "train.py", line 7, in <module>
ValueError: it fails here
"""

Change = Callable[[Record, Start], Record | None]
"""What is otherwise in a record of one start; None: there the script fails."""


class Script:
    """What `audit(start=...)` takes: it writes down what a training would, and stops where it is told to."""

    def __init__(self, places: Iterator[At], change: Change = lambda record, start: record) -> None:
        self._places = [*places]
        self._change = change
        self.starts: list[Start] = []
        self._trials: list[Path] = []

    def __call__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        plan = json.loads(environment["RESUMABLE_AUDIT"])
        path = Path(plan["trace"])
        done = trace_file.read(path) if path.exists() else []
        if path not in self._trials:
            self._trials.append(path)
        place = Path(environment["RESUMABLE_RUN_DIR"]) / "place"
        at = At(*json.loads(place.read_text())) if place.exists() else None
        resumes = sum(record.why == "resumed" for record in done) + bool(at)
        start = Start(self._trials.index(path), resumes, environment, plan)
        self.starts.append(start)
        log.write_text("epoch 0\n")
        with open(path, "a") as file:
            for record in self._records(at, plan):
                if (changed := self._change(record, start)) is None:
                    log.write_text(FAILED)
                    return 1
                file.write(trace_file.to_line(changed) + "\n")
                place.parent.mkdir(exist_ok=True)
                place.write_text(json.dumps(record.at))
        return 143 if Path(plan["left"]).exists() else 0

    def _records(self, done: At | None, plan: Mapping[str, Any]) -> Iterator[Record]:
        at = done or At("outside", 0, 0, 0)
        why = "resumed" if done else "start"
        yield record(at, why, more={"kinds": KINDS, "settings": {}})
        rest = self._places[self._places.index(at) + 1 :] if done in self._places else self._places
        counted, before = 0, "epoch"
        for place in rest:
            yield record(place)
            counted += place.kind != "epoch" or before == "epoch"
            before = place.kind
            if [*place] == plan["stop"] or (plan["stop"] is None and counted == plan["steps"]):
                Path(plan["left"]).touch()
                return


def record(at: At, why: str = "boundary", more: Mapping[str, Any] | None = None, **parts: Any) -> Record:
    """Return what is written down at a boundary; each start finds the same there."""
    found: dict[str, Any] = {
        "model": {"weight": tensor(at.step)},
        "optimizer": {"exp_avg.weight": tensor(at.step), "groups.0.lr": 0.1},
        "scheduler": {"last_epoch": at.epoch},
        "extra.noise": {"state": at.step},
        "vars": {},
        "position": {"epoch": at.epoch, "batch": at.batch, "step": at.step, "metrics.loss": 0.5},
        "random": dict.fromkeys(("python.words", "numpy.state.key", "torch"), at.step),
    }
    batches = [f"batch {at.step}"] if at.kind == "batch" and why == "boundary" else []
    return Record(at, why, batches, parts={**found, **parts}, more=more or {})


def tensor(value: object) -> dict[str, Any]:
    """Return what is written down of a tensor."""
    return {"digest": str(value), "dtype": "float32", "shape": [2]}


def other(found: Record, part: str, **values: Any) -> Record:
    """Return the record with other values of a part."""
    kept = found.parts[part]
    assert isinstance(kept, dict)
    return Record(
        found.at,
        found.why,
        found.batches,
        found.noted,
        {**found.parts, part: {**kept, **values}},
        found.more,
    )
