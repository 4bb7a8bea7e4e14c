"""Ranks of one training in threads of one process, with a store in memory: what they say, and when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from resumable import RankLost, RanksDiffer, StateMismatch, Unsupported
from resumable.processes import ranks, store_thread
from resumable.processes.ranks import Ranks

TIMEOUT = 1.0


class Silent:
    """A store that stops to answer when it is told to, as one whose process is stopped."""

    def __init__(self) -> None:
        self._inner = torch.distributed.HashStore()
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.error: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.may_answer.wait()
            if self.error:
                raise self.error
            return getattr(self._inner, name)(*args)

        return call


_crowds: list[Crowd] = []


@pytest.fixture(autouse=True)
def _nobody_stays() -> Iterator[None]:
    yield
    for crowd in _crowds:
        if isinstance(crowd.store, Silent):
            crowd.store.may_answer.set()
        for one in crowd.ranks:
            _caught(Ranks.leave, one)
            one.close()
    _crowds.clear()
    until(lambda: not any(thread.name == "resumable-ranks" for thread in threading.enumerate()))


class Crowd:
    """Some ranks, each to be used in a thread of its own."""

    def __init__(
        self, size: int, monkeypatch: pytest.MonkeyPatch, timeout: float = TIMEOUT, store: Any = None
    ) -> None:
        self.store = store or Silent()
        _crowds.append(self)
        self.places = [(0, 0, 0)] * size
        monkeypatch.setattr(store_thread, "shared_store", lambda: self.store)
        if store is None:
            monkeypatch.setattr(store_thread.Line, "_prefixed", lambda self, shared, token: shared)
        self.ranks = []
        for rank in range(size):
            monkeypatch.setattr(ranks, "of_this_training", lambda rank=rank: (rank, size))
            self.ranks.append(Ranks(timeout, lambda rank=rank: self.places[rank]))

    def each(self, do: Callable[[Ranks], Any], only: range | None = None) -> list[Any]:
        chosen = self.ranks if only is None else [self.ranks[rank] for rank in only]
        with ThreadPoolExecutor(len(chosen)) as pool:
            return list(pool.map(lambda one: _caught(do, one), chosen))

    def join(self, only: range | None = None, **facts: Any) -> list[Any]:
        lock = threading.Lock()

        def join(one: Ranks) -> None:
            with lock:
                # In one process they would count their sessions together
                ranks._sessions = 0
            one.join({name: value[one.rank] for name, value in facts.items()}, {})

        return self.each(join, only)


def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        time.sleep(0.01)


def _caught(do: Callable[[Ranks], Any], one: Ranks) -> Any:
    try:
        return do(one)
    except Exception as exc:
        return exc


@pytest.fixture
def crowd(monkeypatch: pytest.MonkeyPatch) -> Crowd:
    crowd = Crowd(3, monkeypatch)
    assert crowd.join() == [None] * 3
    return crowd


def test_all_hear_what_all_have_done(crowd: Crowd) -> None:
    assert crowd.each(lambda one: one.agree("a count", lambda: one.rank * 2)) == [[0, 2, 4]] * 3
    assert crowd.each(lambda one: one.first("a word", lambda: f"of {one.rank}")) == ["of 0"] * 3
    assert crowd.each(lambda one: one.each("a thing", lambda: {one.rank})) == [{0}, {1}, {2}]


def test_what_one_refuses_all_refuse(crowd: Crowd) -> None:
    def do(one: Ranks) -> None:
        if one.rank == 1:
            raise StateMismatch("it does not fit.", fix="mend it")

    found = crowd.each(lambda one: one.agree("a thing", lambda: do(one)))

    assert {str(error) for error in found} == {"rank 1: it does not fit.\nFix: mend it"}
    assert {type(error) for error in found} == {StateMismatch}


def test_another_error_is_its_own_there_and_a_lost_rank_elsewhere(crowd: Crowd) -> None:
    def do(one: Ranks) -> None:
        if one.rank == 2:
            raise ZeroDivisionError("oh")

    found = crowd.each(lambda one: one.agree("a thing", lambda: do(one)))

    assert [type(error) for error in found] == [RankLost, RankLost, ZeroDivisionError]
    assert "rank 2 cannot continue: ZeroDivisionError: oh" in str(found[0])


@pytest.mark.heavy
def test_a_rank_that_does_not_come_is_named_with_where_it_stands(crowd: Crowd) -> None:
    crowd.places[2] = (1, 20, 300)
    until(lambda: crowd.ranks[0].pulse(2)[1:] == [1, 20, 300])

    found = crowd.each(lambda one: one.agree("a thing", lambda: None, is_due=True), range(2))

    assert {type(error) for error in found} == {RankLost}
    assert "rank 2 (process" in str(found[0])
    assert "which runs, at epoch 1, batch 20, step 300, but did not come" in str(found[0])
    assert "not under `if rank == 0:`" in found[0].fix


def test_a_rank_that_has_left_is_named_at_once_with_its_reason(crowd: Crowd) -> None:
    crowd.ranks[1].leave("ValueError: oh")

    found = crowd.each(lambda one: one.agree("a thing", lambda: None), range(0, 3, 2))

    assert "has left the training: ValueError: oh" in str(found[0])


def test_what_was_posted_before_leaving_counts(crowd: Crowd) -> None:
    crowd.ranks[1].post("word", "a last one")
    crowd.ranks[1].leave()

    assert crowd.ranks[0].wait({1: "word"}, "a thing") == ["a last one"]


@pytest.mark.heavy
def test_what_is_not_due_may_take_longer_while_its_rank_lives(crowd: Crowd) -> None:
    began = time.monotonic()

    def post_late() -> None:
        until(lambda: time.monotonic() - began > 2 * TIMEOUT)
        crowd.ranks[1].post("late", 1)

    late = threading.Thread(target=post_late)
    late.start()

    assert crowd.ranks[0].wait({1: "late"}, "a thing") == [1]
    late.join()


def test_a_save_that_one_makes_alone_is_an_error_on_all(crowd: Crowd) -> None:
    crowd.ranks[0].saves_begun = 5
    crowd.ranks[0].post("news", [5, 0, 40])
    crowd.places[:] = [(0, 0, 40), (0, 0, 40), (0, 0, 40)]
    until(lambda: all(crowd.ranks[0].pulse(rank)[1:] == [0, 0, 40] for rank in range(3)))
    for one in crowd.ranks:
        one.refuse_trouble()

    crowd.places[1] = (0, 1, 41)

    until(lambda: all(one.trouble for one in crowd.ranks))
    for one in crowd.ranks:
        with pytest.raises(RanksDiffer, match=r"rank 0 called save\(\) at step 40 .* rank 1 has gone on"):
            one.refuse_trouble()


def test_a_store_that_does_not_answer_costs_the_timeout(crowd: Crowd) -> None:
    crowd.store.may_answer.clear()

    with pytest.raises(RankLost, match=r"has not answered for 1 s: the process that keeps it"):
        crowd.ranks[1].post("word", 1)
    with pytest.raises(RankLost, match="has not answered"):
        crowd.ranks[1].refuse_trouble()


def test_a_store_that_is_gone_is_reported(crowd: Crowd) -> None:
    crowd.store.error = RuntimeError("Connection reset by peer\nand a long story")

    with pytest.raises(RankLost, match=r"cannot be reached any more \(Connection reset by peer\): "):
        crowd.ranks[0].post("word", 1)


def test_ranks_that_were_made_otherwise_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = Crowd(2, monkeypatch)

    found = crowd.join(torch=["2.13", "2.12"], keep=[3, 3])

    assert {type(error) for error in found} == {RanksDiffer}
    assert "torch is '2.13' on rank 0 and '2.12' on rank 1" in str(found[0])
    assert "keep" not in str(found[0])


def test_a_rank_without_the_first_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = Crowd(2, monkeypatch, timeout=0.3)

    (error,) = crowd.join(range(1, 2))

    assert isinstance(error, RankLost)
    assert "rank 1 has waited 0.3 s for rank 0 to make or load its RunState" in str(error)


def test_a_session_that_cannot_be_opened_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = Crowd(2, monkeypatch)
    crowd.store.error = RuntimeError("no route to host")

    (error,) = crowd.join(range(1))

    assert isinstance(error, RankLost)
    assert "no route to host" in str(error)


def test_what_processes_that_have_ended_said_is_not_taken_for_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = torch.distributed.HashStore()
    before = Crowd(2, monkeypatch, store=store)
    assert before.join() == [None] * 2
    before.ranks[0].leave()

    after = Crowd(2, monkeypatch, store=store, timeout=5)
    with ThreadPoolExecutor() as pool:
        second = pool.submit(after.join, range(1, 2))
        until(lambda: store.add("resumable/1/asked", 0) == 2)
        assert after.join(range(1)) == [None]
        assert second.result() == [None]

    assert after.each(lambda one: one.agree("a count", lambda: one.rank)) == [[0, 1]] * 2


def test_bytes_go_in_pieces(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_PIECE", 10)
    content = bytes(range(33))

    keys = crowd.ranks[0].post_bytes("content", content)

    assert crowd.ranks[1].bytes_of("content") == content
    assert len(keys) == 5
    crowd.ranks[0].forget(keys)
    assert not crowd.ranks[1].is_there("content")


def test_ranks_are_grouped_by_what_they_see(crowd: Crowd, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b", tmp_path / "a"]

    assert crowd.each(lambda one: ranks.by_disk(one, folders[one.rank])) == [[[0, 2], [1]]] * 3
    assert not [*tmp_path.glob("*/*")]


def test_a_single_process_asks_no_other() -> None:
    alone = Ranks(1, lambda: (0, 0, 0))

    alone.join({}, {})

    assert alone.is_alone
    assert alone.agree("a thing", lambda: 3) == [3]
    assert alone.first("a thing", lambda: 4) == 4
    alone.leave()


def test_a_training_without_a_store_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: None)

    with pytest.raises(Unsupported, match="no store in common"):
        store_thread.shared_store()
