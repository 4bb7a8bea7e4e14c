"""From what trainings have written down to what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import faked
import pytest
from faked import KINDS

from resumable.audit import diagnosis, losses
from resumable.audit.trials import Trial
from resumable.trace.trace_file import At, Record

PLACES = [*faked.boundaries(3, 4)]
STOP = PLACES[2]


def straight(*change: Record) -> Trial:
    """Return a training that was never stopped, with other records at some places."""
    start = faked.record(At("outside", 0, 0, 0), "start", more={"kinds": KINDS})
    return of([start, *map(faked.record, PLACES)], change)


def stopped(*change: Record) -> Trial:
    """Return one that was stopped at STOP, and resumed."""
    at = PLACES.index(STOP) + 1
    records = [
        *straight().records[: at + 1],
        faked.record(STOP, "resumed"),
        *map(faked.record, PLACES[at:]),
    ]
    return of(records, change)


def of(records: Sequence[Record], change: Sequence[Record]) -> Trial:
    by_place = {(record.at, record.why): record for record in change}
    trial = Trial("of a test", Path())
    trial.ranks = [[by_place.get((record.at, record.why), record) for record in records]]
    return trial


def changed(place: int, part: str, why: str = "boundary", **values: Any) -> Record:
    at = STOP if why == "resumed" else PLACES[place]
    return faked.other(faked.record(at, why), part, **values)


def with_seen(record: Record, **digests: str) -> Record:
    """Let a record tell of things that no part holds, by their digests."""
    kinds = {"generator": "torch.Generator", "curriculum": "Curriculum"}
    seen = {
        name: {
            "kind": kinds.get(name, "int"),
            "digest": digest,
            "value": None,
            "fix": f"extra={{'{name}': {name}}}",
        }
        for name, digest in digests.items()
    }
    return replace(record, more={**record.more, "unregistered": seen})


def test_two_trainings_that_do_the_same_do_not_part() -> None:
    assert diagnosis.first_unlike(straight(), straight()) is None
    assert diagnosis.after_resume(straight(), stopped(), [STOP], set()) is None


def test_the_first_place_where_they_part_is_found_and_in_what() -> None:
    other = straight(changed(6, "model", weight=1), changed(4, "optimizer", **{"exp_avg.weight": 1}))

    found = diagnosis.first_unlike(straight(), other)

    assert found
    assert (found.one.at, [one.part for one in found.differences]) == (PLACES[4], ["optimizer"])


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("vars", "seconds"),
        ("random", "torch"),
        ("extra.noise", "state"),
        ("position", "metrics.seconds"),
        ("position", "generators.0"),
    ],
)
def test_what_is_only_shown_or_drawn_from_makes_no_other_training(part: str, name: str) -> None:
    other = straight(changed(4, part, **{name: 12345}))

    assert diagnosis.first_unlike(straight(), other) is None
    assert diagnosis.unsteady([straight(), other]) == {(part, name)}


def test_what_is_unsteady_by_itself_is_no_alarm_after_a_resume() -> None:
    after = stopped(changed(4, "vars", seconds=3))

    assert diagnosis.after_resume(straight(), after, [STOP], set()) is not None
    assert diagnosis.after_resume(straight(), after, [STOP], {("vars", "seconds")}) is None


def test_what_a_resume_has_not_put_back_is_found_before_the_first_batch() -> None:
    after = stopped(changed(3, "optimizer", "resumed", **{"exp_avg.weight": faked.tensor("x")}))

    unlike = diagnosis.after_resume(straight(), after, [STOP], set())
    assert unlike
    finding = diagnosis.of_resume(straight(), after, unlike, [])

    assert finding.kind == "state"
    assert finding.text == (
        "optimizer exp_avg of weight differs after the resume at step 3 (epoch 0, batch 3)"
    )


def test_an_evaluation_as_the_first_batch_after_a_resume_is_no_alarm() -> None:
    first = faked.other(faked.record(STOP, "first"), "model", eval=["", "0"])
    after = stopped()
    after.ranks[0].insert(5, first)

    assert diagnosis.after_resume(straight(), after, [STOP], set()) is None

    after.ranks[0][5] = faked.other(first, "model", weight=faked.tensor(-1))
    assert diagnosis.after_resume(straight(), after, [STOP], set())


def finding(after: Trial, before: Trial | None = None) -> diagnosis.Finding:
    one = before or straight()
    unlike = diagnosis.after_resume(one, after, [STOP], set())
    assert unlike
    gone = losses.lost(one, after, [STOP], set(), unlike)
    return diagnosis.of_resume(one, after, unlike, gone)


def test_a_batch_that_is_another_one_comes_before_all_that_follows_from_it() -> None:
    at = faked.other(faked.other(faked.record(PLACES[3]), "model", weight=1), "random", torch=1)

    found = finding(stopped(replace(at, batches=["another"])))

    assert (found.kind, found.what) == ("data", "the batch")


def test_a_generator_that_stands_elsewhere_comes_before_the_weights() -> None:
    at = faked.other(faked.other(faked.record(PLACES[3]), "model", weight=1), "random", torch=1)

    found = finding(stopped(at))

    assert (found.kind, found.what) == ("randomness", "torch's generator")
    assert "batch digests are equal" in found.evidence
    assert "all global generators are equal" not in found.evidence


def test_a_learning_rate_that_is_another_one_is_state_that_is_missing() -> None:
    at = faked.other(faked.record(PLACES[3]), "optimizer", **{"groups.0.lr": 0.2, "exp_avg.weight": 1})

    found = finding(stopped(faked.other(at, "model", weight=1)))

    assert (found.kind, found.what) == ("state", "optimizer lr of group 0")
    assert found.text.startswith("optimizer lr of group 0 differs (0.1 and 0.2) at step 4")
    assert "learning rates are equal" not in found.evidence


def test_numbers_that_differ_for_no_known_reason_are_called_that() -> None:
    found = finding(stopped(changed(3, "model", weight=faked.tensor(1))))

    assert found.kind == "numbers"
    assert {*found.evidence} == {
        "batch digests are equal",
        "all global generators are equal",
        "learning rates are equal",
    }
    assert "--deterministic" in found.fix


def lost_by_the_resume(name: str) -> tuple[Trial, Trial]:
    """Return two trainings, the second of which has lost something when it was resumed."""
    seen = [with_seen(faked.record(at), **{name: str(at.step)}) for at in PLACES]
    after = stopped(*seen[:3], *(faked.other(record, "model", weight=-1) for record in seen[3:]))
    after.ranks[0].insert(5, with_seen(faked.record(STOP, "first"), **{name: "anew"}))
    return straight(*seen), after


@pytest.mark.parametrize(("name", "kind"), [("generator", "randomness"), ("curriculum", "state")])
def test_numbers_that_differ_where_something_was_lost_are_blamed_on_it(name: str, kind: str) -> None:
    before, after = lost_by_the_resume(name)

    found = finding(after, before)

    assert found.kind == kind
    assert [one.partition(" ")[0] for one in found.names] == [name]
    assert found.fix == f"extra={{'{name}': {name}}}"


def test_a_training_that_continues_somewhere_else_is_reported_as_such() -> None:
    after = stopped()
    after.ranks[0][5] = faked.record(At("batch", 0, 7, 3))

    found = finding(after)

    assert (found.kind, found.what) == ("state", "the boundary")


def test_the_rank_that_parts_first_is_named() -> None:
    one, other = straight(), stopped()
    one.ranks.append(one.ranks[0])
    other.ranks.append(stopped(changed(3, "model", weight=1)).ranks[0])
    other.ranks[0] = stopped(changed(5, "model", weight=1)).ranks[0]

    unlike = diagnosis.after_resume(one, other, [STOP], set())

    assert unlike
    assert (unlike.rank, unlike.one.at) == (1, PLACES[3])


def sampled(folder: Path, name: str, *values: float) -> Trial:
    """Return a training that has written a sample of a tensor."""
    import numpy as np

    trial = straight()
    trial.folder = folder / name
    trial.folder.mkdir()
    raw = np.array(values, "float32").tobytes()
    (trial.folder / "boundaries.samples").write_bytes(b"??" + raw)
    weight = {**faked.tensor(name), "sample": [2, 2 + len(raw)]}
    trial.ranks[0][4] = faked.other(trial.ranks[0][4], "model", weight=weight)
    return trial


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 2.0, 3.5], "differs by up to 0.5 (in 1 of 3 numbers)"),
        ([1.0, 2.0, float("nan")], "differs by up to 0 (in 1 of 3 numbers)"),
        ([1.0, 2.0, 3.0], "differs, but in none of the 3 numbers that were looked at"),
    ],
)
def test_how_far_a_tensor_is_from_the_other_is_reported(
    tmp_path: Path, values: list[float], expected: str
) -> None:
    one, other = sampled(tmp_path, "one", 1, 2, 3), sampled(tmp_path, "other", *values)

    unlike = diagnosis.first_unlike(one, other)

    assert unlike
    assert diagnosis.how_far(one, other, unlike.first, 0) == expected


def test_a_tensor_of_another_dtype_or_shape_is_reported_as_such(tmp_path: Path) -> None:
    one, other = sampled(tmp_path, "one", 1, 2, 3), sampled(tmp_path, "other", 1, 2, 3)
    weight = {**other.ranks[0][4].parts["model"]["weight"], "dtype": "bfloat16"}  # type: ignore[call-overload,index]
    other.ranks[0][4] = faked.other(other.ranks[0][4], "model", weight=weight)

    unlike = diagnosis.first_unlike(one, other)

    assert unlike
    assert diagnosis.how_far(one, other, unlike.differences[0], 0) == "has another dtype or shape"
