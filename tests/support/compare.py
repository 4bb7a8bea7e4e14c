"""Trainings that have to do the same: if one does not, a test says what differs first, and at which step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from resumable.audit import diagnosis, naming, recorder
from resumable.audit.diagnosis import Unlike
from resumable.audit.trials import Trial
from resumable.parts.parts import SLOTS, Parts
from resumable.position.position import Position
from resumable.trace import trace_file
from resumable.trace.trace_file import At, Record


class Trail(Trial):
    """All that a training was after each step: what it did again after a resume counts as done last."""

    def __init__(self, generators: Collection[str] = ("python", "numpy", "torch")) -> None:
        super().__init__("a training in this process", Path())
        self._generators = generators
        self._found: dict[At, Record] = {}
        self._samples = BytesIO()

    def note(self, step: int, parts: Mapping[str, Any], batches: Sequence[str] = ()) -> None:
        """Write all down, as an audited process does at a boundary, without a trace in the training."""
        slots = {slot: parts.get(slot) for slot in SLOTS}
        at = At("step", 0, 0, step)
        whole = recorder.whole(Parts(slots, {}, Position({})), self._samples)
        self._found[at] = Record(at, "boundary", [*batches], parts=self._own(whole))
        self.ranks = [[*self._found.values()]]

    def sample(self, rank: int, begin: int, end: int) -> bytes:
        return self._samples.getvalue()[begin:end]

    def _own(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        own = {name: part for name, part in parts.items() if name != "position"}
        drawn = own["random"].items()
        return {**own, "random": {n: v for n, v in drawn if n.partition(".")[0] in self._generators}}


def trail_of(step: int, parts: Mapping[str, Any], generators: Collection[str]) -> Trail:
    """Return what a training is now, after so many steps."""
    trail = Trail(generators)
    trail.note(step, parts)
    return trail


def first(straight: Trial, other: Trial) -> str:
    """Return in what two trainings differ first, in one line: the message of an assertion."""
    return next(_told(straight, other), "all that was written down at the steps is equal: look at the end")


def _told(straight: Trial, other: Trial) -> Iterator[str]:
    for rank, (records, others) in enumerate(zip(straight.ranks, other.ranks, strict=False)):
        there = {(record.at, record.why): record for record in others}
        for place, record in enumerate(records):
            met = there.get((record.at, record.why))
            if met and (found := trace_file.differences(record, met)):
                yield _line(
                    straight, other, Unlike(record, met, found, diagnosis.first_of(found), place, rank)
                )
                break


def _line(straight: Trial, other: Trial, unlike: Unlike) -> str:
    found = unlike.first
    at = found.at if found.at.epoch or found.at.batch else f"step {found.at.step}"
    rank = f" on rank {unlike.rank}" if len(straight.ranks) > 1 else ""
    what = f"{naming.of(found)} {diagnosis.how_far(straight, other, found, unlike.rank)} at {at}{rank}"
    others = [one for one in unlike.differences if one.part != found.part]
    # What was drawn is sooner the cause than what was computed
    rest = [*dict.fromkeys(naming.of(one) for one in sorted(others, key=lambda one: one.part != "random"))]
    also = [f"{', '.join(rest[:3])} there too"] if rest else []
    return "; ".join([what, *also, *diagnosis.evidence(unlike)])


def first_of_traces(straight: Path, other: Path) -> str:
    """Return in what two trainings differ first whose RunState has written a trace, whatever its ranks."""
    return first(*(_read(path) for path in (straight, other)))


def _read(path: Path) -> Trial:
    trial = Trial(path.name, path.parent)
    while (file := trace_file.path_of(path, len(trial.ranks))).exists():
        trial.ranks.append(trace_file.read(file))
    return trial
