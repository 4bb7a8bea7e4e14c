"""What users say in words: times, rules of when to save, what to keep."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from grouped import grouped

from resumable import RunState, UsageError, intervals, options
from resumable.run.manifest import Goal
from resumable.run.policy import Every, Keep

GOAL = Goal("loss", maximize=False)
DAY = 86400


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        *((60, 60), (0.5, 0.5), ("90 s", 90), ("1.5 h", 5400), (" 10 Minutes ", 600), ("10m", 600)),
        *(("3h50m", 13800), ("1 day 2 h 30 min 4 sec", DAY + 9004), ("2 hrs", 7200), ("3:50:00", 13800)),
        *(("03:05:09", 11109), ("100:00:00", 360000), ("2-12:30", 2.5 * DAY + 1800), ("2-12", 2.5 * DAY)),
    ],
)
def test_a_time_is_taken_in_the_ways_people_write_it(given: Any, seconds: float) -> None:
    assert intervals.seconds("max_time", given) == seconds


@pytest.mark.parametrize(
    "given",
    [
        *(0, -1, True, float("inf"), float("nan"), None, [], "", "0 s", "0:00:00"),
        *("3:50", "50", "1 parsec", "10 min 10 min", "30 min 1 h", "-5 s", "1:60:00", "1:00:61", "1:2:3:4"),
        *("1,5 h", "h", "5 s!", "inf s", "1e3 s", "٣ s", "9" * 5000, "9" * 400 + " s", torch.tensor(3)),
    ],
)
def test_what_is_not_a_time_is_refused_with_what_may_be_said(given: Any) -> None:
    with pytest.raises(UsageError, match=r"(?s)^max_time=.* is not a time.*'3:50:00'"):
        intervals.seconds("max_time", given)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        *((None, None), ("mtbf 6 h", Every(mtbf=21600)), (500, Every(steps=500)), ("1step", Every(steps=1))),
        *((" 1 epoch ", Every(epochs=1)), ("1 day", Every(seconds=DAY)), ("1 %", Every(budget=0.01))),
        (["0.5%", "mtbf 1 h"], Every(budget=0.005, mtbf=3600)),
        (("1 %", "2 epochs", "500 steps", "2 h"), Every(7200, 500, 2, 0.01)),
    ],
)
def test_when_to_save_is_said_in_words(given: Any, expected: Every | None) -> None:
    assert intervals.every(given) == expected


@pytest.mark.parametrize(
    "given",
    [
        *(0, -1, True, 1.5, "", "500", "0 steps", "1.5 epochs", "0 %", "100 %", "-1 %", "nan %", "often"),
        *("10 parsecs", "0 s", {"steps": 5}, {500}, [None], [["500 steps"]], "9" * 5000 + " steps"),
    ],
)
def test_what_does_not_say_how_often_is_refused_with_what_may_be_said(given: Any) -> None:
    with pytest.raises(UsageError, match=r"(?s)^every=.* does not say how often.*'500 steps'.*'1 %'"):
        intervals.every(given)


@pytest.mark.parametrize(
    ("given", "problem"), [([], "is empty"), (["10 min", "1 h"], "twice"), ([5, "9 steps"], "twice")]
)
def test_a_list_of_rules_has_at_least_one_and_none_twice(given: Any, problem: str) -> None:
    with pytest.raises(UsageError, match=rf"(?s)^every=.*{problem}.*one of each at most: '10 min'"):
        intervals.every(given)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        *((None, None), (1, Keep(1)), ({"newest": 3}, Keep(3)), ({"best": 2}, Keep(1, 2))),
        ({"every": 1000}, Keep(1, every=Every(steps=1000))),
        ({"every": None, "newest": 2}, Keep(2)),
        ({"newest": 3, "best": 2, "every": "1 day"}, Keep(3, 2, Every(seconds=DAY))),
        ({"every": ["1000 steps", "10 epochs"]}, Keep(1, every=Every(steps=1000, epochs=10))),
    ],
)
def test_what_stays_is_a_count_or_says_which(given: Any, expected: Keep | None) -> None:
    assert options.keep(given, GOAL) == expected


@pytest.mark.parametrize(
    "given",
    [
        *(0, -1, 1.5, "3", True, [], {}, [3], {"newst": 3}, {"newest": 0}, {"newest": -1}, {"newest": None}),
        *({"best": 0}, {"best": True}, {"best": "all"}, {"newest": 2.0}, {1: 2}),
    ],
)
def test_what_does_not_say_how_many_stay_is_refused(given: Any) -> None:
    with pytest.raises(UsageError, match=r"(?s)does not say how many checkpoints stay.*'newest': 3"):
        options.keep(given, GOAL)


@pytest.mark.parametrize("every", [0, "1 %", "often", ""])
def test_what_stays_for_ever_is_said_in_steps_epochs_or_a_time(every: Any) -> None:
    with pytest.raises(
        UsageError, match=r"(?s)keep\['every'\]=.*does not say how often.*or a list of them\."
    ):
        options.keep({"every": every}, None)


def test_several_best_need_a_metric_that_decides() -> None:
    assert options.keep({"best": 1}, None) == Keep(1)
    with pytest.raises(
        UsageError, match=r"(?s)nothing says which checkpoints are the best.*maximize='val_acc'"
    ):
        options.keep({"best": 2}, None)


@pytest.mark.parametrize("given", ["SIGTERM", None, [15]])
def test_signals_are_a_list_of_names_and_the_error_shows_one(given: Any) -> None:
    with pytest.raises(UsageError, match=r"(?s)is not a list of names.*write signals=\['SIGTERM'\]"):
        options.signals(given)


@pytest.mark.parametrize(
    ("name", "what"), [("SIGFOO", "is no signal here"), ("SIGKILL", "no process can catch")]
)
def test_a_signal_that_cannot_be_handled_is_refused(name: str, what: str) -> None:
    with pytest.raises(UsageError, match=f"signals= names '{name}', which {what}"):
        options.signals([name])


def test_how_to_leave_is_one_of_two_words() -> None:
    assert [options.on_preempt(value) for value in ("exit", "raise")] == [False, True]
    with pytest.raises(UsageError, match="on_preempt='stop' does not say how to leave"):
        options.on_preempt("stop")


@pytest.mark.parametrize("remote", [None, "memory://exp"])
@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"push": "newset"}, "push='newset' does not say which checkpoints go to the remote"),
        ({"push": "best"}, "push='best', but nothing says which checkpoint is the best"),
        ({"remote_keep": 0}, "Remote.keep=0 does not say how many checkpoints stay"),
        ({"push_timeout": "soon"}, "Remote.timeout='soon'"),
        ({"remote_options": ["endpoint_url"]}, "Remote.options is not a dict"),
    ],
)
def test_what_to_copy_is_checked_also_where_no_remote_is_given_yet(
    run_dir: Path, given: dict[str, Any], problem: str, remote: str | None
) -> None:
    with pytest.raises(UsageError, match=re.escape(problem)):
        RunState.load(run_dir, **grouped(remote=remote, **given))

    assert not run_dir.exists()
