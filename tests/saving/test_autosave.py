"""What is due at a boundary: by count, by time, by what saves cost, by signals and by the end of the time."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from resumable.boundary import Due
from resumable.processes.ranks import Ranks
from resumable.processes.signals import Signals
from resumable.run.policy import Cost, Every
from resumable.saving import autosave
from resumable.saving.autosave import Autosave
from resumable.saving.save_cost import SaveCost


def make(every: Every = Every(), max_time: float | None = None) -> Autosave:  # noqa: B008
    return Autosave(Ranks(60, lambda: (0, 0, 0)), Signals([signal.SIGTERM]), SaveCost(), every, max_time)


def due(found: Autosave, step: int = 0, epoch: int = 0, **at: Any) -> Due | None:
    return found.due(step, epoch, **{"is_rest_next": False, "is_saving": False, **at})


def test_no_save_is_begun_by_time_while_one_is_on_its_way() -> None:
    found = make(Every(seconds=600))
    found._saved_at -= 700

    assert due(found, is_saving=True) is None


def test_a_budget_follows_what_saves_cost() -> None:
    found = make(Every(budget=0.01))
    found._pace.cost = Cost(lost=2, durable=1)
    assert found.chosen
    assert found.chosen.seconds == 200
    found._saved_at -= 201
    assert due(found) == Due("every 3.3 min (1 %)")

    found._pace.cost = Cost(lost=3, durable=1)

    assert due(found) is None


def test_the_time_that_a_save_takes_is_left_of_the_limit() -> None:
    found = make(max_time=time.time() - autosave.began() + 100)
    found._pace.cost = Cost(lost=1, durable=10)
    assert due(found) is None

    found._pace.cost = Cost(lost=1, durable=60)

    assert due(found) == Due("max_time", signal.SIGTERM)


def test_the_time_that_the_rest_of_an_epoch_takes_is_left_of_the_limit() -> None:
    found = make(max_time=time.time() - autosave.began() + 100)
    found._pace.cost, found._pace._rest = Cost(lost=1, durable=1), 600

    assert due(found) is None
    assert due(found, is_rest_next=True) == Due("max_time", signal.SIGTERM)


def test_a_save_at_an_epochs_last_batch_waits_for_the_end_of_its_body() -> None:
    found = make(Every(steps=5))

    assert due(found, step=5, is_rest_next=True) is None
    assert due(found, step=5, epoch=1) == Due("every 5 steps")


@pytest.mark.parametrize(
    ("rest", "durable", "ago", "waits"),
    [(5, 1, 0, True), (28, 1, 0, False), (5, 14, 0, False), (5, 1, 24, False), (None, 1, 0, False)],
    ids=["in time", "too long", "too slow a save", "too late", "not known"],
)
def test_a_signal_may_wait_for_the_rest(rest: float | None, durable: float, ago: float, waits: bool) -> None:
    found = make()
    found._signals.received, found._signals.received_at = signal.SIGTERM, time.monotonic() - ago
    found._pace.cost, found._pace.is_rest_known = Cost(lost=0, durable=durable), rest is not None
    found._pace._rest = rest or 0.0
    leaves = Due("SIGTERM", signal.SIGTERM)

    assert due(found, is_rest_next=True) == (None if waits else leaves)
    assert due(found, epoch=1) == leaves


def test_the_time_counts_from_the_start_of_the_queues_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_START_TIME", "1700000000")
    assert autosave.began() == 1700000000


def test_else_from_the_start_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_START_TIME", raising=False)

    began = autosave.began()

    assert os.stat("/proc/self").st_ctime - 2 < began <= autosave._IMPORTED + 2
