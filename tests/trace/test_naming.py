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
        ("optimizer.critic", "exp_avg.0.bias", "optimizer.critic exp_avg of 0.bias"),
        ("optimizer", "groups.1.lr", "optimizer lr of group 1"),
        ("optimizer.critic", "groups.0.betas", "optimizer.critic betas of group 0"),
        ("optimizer", "", "optimizer"),
        ("model", "0.weight", "model 0.weight"),
        ("model", "", "model"),
        ("scheduler", "last_epoch", "scheduler last_epoch"),
        ("extra.ema", "", "extra.ema"),
        ("batches", "", "the batch"),
        ("noted", "loss", "noted loss"),
        ("random", "python.words", "Python's generator"),
        ("random", "numpy.state.key", "NumPy's generator"),
        ("random", "torch", "torch's generator"),
        ("random", "cuda.0", "the generator of cuda:0"),
        ("position", "step", "the step"),
        ("position", "metrics.loss", "the metrics loss"),
    ],
)
def test_a_difference_is_called_what_people_call_it(part: str, name: str, expected: str) -> None:
    assert naming.of(Difference(AT, part, name, None, None)) == expected


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (0.1, 0.2, "0.1 and 0.2"),
        (True, 1, "True and 1"),
        (1e-9, 0.123456789, "1e-09 and 0.123457"),
        ("a", "b", "'a' and 'b'"),
        (None, 3, "None and 3"),
        ("x" * 99, "b", ""),
        ({"digest": "1"}, {"digest": "2"}, ""),
        ("#digest", "#other", ""),
    ],
)
def test_values_are_reported_where_they_are_plain_and_short(before: Json, after: Json, expected: str) -> None:
    assert naming.values(Difference(AT, "vars", "x", before, after)) == expected


@pytest.mark.parametrize(("before", "after"), [(0.1, 0.1 + 1e-17 + 2e-17), (1.0, 1.0 + 2**-40)])
def test_two_values_that_differ_are_never_reported_as_the_same(before: float, after: float) -> None:
    if before == after:
        return
    one, _, other = naming.values(Difference(AT, "vars", "x", before, after)).partition(" and ")

    assert one != other
