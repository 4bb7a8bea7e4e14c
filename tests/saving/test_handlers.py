"""The handler of a signal may interrupt a step that copies for a save at any line, and wait for the save."""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from fenced import Training, values
from safetensors.torch import load_file
from torch import nn

from resumable import RunState, SaveFailed, UsageError
from resumable.saving import condition, fence, image, image_file, pieces, saver, snapshot, writer
from resumable.saving.gpu_copies import Copy
from resumable.saving.image import Image
from resumable.saving.writer import PendingSave

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs signals that end a hang")
FILES = {condition.__file__, fence.__file__, pieces.__file__, snapshot.__file__}
SAVING = {saver.__file__, image.__file__, snapshot.__file__, writer.__file__}
CASES = [*itertools.product(["wait", "save", "close", "raise"], ["", "step", "image"])]
"""What the handler calls, and which thread fails to copy."""
_real_copy = snapshot._copy


@pytest.fixture(autouse=True)
def _behind_the_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the smallest state be worth a fence, each tensor be a piece, and nothing be waited for long."""
    assert Image.__init__.__defaults__
    monkeypatch.setattr(Image.__init__, "__defaults__", (*Image.__init__.__defaults__[:-1], 0))
    monkeypatch.setattr(snapshot, "_AT_A_TIME", 1)
    monkeypatch.setattr(image_file, "_SMALL", 1)
    monkeypatch.setattr(pieces, "_PATIENCE", 0.01)
    monkeypatch.setattr(condition, "_LONGEST", 0.01)


@contextlib.contextmanager
def interrupted_at(
    place: int, handler: Callable[[], object], *, opcodes: bool = False, files: Set[str] = FILES
) -> Iterator[list[str]]:
    """Raise a signal when the main thread comes to its n-th line (or bytecode) in the files."""
    seen: list[str] = []

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = opcodes
        if event == ("opcode" if opcodes else "line"):
            seen.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
            if len(seen) == place:
                signal.raise_signal(signal.SIGUSR1)
        return trace

    def hangs(*_: object) -> None:
        sys.settrace(None)
        raise AssertionError(f"hangs when it is interrupted at {seen[place - 1 :][:1]}")

    before = signal.signal(signal.SIGUSR1, lambda *_: handler()), signal.signal(signal.SIGALRM, hangs)
    traced, is_grad_on = sys.gettrace(), torch.is_grad_enabled()
    signal.setitimer(signal.ITIMER_REAL, 10)
    sys.settrace(trace)
    try:
        yield seen
    finally:
        sys.settrace(traced)
        # One that raises between the body of a `with torch.no_grad()` and its end leaves it off.
        torch.set_grad_enabled(is_grad_on)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, one in zip((signal.SIGUSR1, signal.SIGALRM), before, strict=True):
            signal.signal(number, one)


def _bits(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


class Interrupted:
    """A training whose step copies for its last save, until the handler lets the image's thread do so."""

    def __init__(self, run_dir: Path, fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run_dir, self.fails, self.go = run_dir, fails, threading.Event()
        real_run = snapshot.Snapshot._run
        monkeypatch.setattr(snapshot.Snapshot, "_run", lambda taken: (self.go.wait(20), real_run(taken))[1])
        monkeypatch.setattr(snapshot, "_copy", self.copy)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.is_stepping = False
        self.begin()

    def copy(self, copies: Sequence[Copy]) -> None:
        by = "step" if threading.current_thread() is threading.main_thread() else "image"
        # What is copied before the first save() returns is not behind the fence.
        if by == self.fails and self.is_stepping and copies:
            raise RuntimeError("lost")
        _real_copy(copies)

    def begin(self) -> None:
        self.state = RunState.load(
            self.run_dir, model=self.model, optimizer=self.optimizer, every=None, keep=2, quiet=True
        )
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)

    def handle(self, what: str) -> None:
        self.go.set()
        if what == "save":
            self.saves.append((self.state.save(), self.values()))
        elif what != "raise":
            getattr(self.state, what)()

    def values(self) -> dict[str, bytes]:
        return _bits(self.model.state_dict())

    def call_in_save(self, place: int, call: Callable[[RunState], object]) -> tuple[list[PendingSave], bool]:
        """Return the saves that were made, and whether one came to the place."""
        self.go.set()
        self.optimizer.step()
        state, made = self.state, list[Any]()
        interrupted = interrupted_at(place, lambda: made.append(call(state)), files=SAVING)
        # Of a run that was closed meanwhile.
        with interrupted as seen, contextlib.suppress(UsageError):
            made.append(state.save())
        made = [one for one in made if one is not None]
        for one in made:
            one.wait()
            assert _bits(load_file(one.path / "model.safetensors")) == self.values()
        state.close()
        for number in state.run.numbers():
            there = state.run.open(number)
            there.verify()
            assert (there.path / "model.safetensors").exists()
        self.begin()
        return made, len(seen) >= place

    def step(self, place: int, what: str, *, opcodes: bool) -> bool:
        """Return whether the step came to the place, after all that was saved is found to be whole."""
        self.go.set()
        self.optimizer.step()
        self.go.clear()
        self.saves = [(self.state.save(), self.values())]

        def handler() -> None:
            self.is_stepping = False
            with contextlib.suppress(SaveFailed):
                self.handle(what)
            if what != "save" and what != "wait":
                raise SystemExit

        self.is_stepping = True
        with interrupted_at(place, handler, opcodes=opcodes) as seen, contextlib.suppress(SystemExit):
            self.optimizer.step()
        self.is_stepping = False
        if what == "raise":
            with interrupted_at(0, self.optimizer.step, opcodes=False):
                self.optimizer.step()
        self.go.set()
        with contextlib.suppress(SaveFailed):
            self.state.wait()
        for saved, expected in self.saves:
            if self.fails and not saved.path.exists():
                with pytest.raises(SaveFailed, match="lost"):
                    saved.wait()
                continue
            saved.wait()
            self.state.run.open(saved.number).verify()
            assert _bits(load_file(saved.path / "model.safetensors")) == expected
        return len(seen) >= place


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("what", "fails", "opcodes", "stride"),
    [
        *((*case, False, 13) for case in CASES[:4]),
        *(pytest.param(*case, False, 5, marks=pytest.mark.heavy) for case in CASES),
        *(pytest.param(*case, False, 1, marks=pytest.mark.nightly) for case in CASES),
        *(pytest.param(*case, True, 1, marks=pytest.mark.nightly) for case in CASES[:3]),
    ],
)
def test_a_handler_at_any_line_of_a_step_that_copies_may_wait(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, what: str, fails: str, opcodes: bool, stride: int
) -> None:
    training = Interrupted(run_dir, fails, monkeypatch)
    places = itertools.count(1, stride)
    while training.step(next(places), what, opcodes=opcodes):
        if what == "close":
            training.begin()
    training.state.close()

    assert next(places) > 60


