"""Signals are noted in loops, do elsewhere what they did before, and are not lost in between."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from resumable.processes import signals
from resumable.processes.signals import Signals

ALL = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@pytest.fixture
def noting() -> Iterator[Signals]:
    kept = {number: signal.getsignal(number) for number in (*ALL, signal.SIGCHLD)}
    # A loop that another test has left waits to be collected, and still notes them
    for number in ALL:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    found = Signals(ALL)
    found.begin()
    yield found
    for _ in range(3):
        found.end()
    for number, before in kept.items():
        signal.signal(number, before)


def ends_with(do: Callable[[], Any]) -> int | None:
    """Return how a forked process ends that does this."""
    process = multiprocessing.get_context("fork").Process(target=do)
    process.start()
    process.join()
    return process.exitcode


@pytest.mark.parametrize("number", ALL)
def test_a_signal_in_a_loop_is_noted_and_ends_nothing(noting: Signals, number: signal.Signals) -> None:
    signal.raise_signal(number)

    assert noting.received is number


def test_of_two_signals_the_first_counts(noting: Signals) -> None:
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGTERM)

    assert noting.received is signal.SIGUSR1


def test_the_second_ctrl_c_leaves_at_once(noting: Signals, capfd: pytest.CaptureFixture[str]) -> None:
    signal.raise_signal(signal.SIGINT)
    assert "again to leave at once" in capfd.readouterr().err

    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_only_one_process_tells_of_ctrl_c(noting: Signals, capfd: pytest.CaptureFixture[str]) -> None:
    quiet = Signals([signal.SIGINT], shows_hint=False)
    noting.end()
    quiet.begin()

    signal.raise_signal(signal.SIGINT)

    quiet.end()
    assert capfd.readouterr().err == ""


def test_after_the_last_loop_signals_do_what_they_did_before(noting: Signals) -> None:
    noting.begin()
    noting.end()
    assert signal.getsignal(signal.SIGTERM) == noting._note

    noting.end()

    assert [signal.getsignal(number) for number in ALL] == [
        signal.SIG_DFL,
        signal.SIG_DFL,
        signal.default_int_handler,
    ]


def test_the_handler_of_the_script_is_still_called(noting: Signals) -> None:
    noting.end()
    called: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: called.append(number))
    noting.begin()

    signal.raise_signal(signal.SIGUSR1)

    assert (called, noting.received) == ([signal.SIGUSR1], signal.SIGUSR1)


def test_a_signal_that_is_ignored_stays_ignored(noting: Signals) -> None:
    noting.end()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    noting.begin()

    signal.raise_signal(signal.SIGINT)

    assert noting.received is None


def test_a_handler_on_top_may_call_this_one_after_the_loops(noting: Signals) -> None:
    below = signal.getsignal(signal.SIGINT)
    assert callable(below)
    signal.signal(signal.SIGINT, lambda number, frame: below(number, frame))
    noting.end()

    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert noting.received is None


def test_two_trainings_that_loop_at_once_both_note(noting: Signals) -> None:
    other = Signals([signal.SIGTERM])
    other.begin()

    signal.raise_signal(signal.SIGTERM)
    other.end()

    assert noting.received is other.received is signal.SIGTERM


@pytest.mark.parametrize("number", ALL)
def test_a_training_notes_signals_though_earlier_loops_have_ended(
    noting: Signals, number: signal.Signals
) -> None:
    second, last = Signals(ALL), Signals(ALL)
    second.begin()
    last.begin()
    noting.end()
    second.close()

    signal.raise_signal(number)

    assert last.received is number
    assert noting.received is second.received is None
    last.acted_on()
    last.end()
    assert ends_with(lambda: signal.raise_signal(number)) in (-number, 1)  # 1: a KeyboardInterrupt


@pytest.mark.parametrize("number", ALL)
@pytest.mark.parametrize("is_over", [False, True])
def test_two_trainings_that_take_turns_note_a_signal_once(
    noting: Signals, number: signal.Signals, is_over: bool
) -> None:
    other = Signals(ALL)
    other.begin()
    noting.end()
    noting.begin()
    if is_over:
        other.end()

    signal.raise_signal(number)

    assert noting.received is number
    assert other.received is (None if is_over else number)
    noting.acted_on()
    other.acted_on()
    noting.end()
    other.close()
    assert ends_with(lambda: signal.raise_signal(number)) in (-number, 1)  # 1: a KeyboardInterrupt


def test_what_was_noted_above_a_loop_that_has_ended_is_passed_on(noting: Signals) -> None:
    later = Signals(ALL)
    later.begin()
    noting.end()
    signal.raise_signal(signal.SIGINT)
    later.end()

    with pytest.raises(KeyboardInterrupt):
        later.pass_on()


@pytest.mark.parametrize("number", ALL)
def test_a_training_in_a_forked_process_notes_signals_itself(noting: Signals, number: signal.Signals) -> None:
    def train() -> None:
        own = Signals(ALL)
        own.begin()
        signal.raise_signal(number)
        os._exit(own.received is number)

    assert ends_with(train) == 1


def test_a_loop_that_is_dropped_in_another_thread_gives_the_signals_back(noting: Signals) -> None:
    thread = threading.Thread(target=noting.end)
    thread.start()
    thread.join()

    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_nothing_to_watch_changes_nothing() -> None:
    found = Signals([])
    found.begin()
    assert found.shared() is None
    found.end()
    found.pass_on()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_forked_process_is_ended_by_what_its_parent_notes(noting: Signals, number: signal.Signals) -> None:
    assert ends_with(lambda: signal.raise_signal(number)) == -number


def test_what_was_noted_and_not_acted_on_is_passed_on() -> None:
    def leave() -> None:
        found = Signals([signal.SIGTERM])
        found.begin()
        signal.raise_signal(signal.SIGTERM)
        found.end()
        found.pass_on()

    assert ends_with(leave) == -signal.SIGTERM


def test_ctrl_c_that_was_not_acted_on_is_raised_when_the_loops_are_over(noting: Signals) -> None:
    signal.raise_signal(signal.SIGINT)
    noting.end()

    with pytest.raises(KeyboardInterrupt):
        noting.pass_on()
    assert noting.received is None


def test_a_handler_that_was_called_is_not_called_again(noting: Signals) -> None:
    noting.end()
    called: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: called.append(number))
    noting.begin()
    signal.raise_signal(signal.SIGUSR1)
    noting.end()

    noting.pass_on()

    assert called == [signal.SIGUSR1]


def test_workers_that_the_same_signal_ends_are_not_raised_in_mid_batch(noting: Signals) -> None:
    told: list[int] = []
    signal.signal(signal.SIGCHLD, lambda number, _: told.append(number))
    signal.raise_signal(signal.SIGTERM)

    signal.raise_signal(signal.SIGCHLD)
    noting.end()
    signal.raise_signal(signal.SIGCHLD)

    assert told == [signal.SIGCHLD]


@pytest.mark.parametrize("number", ALL)
def test_a_worker_lives_through_what_its_training_notes(noting: Signals, number: signal.Signals) -> None:
    shared = signals.shared_with_workers()
    assert shared

    def work() -> None:
        signals.spare(shared)
        signal.raise_signal(number)
        signal.raise_signal(number)
        os._exit(7)

    assert ends_with(work) == 7


@pytest.mark.parametrize(("number", "ends"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 1)])
def test_a_worker_is_ended_when_the_loops_are_over(
    noting: Signals, number: signal.Signals, ends: int
) -> None:
    shared = signals.shared_with_workers()
    assert shared

    def work() -> None:
        signals.spare(shared)
        noting._is_in_loop.value = False
        signal.raise_signal(number)

    assert ends_with(work) == ends


def test_at_the_interpreters_end_no_worker_is_spared_any_more(noting: Signals) -> None:
    def work() -> None:
        signals._end(noting)
        os._exit(8 if noting._is_in_loop.value else 9)

    noting._process = os.getpid()
    assert ends_with(work) == 8

    signals._end(noting)
    assert not noting._is_in_loop.value


def test_a_fork_that_leaves_the_loops_leaves_its_parents_workers_spared(
    noting: Signals,
) -> None:
    assert ends_with(noting.end) == 0

    _, is_in_loop = noting.shared() or pytest.fail("nothing is shared")
    assert is_in_loop.value


@pytest.mark.parametrize("number", ALL)
def test_a_worker_lives_through_a_signal_that_comes_before_its_handler(
    noting: Signals, number: signal.Signals
) -> None:
    shared = signals.shared_with_workers()
    assert shared

    def work() -> None:
        signal.raise_signal(number)
        signals.spare(shared)
        os._exit(8 if signal.pthread_sigmask(signal.SIG_BLOCK, ()) else 7)

    with signals.blocked(shared[0]):
        ended = ends_with(work)

    assert ended == 7


@pytest.mark.parametrize("number", ALL)
def test_a_signal_is_noted_once_the_workers_have_started(noting: Signals, number: signal.Signals) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())

    with signals.blocked(ALL):
        signal.raise_signal(number)
        assert noting.received is None

    assert noting.received is number
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
