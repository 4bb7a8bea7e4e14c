"""What is the best and what may go, in tables."""

from __future__ import annotations

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resumable.run.manifest import Best, Goal
from resumable.run.policy import (
    Cost,
    Every,
    Facts,
    Interval,
    Keep,
    Since,
    best_of,
    due,
    due_by_count,
    due_by_time,
    duration,
    interval,
    is_better,
    room,
    to_prune,
    update_best,
)

UP = Goal("val_acc", maximize=True)
DOWN = Goal("val_loss", maximize=False)


@pytest.mark.parametrize(
    ("goal", "value", "than", "expected"),
    [
        (UP, 0.9, 0.8, True),
        (UP, 0.8, 0.9, False),
        (UP, -1.0, None, True),
        (UP, nan, None, False),
        (UP, inf, 0.8, False),
        (UP, -inf, None, False),
        (UP, None, None, False),
        (UP, 0.0, -0.0, False),
        (DOWN, 0.8, 0.9, True),
        (DOWN, 0.9, 0.8, False),
        (DOWN, 1e300, None, True),
        (DOWN, nan, None, False),
        (DOWN, -inf, 0.8, False),
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
        (None, UP, {"val_acc": nan}, None),
        (None, UP, {"val_acc": 0.7}, Best(UP, 0.7, 9)),
        (Best(UP, 0.8, 3), UP, {"val_acc": 0.9}, Best(UP, 0.9, 9)),
        (Best(UP, 0.8, 3), UP, {"val_acc": 0.8}, Best(UP, 0.8, 3, since=1)),
        (Best(UP, 0.8, 3, since=4), UP, {"val_acc": 0.7}, Best(UP, 0.8, 3, since=5)),
        (Best(UP, 0.8, 3), UP, {"val_acc": inf}, Best(UP, 0.8, 3, since=1)),
        (Best(UP, 0.8, 3, since=4), UP, {}, Best(UP, 0.8, 3, since=4)),
        (Best(UP, 0.8, 3, since=4), UP, {"val_acc": nan}, Best(UP, 0.8, 3, since=5)),
        (Best(DOWN, 0.8, 3), DOWN, {"val_loss": 0.7}, Best(DOWN, 0.7, 9)),
        (Best(DOWN, 0.8, 3), DOWN, {"val_loss": -inf}, Best(DOWN, 0.8, 3, since=1)),
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
def test_the_first_of_the_best_counts(goal: Goal | None, values: list[float], expected: Best | None) -> None:
    name = goal.metric if goal else "val_acc"

    assert best_of(goal, [(number, {name: value}) for number, value in enumerate(values, 1)]) == expected


def test_the_best_of_a_history_does_not_mind_saves_without_the_metric() -> None:
    assert best_of(UP, [(1, {}), (2, {"val_acc": 0.5}), (3, {"val_loss": 0.1})]) == Best(UP, 0.5, 2)


# What stays


def saves(
    *steps: int, epochs: int | None = None, times: int | None = None, **metrics: list[float]
) -> list[Facts]:
    """Save numbers from 1, at these steps; an epoch is `epochs` steps and a step takes `times` seconds."""
    return [
        Facts(
            number,
            step,
            step // epochs if epochs else 0,
            1e9 + step * times if times else 0.0,
            {name: values[number - 1] for name, values in metrics.items()},
        )
        for number, step in enumerate(steps, 1)
    ]


TEN = saves(*range(1, 11))
HUNDREDS = saves(*range(100, 1100, 100))
BACK = saves(900, 1010, 1500, 950, 1005, 1100)
"""After the third the training went back to the first."""


@pytest.mark.parametrize(
    ("facts", "keep", "protect", "stay"),
    [
        ([], Keep(1), [], []),
        ([], None, [], []),
        (TEN, None, [], [*range(1, 11)]),
        (TEN, Keep(1), [], [10]),
        (TEN, Keep(3), [], [8, 9, 10]),
        (TEN, Keep(99), [], [*range(1, 11)]),
        (TEN, Keep(2), [1], [1, 9, 10]),
        (TEN, Keep(2), [None, 9, 77], [9, 10]),
        (TEN[2:7:2], Keep(2), [], [5, 7]),
        (BACK, Keep(2), [], [5, 6]),
        (HUNDREDS, Keep(1, every=Every(steps=300)), [], [3, 6, 9, 10]),
        (HUNDREDS, Keep(1, every=Every(steps=250)), [], [3, 5, 8, 10]),
        (HUNDREDS, Keep(1, every=Every(steps=5000)), [4], [4, 10]),
        (saves(100, 2500, 2600, 3100), Keep(1, every=Every(steps=1000)), [], [2, 4]),
        (saves(1000, 1000, 1100), Keep(1, every=Every(steps=1000)), [], [1, 2, 3]),
        (BACK, Keep(1, every=Every(steps=1000)), [], [2, 5, 6]),
        (saves(*range(10, 110, 10), epochs=40), Keep(1, every=Every(epochs=1)), [], [4, 8, 10]),
        (saves(*range(10, 110, 10), epochs=20), Keep(1, every=Every(epochs=2)), [], [4, 8, 10]),
        (saves(0, 10, 40, 41, 60, times=1), Keep(1, every=Every(seconds=40)), [], [1, 3, 5]),
        (saves(0, 0, 0, times=1), Keep(1, every=Every(seconds=40)), [], [1, 3]),
        (HUNDREDS, Keep(1, every=Every(steps=300, epochs=7)), [], [3, 6, 9, 10]),
        (
            saves(*range(100, 1100, 100), epochs=350),
            Keep(2, every=Every(steps=500, epochs=1)),
            [1],
            [1, 4, 5, 7, 9, 10],
        ),
    ],
)
def test_the_newest_the_protected_and_the_first_at_each_multiple_stay(
    facts: list[Facts], keep: Keep | None, protect: list[int | None], stay: list[int]
) -> None:
    going = to_prune(facts, keep, None, protect)

    assert [one.number for one in facts if one.number not in going] == stay


@pytest.mark.parametrize(
    ("goal", "values", "best", "stay"),
    [
        (UP, [0.1, 0.9, 0.8, 0.2, 0.3], 1, [2, 5]),
        (UP, [0.1, 0.9, 0.8, 0.2, 0.3], 2, [2, 3, 5]),
        (UP, [0.1, 0.9, 0.8, 0.2, 0.3], 9, [1, 2, 3, 4, 5]),
        (DOWN, [0.1, 0.9, 0.8, 0.2, 0.3], 2, [1, 4, 5]),
        (UP, [0.5, 0.5, 0.5, 0.1, 0.1], 2, [1, 2, 5]),
        (DOWN, [0.5, 0.5, 0.5, 0.9, 0.5], 1, [1, 5]),
        (UP, [nan, inf, -inf, 0.1, nan], 3, [4, 5]),
        (DOWN, [nan, -inf, inf, 0.1, nan], 1, [4, 5]),
        (UP, [nan, nan, nan], 2, [3]),
        (None, [0.9, 0.1, 0.1], 1, [3]),
        (Goal("another", maximize=True), [0.9, 0.1, 0.1], 1, [3]),
    ],
)
def test_the_best_stay_and_of_equal_ones_the_older(
    goal: Goal | None, values: list[float], best: int, stay: list[int]
) -> None:
    facts = saves(*range(len(values)), **{(goal or UP).metric if goal in (UP, DOWN) else "x": values})

    going = to_prune(facts, Keep(1, best), goal, [])

    assert [one.number for one in facts if one.number not in going] == stay


rules = st.builds(
    Keep,
    newest=st.integers(1, 4),
    best=st.integers(1, 3),
    every=st.none()
    | st.builds(
        Every,
        seconds=st.none() | st.integers(1, 30),
        steps=st.none() | st.integers(1, 30),
        epochs=st.none() | st.integers(1, 5),
    ),
)
values = st.sampled_from([0.0, 0.25, 0.5, nan, inf])
# Up and down: whoever goes back saves at steps that were saved before.
histories = st.lists(st.tuples(st.integers(0, 40), values), min_size=1, max_size=25).map(
    lambda made: [
        Facts(n, step, step // 7, 100.0 + n // 2, {"val_acc": v}) for n, (step, v) in enumerate(made, 1)
    ]
)


def left(facts: list[Facts], keep: Keep) -> list[Facts]:
    going = to_prune(facts, keep, UP, [])
    return [one for one in facts if one.number not in going]


@given(histories, rules, st.sets(st.integers(1, 25)))
def test_the_newest_and_the_protected_stay(facts: list[Facts], keep: Keep, protect: set[int]) -> None:
    going = to_prune(facts, keep, UP, protect)

    assert not {one.number for one in facts[-keep.newest :]} & {*going}
    assert not protect & {*going}


@given(histories, rules)
def test_no_more_stay_than_the_rules_name(facts: list[Facts], keep: Keep) -> None:
    plain = Keep(keep.newest, keep.best)

    assert len(left(facts, plain)) <= keep.newest + keep.best
    assert {one.number for one in left(facts, plain)} <= {one.number for one in left(facts, keep)}


@given(histories, rules)
def test_to_prune_twice_is_to_prune_once(facts: list[Facts], keep: Keep) -> None:
    assert left(left(facts, keep), keep) == left(facts, keep)


@given(histories, rules)
def test_pruning_after_each_save_keeps_what_pruning_at_the_end_keeps(facts: list[Facts], keep: Keep) -> None:
    there: list[Facts] = []
    for one in facts:
        there = left([*there, one], keep)

    assert there == left(facts, keep)


@pytest.mark.parametrize(
    ("keep", "text"),
    [
        (Keep(3), 3),
        (Keep(3, 2), "newest 3, best 2"),
        (Keep(1, 1, Every(86400, 1000, 1)), "newest 1, best 1, every 1 day, 1000 steps, 1 epoch"),
    ],
)
def test_what_stays_reads_as_it_was_given(keep: Keep, text: int | str) -> None:
    assert keep.told() == text


# When to save

COST = Cost(lost=0.21, durable=1.9)
COSTS = "a save costs 0.21 s of training and takes 1.9 s"
HOURS = 3600.0


@pytest.mark.parametrize(
    ("every", "cost", "seconds", "reason"),
    [
        (Every(budget=0.01), COST, 21, f"{COSTS}: every 21 s is 1 %"),
        (Every(budget=0.005), COST, 42, f"{COSTS}: every 42 s is 0.5 %"),
        (Every(600, 500, 2, budget=0.01), COST, 21, f"{COSTS}: every 21 s is 1 %"),
        (
            Every(budget=0.01),
            Cost(0.21, 50),
            60,
            "a save costs 0.21 s of training and takes 50 s: every 1 min lets one end before the next begins",
        ),
        (
            Every(budget=0.01),
            Cost(0, 0.001),
            10,
            "a save costs 0 s of training and takes 0.001 s: every 10 s is often enough",
        ),
        (
            Every(budget=0.01, mtbf=6 * HOURS),
            COST,
            95.247,
            f"{COSTS}: every 95 s loses the least with a failure every 6 h",
        ),
        (
            Every(mtbf=6 * HOURS),
            COST,
            95.247,
            f"{COSTS}: every 95 s loses the least with a failure every 6 h",
        ),
        (Every(budget=0.001, mtbf=6 * HOURS), COST, 210, f"{COSTS}: every 3.5 min is 0.1 %"),
        (Every(mtbf=HOURS), None, 60, "no save has been measured yet: the first one comes after 1 min"),
    ],
)
def test_the_interval_keeps_the_budget(every: Every, cost: Cost | None, seconds: float, reason: str) -> None:
    found = interval(every, cost)

    assert found
    assert found.reason == reason
    assert found.seconds == pytest.approx(seconds, rel=1e-4)


@pytest.mark.parametrize("cost", [None, COST])
def test_without_a_budget_or_mtbf_no_interval_is_chosen(cost: Cost | None) -> None:
    assert interval(Every(600, 500, 2), cost) is None


@given(st.floats(0, 1e3), st.floats(0, 1e4), st.floats(1e-4, 0.99))
def test_no_save_costs_more_than_the_budget(lost: float, durable: float, budget: float) -> None:
    found = interval(Every(budget=budget), Cost(lost, durable))

    assert found
    assert found.seconds >= 1.2 * durable
    assert lost <= budget * found.seconds * (1 + 1e-9)


CHOSEN = Interval(21, "because")


@pytest.mark.parametrize(
    ("every", "since", "chosen", "by_count", "by_time"),
    [
        (Every(), Since(1e9, 10**9, 10**9), None, None, None),
        (Every(steps=500), Since(1e9, 499, 9), None, None, None),
        (Every(steps=500), Since(0, 500, 0), None, "every 500 steps", None),
        (Every(epochs=2), Since(0, 1000, 1), None, None, None),
        (Every(epochs=2), Since(0, 1000, 2), None, "every 2 epochs", None),
        (Every(steps=500, epochs=1), Since(0, 3, 1), None, "every 1 epoch", None),
        (Every(seconds=600), Since(599.9, 10**6, 10**6), None, None, None),
        (Every(seconds=600), Since(600, 0, 0), None, None, "every 10 min"),
        (Every(budget=0.01), Since(20.9, 0, 0), CHOSEN, None, None),
        (Every(budget=0.01), Since(21, 0, 0), CHOSEN, None, "every 21 s (1 %)"),
        (Every(mtbf=6 * HOURS), Since(21, 0, 0), CHOSEN, None, "every 21 s (mtbf 6 h)"),
        (Every(budget=0.01, mtbf=6 * HOURS), Since(22, 0, 0), CHOSEN, None, "every 21 s (1 %, mtbf 6 h)"),
        (Every(seconds=20, budget=0.01), Since(22, 0, 0), CHOSEN, None, "every 20 s"),
        (Every(600, 500), Since(601, 501, 0), None, "every 500 steps", "every 10 min"),
    ],
)
def test_a_save_is_due_when_the_first_rule_comes(
    every: Every, since: Since, chosen: Interval | None, by_count: str | None, by_time: str | None
) -> None:
    assert due_by_count(every, since) == by_count
    assert due_by_time(every, since, chosen) == by_time
    assert due(every, since, chosen) == (by_count or by_time)


def test_the_rules_read_as_they_were_given() -> None:
    assert str(Every(600, 500, 2, 0.005, 6 * HOURS)) == "10 min, 500 steps, 2 epochs, 0.5 %, mtbf 6 h"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0, "0 s"), (0.0123, "0.012 s"), (9.94, "9.9 s"), (9.96, "10 s"), (60, "1 min"), (119.6, "120 s")),
        *((150, "2.5 min"), (5400, "90 min"), (3600, "1 h"), (86400, "1 day"), (100_000, "28 h")),
        (99 * 86400, "99 days"),
    ],
)
def test_a_time_reads_as_people_write_it(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# Room

GB = 10**9
TAKES = "a checkpoint takes about 1.4 GB; "
FEWER = ". Make room, or keep fewer (keep=)."


@pytest.mark.parametrize(
    ("keep", "goal", "there", "free", "text"),
    [
        (Keep(3), UP, 0, 7.0, None),
        (
            Keep(3),
            UP,
            3,
            1.1,
            "3 + best and the one being written need 7 GB, 4.2 GB of it are there already, "
            f"and 1.1 GB are free{FEWER}",
        ),
        (Keep(3), UP, 0, 6.99, f"3 + best and the one being written need 7 GB, and 6.99 GB are free{FEWER}"),
        (Keep(3), UP, 3, 2.8, None),
        (None, UP, 0, 2.8, None),
        (
            None,
            None,
            50,
            2.7,
            "keep=None keeps all of them, and 2.7 GB are free. Make room, or say how many stay (keep=3).",
        ),
    ],
)
def test_a_disk_that_is_too_small_is_reported_with_both_numbers(
    keep: Keep | None, goal: Goal | None, there: int, free: float, text: str | None
) -> None:
    found = room(keep, goal, int(1.4 * GB), there, round(free * GB))

    assert found == (text and TAKES + text)


def test_a_size_reads_as_people_write_it() -> None:
    texts = [str(room(None, None, 10**n, 0, 0)).partition(";")[0] for n in (1, 4, 8, 11, 13)]

    assert [text.removeprefix("a checkpoint takes about ") for text in texts] == [
        *("10 B", "10 kB", "100 MB", "100 GB", "10 TB"),
    ]
