"""What people call the things that two records differ in."""

from __future__ import annotations

import pytest

from resumable.audit import naming
from resumable.files.strict_json import Json
from resumable.trace.trace_file import At, Difference

AT = At("batch", 0, 8, 8)


@pytest.mark.parametrize(
    ("part", "name", "expected"),
    [
        ("optimizer", "exp_avg.layer2.weight", "optimizer exp_avg of layer2.weight"),
        ("optimizer.critic", "groups.0.betas", "optimizer.critic betas of group 0"),
        *(("model", "0.weight", "model 0.weight"), ("model", "", "model"), ("batches", "", "the batch")),
        *(("noted", "loss", "noted loss"), ("position", "step", "the step")),
        *(("random", "python.words", "Python's generator"), ("random", "cuda.0", "the generator of cuda:0")),
    ],
)
def test_a_difference_is_called_what_people_call_it(part: str, name: str, expected: str) -> None:
    assert naming.of(Difference(AT, part, name, None, None)) == expected


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (1e-9, 0.123456789, "1e-09 and 0.123457"),
        (1.0, 1.0 + 2**-40, "1.0 and 1.0000000000009095"),
        *(("a", None, "'a' and None"), ("x" * 99, "b", ""), ("#digest", "#other", "")),
    ],
)
def test_values_are_told_if_they_are_short_and_never_as_equal(
    before: Json, after: Json, expected: str
) -> None:
    assert naming.values(Difference(AT, "vars", "x", before, after)) == expected
