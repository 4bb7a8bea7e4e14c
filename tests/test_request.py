"""A call that may hang: it is given up when nothing moves, and whoever waits for it is told."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest

from resumable.remote.deadline import Meter, Request, TooLong

PATIENCE = 0.2


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop that runs in a thread of its own."""
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join()
    made.close()


def meter(limit: int = 100) -> tuple[Meter, list[int]]:
    """Return a meter, and the list of what it tells."""
    told: list[int] = []
    return Meter(told.append, limit), told


def test_what_is_moved_is_told_and_what_no_filesystem_told_of_at_the_end() -> None:
    counted, told = meter()
    counted.add(30)
    counted.fill()
    assert told == [30, 70]


def test_a_failed_call_has_moved_nothing() -> None:
    counted, told = meter()
    counted.add(30)
    counted.undo()
    counted.add(20)
    assert (told, sum(told)) == ([30, -30, 20], 20)


def test_more_than_there_should_be_is_an_error_and_is_not_told() -> None:
    counted, told = meter()
    counted.add(100)
    with pytest.raises(TooLong, match="more than the 100 bytes"):
        counted.add(1)
    assert told == [100]


def test_nothing_moves_after_the_stop() -> None:
    counted, told = meter()
    counted.stop()
    with pytest.raises(CancelledError):
        counted.add(1)
    assert told == []


def test_a_filesystem_may_tell_how_much_more_or_how_much_in_all() -> None:
    counted, told = meter()
    callback = counted.callback()
    callback.set_size(100)
    callback.relative_update(10)
    callback.absolute_update(35)
    assert told == [10, 25]


def test_a_call_in_a_thread_returns_what_it_returns_or_raises_what_it_raises() -> None:
    good, bad = Request(), Request()
    good.begin_in_thread(lambda: 7)
    assert good.wait(20) == 7
    assert not good.is_pending()
    bad.begin_in_thread(lambda: [].index(1))
    with pytest.raises(ValueError, match="1 is not in list"):
        bad.wait(20)


def test_a_call_in_a_loop_returns_what_it_returns_or_raises_what_it_raises(loop: Any) -> None:
    async def divide(number: int) -> float:
        return 14 / number

    good, bad = Request(), Request()
    good.begin_in_loop(divide(2), loop)
    assert good.wait(20) == 7
    bad.begin_in_loop(divide(0), loop)
    with pytest.raises(ZeroDivisionError):
        bad.wait(20)


def test_a_call_in_which_nothing_moves_is_late(loop: Any) -> None:
    request = Request()
    request.begin_in_loop(asyncio.sleep(60), loop)
    with pytest.raises(TimeoutError, match=r"nothing has moved for 0\.2 s"):
        request.wait(PATIENCE)
    assert request.is_pending()
    request.give_up(TimeoutError())


def test_a_call_that_moves_is_waited_for_however_long_it_takes(loop: Any) -> None:
    counted, told = meter()
    request = Request(counted)

    async def move() -> str:
        for _ in range(10):
            await asyncio.sleep(PATIENCE / 4)
            counted.add(1)
        return "done"

    request.begin_in_loop(move(), loop)
    assert (request.wait(PATIENCE), len(told)) == ("done", 10)


def test_a_call_in_a_loop_that_is_given_up_has_ended_at_once(loop: Any) -> None:
    ended = threading.Event()

    async def hang() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    request = Request()
    request.begin_in_loop(hang(), loop)
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()
    request.give_up(InterruptedError("enough"))
    with pytest.raises(InterruptedError, match="enough"):
        request.wait(60)
    assert ended.wait(20)


def test_a_call_in_a_thread_that_is_given_up_ends_with_its_next_piece() -> None:
    counted, told = meter()
    request = Request(counted)
    go_on, ended = threading.Event(), threading.Event()

    def move() -> None:
        go_on.wait(20)
        try:
            counted.add(1)
        finally:
            ended.set()

    request.begin_in_thread(move)
    request.give_up(InterruptedError("enough"))
    go_on.set()
    assert ended.wait(20)
    with pytest.raises(InterruptedError, match="enough"):
        request.wait(60)
    assert told == []


def test_what_is_waited_for_in_vain_is_not_waited_for_longer_than_the_patience() -> None:
    request, began = Request(), time.monotonic()
    with pytest.raises(TimeoutError):
        request.wait(PATIENCE)
    assert PATIENCE <= time.monotonic() - began < 20
