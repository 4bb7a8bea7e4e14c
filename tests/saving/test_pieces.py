"""What is copied behind the fence: by the image's thread, and by a step that would wait for it."""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import pytest
import torch
from fenced import Training, values

from resumable import SaveFailed
from resumable.saving import image_file, pieces, snapshot
from resumable.saving.condition import ConditionWithoutLock
from resumable.saving.gpu_copies import Copy
from resumable.saving.pieces import Pieces
from resumable.saving.snapshot import Snapshot

_real_copy = snapshot._copy
_real_run = Snapshot._run


def three() -> Training:
    """Return a training with three parameters that are copied one by one."""
    return Training(torch.optim.Adam, image_file._SMALL // 4, count=3)


@pytest.fixture
def go(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set, the image's thread does nothing; each tensor is a piece."""
    event = threading.Event()
    monkeypatch.setattr(Snapshot, "_run", lambda self: (event.wait(20), _real_run(self))[1])
    monkeypatch.setattr(snapshot, "_AT_A_TIME", 1)
    yield event
    event.set()
    for thread in threading.enumerate():
        if thread.name == "resumable-image":
            thread.join(20)


def test_a_step_copies_by_itself_what_no_thread_has_begun(go: threading.Event) -> None:
    training = three()
    before = training.values()
    taken = training.take()

    training.step()
    training.step()

    assert not go.is_set(), "the image's thread had no turn"
    assert training.values() != before
    go.set()
    assert values(taken) == before


def test_a_step_waits_for_a_piece_in_hand_and_copies_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_AT_A_TIME", 1)
    begun, may_end, by = threading.Event(), threading.Event(), []

    def copy(copies: Sequence[Copy]) -> None:
        by.append(threading.current_thread().name)
        if by[-1] == "resumable-image":
            begun.set()
            assert may_end.wait(20)
        _real_copy(copies)

    monkeypatch.setattr(snapshot, "_copy", copy)
    training = three()
    before = training.values()
    taken = training.take()
    assert begun.wait(20)
    stepping = threading.Thread(target=training.step, name="step")
    stepping.start()
    stepping.join(0.05)
    assert stepping.is_alive()
    assert training.values() == before
    may_end.set()
    stepping.join(20)

    assert values(taken) == before != training.values()
    assert sorted(name for name in by if name != "MainThread") == ["resumable-image", "step", "step"]


def test_a_write_through_data_is_found_though_the_step_copied(go: threading.Event) -> None:
    training = three()
    taken = training.take()
    training.parameters[2].data.fill_(9)
    training.step()
    go.set()

    with pytest.raises(SaveFailed, match=r"c was written to after save\(\), but not by a step"):
        values(taken)


def test_a_save_within_a_step_copies_before_that_step_goes_on(go: threading.Event) -> None:
    training = three()
    taken, before = [], training.values()
    hook = training.optimizer.register_step_pre_hook(lambda *_: taken.append(training.take()))
    training.step()
    hook.remove()
    training.step()
    # The next one is taken into the same memory.
    within = values(taken[0])
    later, then = training.take(), training.values()
    assert later._later, "steps that are over hold nothing against the fence"
    go.set()

    assert [within, values(later)] == [before, then]


def failing(error: BaseException, times: int) -> Callable[[Sequence[Copy]], None]:
    """Return a copy that fails some times in the main thread, after the first tensor."""
    count = iter(range(99))

    def copy(copies: Sequence[Copy]) -> None:
        if threading.current_thread() is threading.main_thread() and 1 <= next(count) <= times:
            raise error
        _real_copy(copies)

    return copy


def test_an_error_of_a_copy_is_the_saves(go: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    training = three()
    taken = training.take()
    monkeypatch.setattr(snapshot, "_copy", failing(RuntimeError("lost"), 1))
    before = training.values()
    training.step()
    assert training.values() != before
    go.set()

    for _ in range(2):
        with pytest.raises(SaveFailed, match=r"could not be copied.*lost") as told:
            values(taken)
    assert isinstance(told.value.__cause__, RuntimeError)
    training.step()
    assert values(training.take()) == training.values()


def test_an_interrupted_step_loses_no_piece(go: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    training = three()
    before = training.values()
    taken = training.take()
    monkeypatch.setattr(snapshot, "_copy", failing(KeyboardInterrupt(), 1))
    with pytest.raises(KeyboardInterrupt):
        training.step()
    assert training.values() == before, "it has not begun"
    go.set()

    assert values(taken) == before


def copies(*sizes: int, dtype: torch.dtype = torch.uint8) -> list[Copy]:
    """Return copies of random tensors that lie in one file, one after the other."""
    found, begin = [], 0
    for size in sizes:
        source = torch.randint(0, 100, (size,), dtype=torch.uint8).to(dtype)
        found.append(Copy("file", str(len(found)), begin, torch.zeros_like(source), source))
        begin += source.nbytes
    return found


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.complex128], ids=str)
@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000])
def test_a_large_tensor_is_copied_in_several_pieces(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, size: int
) -> None:
    monkeypatch.setattr(pieces, "_LONGEST", 64)
    given = copies(size, 5, dtype=dtype)
    seen: list[int] = []
    there = Pieces(given, 64, ConditionWithoutLock())
    there.finish(lambda some: (seen.append(sum(one.view.nbytes for one in some)), _real_copy(some))[1])

    assert all(torch.equal(copy.view, copy.source) for copy in given)
    assert max(seen) <= 128
    assert sum(seen) == sum(copy.view.nbytes for copy in given)


