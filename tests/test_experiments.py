"""Why a script does something else each time: found by taking the possible causes away in turn."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest
import told
from told import Script, Start

from resumable import audit, experiments, verdicts
from resumable.diagnosis import Finding
from resumable.traces import Record


def is_away(cause: str, start: Start) -> bool:
    """Whether a start was made without that cause."""
    stilled = start.environment.get("RESUMABLE_STILL", "").split()
    return {
        "hash": start.environment.get("PYTHONHASHSEED") == "0",
        "operation": start.plan.get("deterministic") is True,
        "benchmark": start.plan.get("benchmark") is False,
        "threads": start.environment.get("OMP_NUM_THREADS") == "1",
    }.get(cause, cause in stilled)


class Unsteady(Script):
    """A script that does something else each time, unless all of its causes are away."""

    def __init__(self, causes: Collection[str], what: str = "numbers") -> None:
        super().__init__(told.boundaries(4, 4), self._changed)
        self._causes, self._what = causes, what

    def _changed(self, record: Record, start: Start) -> Record:
        settings = {"torch.backends.cudnn.benchmark": "benchmark" in self._causes}
        more = {**record.more, "settings": settings} if record.more else {}
        record = replace(record, more=more)
        names = {"torch": "torch", "python": "python.words", "numpy": "numpy.state.key"}
        for cause in names.keys() & {*self._causes}:
            if not is_away(cause, start):
                record = told.other(record, "random", **{names[cause]: start.trial + 1000})
        if all(is_away(cause, start) for cause in self._causes) or record.at.step < 2:
            return record
        if self._what == "data" and record.batches:
            record = replace(record, batches=[f"of {start.trial}"])
        return told.other(record, "model", weight=told.tensor(-start.trial - 1))


def why(script: Script) -> Finding:
    found = audit.audit(["python", "train.py"], steps=8, start=script)
    (finding,) = found.findings
    assert finding.kind == "repeat", verdicts.headline(found)
    return finding


@pytest.mark.parametrize("what", ["numbers", "data"])
@pytest.mark.parametrize("cause", experiments.CAUSES)
def test_the_one_cause_without_which_it_repeats_itself_is_named(cause: str, what: str) -> None:
    finding = why(Unsteady([cause], what))

    assert finding.cause == cause
    assert finding.fix == experiments.CAUSES[cause].fix
    assert experiments.CAUSES[cause].because in finding.text


@pytest.mark.parametrize(
    "causes",
    [("python", "numpy"), ("clock", "hash"), ("operation", "threads"), ("numpy", "clock", "operation")],
)
def test_causes_that_have_to_be_away_together_are_all_named_and_no_other(causes: tuple[str, ...]) -> None:
    finding = why(Unsteady(causes, "data"))

    assert {*finding.cause.split(", ")} == {*causes}


def test_a_cause_that_nobody_knows_is_said_to_be_unknown() -> None:
    finding = why(Unsteady(["something else"]))

    assert finding.cause == "unknown"
    assert "nothing that was tried makes it repeat itself" in finding.text


def test_a_generator_of_torch_that_is_seeded_by_the_system_is_named() -> None:
    def seeded(record: Record, start: Start) -> Record:
        found = told.other(record, "random", torch=start.trial + 1000)
        return told.other(found, "model", weight=told.tensor(-start.trial))

    finding = why(Script(told.boundaries(4, 4), seeded))

    assert finding.cause == "torch"
    assert "torch's generator is not seeded" in finding.text


def test_a_generator_that_stands_elsewhere_and_is_no_cause_is_not_named() -> None:
    def changed(record: Record, start: Start) -> Record:
        record = told.other(record, "random", **{"numpy.state.key": start.trial})
        if is_away("hash", start):
            return record
        return told.other(record, "model", weight=told.tensor(-start.trial - 1))

    assert why(Script(told.boundaries(4, 4), changed)).cause == "hash"


def test_the_operations_that_are_not_deterministic_are_named_with_their_line() -> None:
    class Inspected(Unsteady):
        def _changed(self, record: Record, start: Start) -> Record:
            one = {"name": "index_put_", "where": "train.py:9", "why": "it adds in any order"}
            found = super()._changed(record, start)
            if start.plan.get("inspects") and record.why == "start":
                return replace(found, more={**found.more, "operations": [one]})
            return found

    finding = why(Inspected(["operation"]))

    assert finding.names == ["index_put_ (train.py:9): it adds in any order"]


def test_no_experiment_is_made_with_a_script_that_repeats_itself() -> None:
    script = Script(told.boundaries(4, 4))

    audit.audit(["python", "train.py"], steps=8, start=script)

    assert not any(is_away(cause, start) for cause in experiments.CAUSES for start in script.starts)
