"""What saves cost is measured from how long the bodies of a loop take."""

from __future__ import annotations

import pytest

from resumable.run.policy import Cost
from resumable.saving.save_cost import SaveCost


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pace(clock: Clock) -> SaveCost:
    found = SaveCost(clock)
    found.begin()
    return found


def bodies(pace: SaveCost, clock: Clock, *seconds: float) -> None:
    for length in seconds:
        clock.time += length
        pace.body_ended()


def test_a_save_costs_what_bodies_take_longer_meanwhile(pace: SaveCost, clock: Clock) -> None:
    bodies(pace, clock, 1, 1, 1)
    ended = pace.save_began()
    bodies(pace, clock, 1.5, 1.25)
    ended()
    bodies(pace, clock, 1)

    assert pace.cost == Cost(lost=0.75, durable=2.75)


def test_the_wait_for_the_save_before_is_part_of_the_cost(pace: SaveCost, clock: Clock) -> None:
    bodies(pace, clock, 1)
    clock.time += 3
    ended = pace.save_began(waited=2)
    ended()
    bodies(pace, clock, 0)

    assert pace.cost == Cost(lost=2, durable=2)


def test_a_body_never_loses_more_than_it_had_of_the_save(pace: SaveCost, clock: Clock) -> None:
    bodies(pace, clock, 1, 1)
    ended = pace.save_began()
    clock.time += 0.25
    ended()
    bodies(pace, clock, 60)

    assert pace.cost == Cost(lost=0.25, durable=0.25)


def test_the_evaluation_is_no_body_and_is_left_time_for(pace: SaveCost, clock: Clock) -> None:
    bodies(pace, clock, 1, 1)
    clock.time += 600
    pace.rest_ended()
    pace.rest_ended()
    pace.body_ended()
    pace.save_began()()
    bodies(pace, clock, 0)

    assert pace.body() == 1
    assert 600 < pace.time_to_leave(is_rest_next=True) < 610
    assert 1 < pace.time_to_leave(is_rest_next=False) < 10


def test_where_every_body_saves_the_time_in_the_calls_is_lost(pace: SaveCost, clock: Clock) -> None:
    for _ in range(3):
        with pace.waiting(), pace.waiting():
            ended = pace.save_began()
            clock.time += 2
        bodies(pace, clock, 5)
        ended()

    assert pace.lost_since() == 6
    assert pace.cost == Cost(lost=2, durable=7)