def test_what_is_stopped_copies_nothing_more_when_stop_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_PATIENCE", 0.01)
    held, begun, changed, done = threading.Event(), threading.Event(), ConditionWithoutLock(), []
    there = Pieces(copies(4, 4), 4, changed)
    copying = threading.Thread(
        target=there.finish, args=(lambda some: (begun.set(), held.wait(20), done.append(1)),)
    )
    copying.start()
    assert begun.wait(20)
    stopping = threading.Thread(target=there.stop)
    stopping.start()
    stopping.join(0.05)
    assert stopping.is_alive()
    held.set()
    stopping.join(20)
    copying.join(20)

    assert done == [1]


def test_a_step_waits_until_a_piece_is_copied_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_PATIENCE", 0.01)
    there = Pieces(copies(4), 4, ConditionWithoutLock())
    held, begun, taken_over = threading.Event(), threading.Event(), threading.Event()
    step = threading.Thread(target=there.help, args=(lambda some: (begun.set(), taken_over.wait(20)),))
    step.start()
    assert begun.wait(20)
    image = threading.Thread(target=there.finish, args=(lambda some: (taken_over.set(), held.wait(20)),))
    image.start()
    step.join(0.05)

    assert taken_over.is_set()
    assert step.is_alive(), "the other thread still reads what the step would change"
    held.set()
    step.join(20)
    image.join(20)
    assert not step.is_alive()


def test_a_step_does_not_wait_for_one_interrupted_at_its_end() -> None:
    there = Pieces(copies(4), 4, ConditionWithoutLock())

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is Pieces._copy.__code__ and event == "line" and 0 not in there._is_copied:
            source = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            if "self._copying." in source:
                raise KeyboardInterrupt
        return trace

    traced = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            there.help(_real_copy)
    finally:
        sys.settrace(traced)
    assert there._copying
    second = threading.Thread(target=there.help, args=(_real_copy,), daemon=True)
    second.start()
    second.join(2)

    assert not second.is_alive()


def test_an_interrupted_start_waits_for_its_end(go: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    training, start = three(), threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            training.take()
    settling = threading.Thread(target=training.image.settle)
    settling.start()
    settling.join(0.05)
    assert settling.is_alive(), "the thread has not ended"
    go.set()
    settling.join(20)
    training.step()

    assert values(training.take()) == training.values()
