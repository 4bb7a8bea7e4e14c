"""A call that may hang: it is given up when nothing moves, and whoever waits for it gets an error."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError

import pytest

from resumable.remote.deadline import Call, Meter, in_thread


def test_a_call_returns_or_raises_what_its_job_does() -> None:
    def late() -> None:
        raise TimeoutError("of its own")

    assert Call(in_thread(lambda: 7)).wait(20) == 7
    with pytest.raises(TimeoutError, match="of its own"):
        Call(in_thread(late)).wait(20)


@pytest.mark.heavy
def test_a_call_that_moves_is_waited_for_however_long_it_takes() -> None:
    told = list[int]()
    counted = Meter(told.append, 100)

    def move() -> str:
        for _ in range(11):
            time.sleep(0.2)
            counted.add(1)
        return "done"

    assert Call(in_thread(move), counted).wait(2) == "done"
    assert told == [1] * 11


def test_a_call_in_which_nothing_moves_is_given_up() -> None:
    told, go_on, ended = list[int](), threading.Event(), threading.Event()
    counted = Meter(told.append, 100)

    def move() -> None:
        go_on.wait(20)
        try:
            counted.add(1)
        finally:
            ended.set()

    began, call = time.monotonic(), Call(in_thread(move), counted)
    with pytest.raises(TimeoutError, match=r"nothing has moved for 0\.2 s"):
        call.wait(0.2)
    assert time.monotonic() - began >= 0.2
    call.give_up()
    go_on.set()
    assert ended.wait(20)
    with pytest.raises(CancelledError):
        call.wait(20)
    assert told == [], "nothing moves after the stop"
