"""A call that may hang: it is given up when nothing moves, and whoever waits for it gets an error."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest

from resumable.remote.deadline import Call, Meter, in_thread

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


def test_what_is_moved_is_reported_and_so_is_the_rest_at_the_end() -> None:
    counted, told = meter()
    with counted:
        counted.add(30)
    assert told == [30, 70]


def test_a_failed_call_has_moved_nothing() -> None:
    counted, told = meter()
    with contextlib.suppress(OSError), counted:
        counted.add(30)
        raise OSError
    assert told == [30, -30]


def test_what_a_client_sends_again_is_not_counted_again() -> None:
    counted, told = meter()
    counted.add(80)
    counted.add(80)
    assert told == [80, 20]


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


def in_loop(work: Coroutine[Any, Any, Any], loop: Any, counted: Meter | None = None) -> Call:
    return Call(asyncio.run_coroutine_threadsafe(work, loop), counted)


def test_a_call_in_a_thread_returns_what_it_returns_or_raises_what_it_raises() -> None:
    good, bad = Call(in_thread(lambda: 7)), Call(in_thread(lambda: [].index(1)))
    assert good.wait(20) == 7
    assert good.is_done()
    with pytest.raises(ValueError, match="1 is not in list"):
        bad.wait(20)


def test_a_call_that_raises_a_timeout_of_its_own_raises_that() -> None:
    def late() -> None:
        raise TimeoutError("of its own")

    with pytest.raises(TimeoutError, match="of its own"):
        Call(in_thread(late)).wait(20)


def test_a_call_in_a_loop_returns_what_it_returns_or_raises_what_it_raises(loop: Any) -> None:
    async def divide(number: int) -> float:
        return 14 / number

    assert in_loop(divide(2), loop).wait(20) == 7
    with pytest.raises(ZeroDivisionError):
        in_loop(divide(0), loop).wait(20)


def test_a_call_in_which_nothing_moves_is_late_and_not_later_than_the_patience(loop: Any) -> None:
    call, began = in_loop(asyncio.sleep(60), loop), time.monotonic()
    with pytest.raises(TimeoutError, match=r"nothing has moved for 0\.2 s"):
        call.wait(PATIENCE)
    assert PATIENCE * 0.9 <= time.monotonic() - began < 20
    assert not call.is_done()
    call.give_up()


def test_a_call_that_moves_is_waited_for_however_long_it_takes(loop: Any) -> None:
    counted, told = meter()

    async def move() -> str:
        for _ in range(10):
            await asyncio.sleep(PATIENCE / 4)
            counted.add(1)
        return "done"

    assert (in_loop(move(), loop, counted).wait(PATIENCE), len(told)) == ("done", 10)


def test_a_call_in_a_loop_that_is_given_up_has_ended_at_once(loop: Any) -> None:
    ended = threading.Event()

    async def hang() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    call = in_loop(hang(), loop)
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()
    call.give_up()
    with pytest.raises(CancelledError):
        call.wait(60)
    assert ended.wait(20)


def test_a_call_in_a_thread_that_is_given_up_ends_with_its_next_piece() -> None:
    counted, told = meter()
    go_on, ended = threading.Event(), threading.Event()

    def move() -> None:
        go_on.wait(20)
        try:
            counted.add(1)
        finally:
            ended.set()

    call = Call(in_thread(move), counted)
    call.give_up()
    go_on.set()
    assert ended.wait(20)
    with pytest.raises(CancelledError):
        call.wait(60)
    assert told == []
