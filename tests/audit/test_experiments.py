"""Why a script does something else each time: found by taking the possible causes away in turn."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Collection
from dataclasses import replace

import faked
import pytest
import torch
from faked import Script, Start

from resumable.audit import audit, operations, verdicts
from resumable.audit import causes as experiments
from resumable.audit.diagnosis import Finding
from resumable.trace.trace_file import Record


def is_away(cause: str, start: Start) -> bool:
    """Whether a start was made without that cause."""
    stilled = start.environment.get("RESUMABLE_STILL", "").split()
    return {
        "hash": start.environment.get("PYTHONHASHSEED") == "0",
        "operation": start.plan.get("deterministic") is True,
        "threads": start.environment.get("OMP_NUM_THREADS") == "1",
    }.get(cause, cause in stilled)


class Unsteady(Script):
    """A script that does something else each time, unless all of its causes are away."""

    def __init__(self, causes: Collection[str], what: str = "numbers", refused_at: int = 99) -> None:
        super().__init__(faked.boundaries(4, 4), self._changed)
        self._causes, self._what, self._refused_at = causes, what, refused_at

    def outcome(self, start: Start) -> object:
        """What comes of it, this time."""
        return -start.trial - 1

    def _changed(self, record: Record, start: Start) -> Record | None:
        if start.plan.get("deterministic") is True and record.at.step >= self._refused_at:
            return None
        settings = {"torch.backends.cudnn.benchmark": "benchmark" in self._causes}
        more = {**record.more, "settings": settings} if record.more else {}
        record = replace(record, more=more)
        names = {"torch": "torch", "python": "python.words", "numpy": "numpy.state.key"}
        for cause in names.keys() & {*self._causes}:
            if not is_away(cause, start):
                record = faked.other(record, "random", **{names[cause]: start.trial + 1000})
        if all(is_away(cause, start) for cause in self._causes) or record.at.step < 2:
            return record
        if self._what == "data" and record.batches:
            record = replace(record, batches=[f"of {self.outcome(start)}"])
        return faked.other(record, "model", weight=faked.tensor(self.outcome(start)))


def why(script: Script) -> Finding:
    found = audit.audit(["python", "train.py"], steps=8, start=script)
    (finding,) = found.findings
    assert finding.kind == "repeat", verdicts.headline(found)
    return finding


@pytest.mark.parametrize("cause", experiments.CAUSES)
@pytest.mark.quick(3)
def test_the_one_cause_without_which_it_repeats_itself_is_named(cause: str) -> None:
    finding = why(Unsteady([cause], "data"))

    assert finding.cause == cause
    assert finding.fix == experiments.CAUSES[cause].fix
    assert experiments.CAUSES[cause].because in finding.text


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    "causes",
    [("python", "numpy"), ("clock", "hash"), ("operation", "threads"), ("numpy", "clock", "operation")],
)
def test_causes_that_have_to_be_away_together_are_all_named_and_no_other(causes: tuple[str, ...]) -> None:
    finding = why(Unsteady(causes, "data"))

    assert {*finding.cause.split(", ")} == {*causes}


def test_a_cause_that_is_unknown_is_said_to_be_unknown() -> None:
    finding = why(Unsteady(["something else"]))

    assert finding.cause == "unknown"
    assert "nothing that was tried makes it repeat itself" in finding.text


def test_a_generator_of_torch_that_is_seeded_by_the_system_is_named() -> None:
    def seeded(record: Record, start: Start) -> Record:
        found = faked.other(record, "random", torch=start.trial + 1000)
        return faked.other(found, "model", weight=faked.tensor(-start.trial))

    finding = why(Script(faked.boundaries(4, 4), seeded))

    assert finding.cause == "torch"
    assert "torch's generator is not seeded" in finding.text


def test_a_generator_that_stands_elsewhere_and_is_no_cause_is_not_named() -> None:
    def changed(record: Record, start: Start) -> Record:
        record = faked.other(record, "random", **{"numpy.state.key": start.trial})
        if is_away("hash", start):
            return record
        return faked.other(record, "model", weight=faked.tensor(-start.trial - 1))

    assert why(Script(faked.boundaries(4, 4), changed)).cause == "hash"


PUT = "put_ (train.py:9)"


class Inspected(Unsteady):
    """One with an operation of which torch has no deterministic implementation."""

    def _changed(self, record: Record, start: Start) -> Record | None:
        found = super()._changed(record, start)
        if found and start.plan.get("inspects") and record.why == "start":
            return replace(found, more={**found.more, "operations": [PUT]})
        return found


def test_an_operation_that_cannot_be_ruled_out_is_named_as_possible() -> None:
    finding = why(Inspected(["something else"], refused_at=1))

    assert finding.cause == "unknown"
    assert "(it may be an operation: put_; with deterministic ones the script fails)" in finding.text
    assert finding.names == [PUT]
    assert "deterministic=True" not in finding.fix


def test_torch_names_its_operations_that_are_not_deterministic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    found = operations.watch()
    try:
        torch.zeros(2).put_(torch.tensor([0, 0]), torch.ones(2))
    finally:
        torch.use_deterministic_algorithms(False)

    assert [re.sub(r"\d+", "9", name) for name in found] == ["put_ (test_experiments.py:9)"]


class Rarely(Unsteady):
    """One that mostly does the same, and now and then something else."""

    def __init__(self, causes: Collection[str], seldom: Collection[int]) -> None:
        super().__init__(causes)
        self._seldom = seldom

    def outcome(self, start: Start) -> object:
        return start.trial if start.trial in self._seldom else "the same"


@pytest.mark.parametrize("seldom", [[2], [1, 6]])
def test_what_differs_rarely_is_reported_with_how_often(
    seldom: list[int],
) -> None:
    script = Rarely(["something else"], seldom)

    finding = why(script)

    assert finding.cause == "unknown"
    assert f"is another one in {len(seldom)} of 9 starts, first at" in finding.text
    assert len(script.starts) == 10


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(5))
def test_what_was_alike_by_chance_is_not_taken_for_the_cause(seed: int) -> None:
    class OneOfTwo(Unsteady):
        def outcome(self, start: Start) -> object:
            # The first three are not all alike, or there would be no finding
            coin = random.Random(100 * seed + start.trial).random() < 0.5
            return {0: False, 2: True}.get(start.trial, coin)

    assert why(OneOfTwo(["clock"])).cause in ("clock", "unknown")
    assert why(OneOfTwo(["something else"])).cause == "unknown"
