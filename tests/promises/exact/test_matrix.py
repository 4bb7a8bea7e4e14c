"""Promises 1 and 2: with the library or without, killed or not, a training is the same bit for bit."""

from __future__ import annotations

from pathlib import Path

import matrix
import pytest
from counted import Tally
from forks import Forks


@pytest.mark.proves("exact")
@pytest.mark.proves("transparent")
@pytest.mark.quick(24)
@pytest.mark.sampled(9)
@pytest.mark.parametrize("case", matrix.chosen(), ids=str)
def test_a_killed_training_is_the_plain_one(
    tmp_path: Path, forks: Forks, tally: Tally, case: matrix.Case
) -> None:
    found = matrix.problem(forks, case, tmp_path)

    tally("killed set-ups of loaders", 1, [found] if found else [])


def test_every_value_is_in_a_case() -> None:
    cases = matrix.chosen()

    for axis, values in matrix.AXES.items():
        assert {getattr(case, axis) for case in cases} == {*values}


@pytest.mark.nightly
@pytest.mark.xfail(strict=True, raises=AssertionError, reason="these set-ups are not exact yet")
@pytest.mark.parametrize("case", matrix.INEXACT, ids=str)
def test_a_set_up_that_is_not_exact_yet(tmp_path: Path, forks: Forks, case: matrix.Case) -> None:
    assert matrix.problem(forks, case, tmp_path) is None