@pytest.mark.heavy
@pytest.mark.parametrize("stride", [29, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_handler_may_close_the_run(run_dir: Path, monkeypatch: pytest.MonkeyPatch, stride: int) -> None:
    training, counts = Interrupted(run_dir, "", monkeypatch), set[int]()
    for place in itertools.count(1, stride):
        made, is_reached = training.call_in_save(place, RunState.close)
        counts.add(len(made))
        if not is_reached:
            break

    assert counts == {0, 1}


@pytest.mark.heavy
@pytest.mark.parametrize("stride", [59, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_handler_may_save(run_dir: Path, monkeypatch: pytest.MonkeyPatch, stride: int) -> None:
    training = Interrupted(run_dir, "", monkeypatch)
    for place in itertools.count(1, stride):
        made, is_reached = training.call_in_save(place, RunState.save)
        assert len({one.number for one in made}) == 1 + is_reached
        if not is_reached:
            break


def test_a_save_that_is_interrupted_as_it_shuts_the_fence_opens_it(monkeypatch: pytest.MonkeyPatch) -> None:
    training, shut = Training(), fence.Fence.shut

    def interrupted(*given: Any) -> None:
        shut(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(fence.Fence, "shut", interrupted)
        with pytest.raises(KeyboardInterrupt):
            training.take()
    with interrupted_at(0, training.step, opcodes=False):
        training.step()
        assert values(training.take()) == training.values()
