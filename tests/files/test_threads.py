"""Jobs that are shared by threads: none runs when the caller goes on, whatever interrupts it."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import chosen
import pytest

from resumable.files.threads import in_threads

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="a system without timers")


@pytest.fixture
def interrupts() -> Iterator[list[bool]]:
    """Interrupt the main thread every tenth of a second, as often as there are items in the list."""
    left = list[bool]()

    def interrupt(*_: object) -> None:
        if left:
            left.pop()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    yield left
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def is_main() -> bool:
    """Whether this is the main thread."""
    return threading.current_thread() is threading.main_thread()


def test_a_thread_begun_late_does_nothing(interrupts: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    real, may_begin, late, done = threading.Thread._bootstrap_inner, threading.Event(), [], []  # type: ignore[attr-defined]

    def begin(thread: threading.Thread) -> None:
        late.append(thread)
        interrupts.append(True)
        may_begin.wait(20)
        real(thread)

    monkeypatch.setattr(threading.Thread, "_bootstrap_inner", begin)
    with pytest.raises(KeyboardInterrupt):
        in_threads(done.append, range(10), 2)
    may_begin.set()
    (thread,) = late
    thread._started.wait(20)
    thread.join(20)

    assert done == []


def test_a_job_that_runs_is_waited_for_through_two_interrupts(interrupts: list[bool]) -> None:
    others, ended = threading.Event(), list[int]()

    def job(number: int) -> None:
        if is_main():
            others.wait(20)
            return
        others.set()
        time.sleep(0.05)  # now the main thread waits for this one
        interrupts.extend([True, True])
        while interrupts:
            time.sleep(0.01)
        time.sleep(0.1)  # a caller that does not wait would be gone
        ended.append(number)

    with pytest.raises(KeyboardInterrupt):
        in_threads(job, range(2), 2)

    assert len(ended) == 1


@pytest.mark.heavy
@pytest.mark.timeout(120)
def test_interrupts_at_any_moment_neither_hang_nor_leave_a_job(interrupts: list[bool], times: int) -> None:
    dice = chosen.dice()
    for _ in range(1000 * times):
        others, ended = threading.Event(), list[int]()

        def job(number: int, others: threading.Event = others, ended: list[int] = ended) -> None:
            if is_main():
                others.wait(20)
                return
            others.set()
            interrupts.extend([True, True])
            time.sleep(0.003)
            while interrupts:
                time.sleep(0.001)
            ended.append(number)

        signal.setitimer(signal.ITIMER_REAL, *(dice.uniform(0.0003, 0.001) for _ in range(2)))
        with contextlib.suppress(KeyboardInterrupt):
            in_threads(job, range(2), 2)

        assert len(ended) == 1


def test_what_threads_share_may_be_a_generator() -> None:
    done: list[Any] = []

    def slowly() -> Iterator[int]:
        for number in range(20):
            time.sleep(0.001)  # the others ask for the next one meanwhile
            yield number

    in_threads(done.append, slowly(), 4)

    assert sorted(done) == [*range(20)]
