"""What is the best and what may go, in tables."""

from __future__ import annotations

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resumable.manifest import Best, Goal
from resumable.policy import best_of, is_better, to_prune, update_best

UP = Goal("val_acc", maximize=True)
DOWN = Goal("val_loss", maximize=False)


@pytest.mark.parametrize(
    ("goal", "value", "than", "expected"),
    [
        (UP, 0.9, 0.8, True),
        (UP, 0.8, 0.9, False),
        (UP, 0.8, 0.8, False),
        (UP, -1.0, None, True),
        (UP, nan, None, False),
        (UP, nan, 0.8, False),
        (UP, inf, 0.8, False),
        (UP, -inf, None, False),
        (UP, None, None, False),
        (UP, None, 0.8, False),
        (UP, 0.0, -0.0, False),
        (DOWN, 0.8, 0.9, True),
        (DOWN, 0.9, 0.8, False),
        (DOWN, 0.8, 0.8, False),
        (DOWN, 1e300, None, True),
        (DOWN, nan, None, False),
        (DOWN, nan, 0.8, False),
        (DOWN, -inf, 0.8, False),
        (DOWN, inf, None, False),
        (DOWN, None, 0.8, False),
    ],
)
def test_a_value_is_better_only_if_it_is_a_number_that_beats_the_other(
    goal: Goal, value: float | None, than: float | None, expected: bool
) -> None:
    assert is_better(goal, value, than) is expected


@pytest.mark.parametrize(
    ("best", "goal", "metrics", "expected"),
    [
        (None, None, {"val_acc": 0.9}, None),
        (Best(UP, 0.8, 3), None, {"val_acc": 0.9}, Best(UP, 0.8, 3)),
        (None, UP, {}, None),
        (None, UP, {"val_loss": 0.9}, None),
        (None, UP, {"val_acc": nan}, None),
        (None, UP, {"val_acc": 0.7}, Best(UP, 0.7, 9)),
        (Best(UP, 0.8, 3), UP, {"val_acc": 0.9}, Best(UP, 0.9, 9)),
        (Best(UP, 0.8, 3), UP, {"val_acc": 0.8}, Best(UP, 0.8, 3)),
        (Best(UP, 0.8, 3), UP, {"val_acc": 0.7}, Best(UP, 0.8, 3)),
        (Best(UP, 0.8, 3), UP, {"val_acc": inf}, Best(UP, 0.8, 3)),
        (Best(UP, 0.8, 3), UP, {}, Best(UP, 0.8, 3)),
        (Best(DOWN, 0.8, 3), DOWN, {"val_loss": 0.7}, Best(DOWN, 0.7, 9)),
        (Best(DOWN, 0.8, 3), DOWN, {"val_loss": 0.9}, Best(DOWN, 0.8, 3)),
        (Best(DOWN, 0.8, 3), DOWN, {"val_loss": -inf}, Best(DOWN, 0.8, 3)),
    ],
)
def test_the_best_is_replaced_only_by_a_better_one(
    best: Best | None, goal: Goal | None, metrics: dict[str, float], expected: Best | None
) -> None:
    assert update_best(best, goal, metrics, 9) == expected


@pytest.mark.parametrize(
    ("goal", "values", "expected"),
    [
        (UP, [], None),
        (UP, [nan, nan], None),
        (UP, [0.1, 0.3, 0.3, 0.2], Best(UP, 0.3, 2)),
        (UP, [nan, 0.1, inf, nan], Best(UP, 0.1, 2)),
        (DOWN, [0.4, 0.2, 0.2, 0.3], Best(DOWN, 0.2, 2)),
        (DOWN, [nan, -inf, 5.0], Best(DOWN, 5.0, 3)),
        (None, [0.1, 0.2], None),
    ],
)
def test_the_best_of_a_history_is_its_first_best_number(
    goal: Goal | None, values: list[float], expected: Best | None
) -> None:
    name = goal.metric if goal else "val_acc"

    assert best_of(goal, [(number, {name: value}) for number, value in enumerate(values, 1)]) == expected


def test_the_best_of_a_history_does_not_mind_saves_without_the_metric() -> None:
    assert best_of(UP, [(1, {}), (2, {"val_acc": 0.5}), (3, {"val_loss": 0.1})]) == Best(UP, 0.5, 2)


@pytest.mark.parametrize(
    ("numbers", "keep", "protect", "expected"),
    [
        ([], 1, [], []),
        ([1], 1, [], []),
        ([1, 2, 3], 1, [], [1, 2]),
        ([1, 2, 3], 2, [3], [1]),
        ([1, 2, 3], 3, [], []),
        ([1, 2, 3], 9, [], []),
        ([1, 2, 3], None, [], []),
        ([1, 2, 3, 4], 2, [1], [2]),
        ([1, 2, 3, 4], 1, [None, 2], [1, 3]),
        ([1, 2], 1, [7], [1]),
        ([1, 5, 900], 2, [], [1]),
    ],
)
def test_all_but_the_newest_and_the_protected_may_go(
    numbers: list[int], keep: int | None, protect: list[int | None], expected: list[int]
) -> None:
    assert to_prune(numbers, keep, protect) == expected


@given(st.sets(st.integers(0, 99), min_size=1), st.integers(1, 9), st.sets(st.integers(0, 99)))
def test_the_newest_never_goes_whatever_is_asked_for(numbers: set[int], keep: int, protect: set[int]) -> None:
    going = set(to_prune(sorted(numbers), keep, protect))

    assert max(numbers) not in going
    assert not going & protect
    assert len(numbers - going) >= min(keep, len(numbers))
