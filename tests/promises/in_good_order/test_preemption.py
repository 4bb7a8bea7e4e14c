"""A training that is told to leave saves at the next boundary, leaves, and continues bit for bit."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gloo
import numpy as np
import pytest
import torch
from forks import WARM, Life
from grouped import grouped
from torch import nn
from torch.utils.data import DataLoader, Dataset

from resumable import Preempt, Preempted, Run, RunState
from resumable.saving.autosave import began
from resumable.views import listing

EPOCHS, WINDOW = 3, 2


class Augmented(Dataset[Any]):
    """Samples drawn at random as they are loaded; one of them may send the training a signal."""

    def __init__(self, send: Callable[[], None] = lambda: None, at: int = -1) -> None:
        self.send, self.at = send, at

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.at:
            self.send()
        return torch.arange(4) * index / 32 + torch.rand(4) + random.random() + float(np.random.rand())


def sender(number: signal.Signals, *, is_group: bool) -> Callable[[], None]:
    def send() -> None:
        # The processes that load, too: so do torchrun, SLURM and a terminal.
        os.killpg(0, number) if is_group else os.kill(os.getpid(), number)

    return send


def train(
    _: int, run_dir: Path, where: str, at: int | None, number: signal.Signals, is_group: bool, **options: Any
) -> tuple[str, int]:
    """Train to the end, or until the signal that comes at step `at`."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    send = sender(number, is_group=is_group)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
    workers = 0 if where == "steps" else 2
    loader = DataLoader(
        Augmented(), 2, shuffle=True, num_workers=workers, persistent_workers=where == "persistent"
    )
    # A group signal reaches these workers too, though the loader is not given.
    others = DataLoader(Augmented(), 8, num_workers=1, generator=torch.Generator())
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    size = WINDOW if where == "window" else 1

    def learn(x: torch.Tensor, is_last: bool) -> None:
        model(x).square().mean().backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()

    with RunState.load(run_dir, **parts, loader=loader, keep=None, **grouped(**options)) as state:
        if where == "steps":
            for step in state.steps(24):
                learn(torch.rand(2, 4), is_last=True)
                if step == at:
                    send()
            return digest(model, optimizer), state.step
        for _epoch in state.epochs(EPOCHS):
            for x in state.batches():
                is_first_of_window = state.batch % size == 0
                if state.step == at and is_first_of_window and where in ("body", "persistent", "window"):
                    send()
                learn(x, is_last=(state.batch + 1) % size == 0)
                if state.step == at and where == "save":
                    state.save()
                    send()
            for number_of_batch, x in enumerate(others):
                if state.step == at and where == "validation" and number_of_batch == 1:
                    send()
                model(x)
            scheduler.step()
            if state.step == at and where == "rest":
                send()
            state.save()
    return digest(model, optimizer), state.step


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    parts = [tensor.detach().numpy().tobytes() for tensor in model.state_dict().values()]
    parts += [value.numpy().tobytes() for state in optimizer.state.values() for value in state.values()]
    parts.append(f"{random.random()} {np.random.rand()} {torch.rand(1).item()}".encode())
    return hashlib.sha256(b"|".join(parts)).hexdigest()


def ended(folder: Path, run_dir: Path, *args: Any) -> gloo.Ended:
    (found,) = gloo.run(1, train, run_dir, *args, folder=folder)
    return found


# In an epoch's body (16 batches) by batch, in a validation by what was trained before it.
PLACES = [
    ("body", 5, 37),
    ("body", 15, 32),
    ("persistent", 9, 20),
    ("window", 3, 12),
    ("save", 6, 33),
    ("steps", 0, 11),
    ("validation", 16, 32),
    ("rest", 16, 32),
]


def _when(place: int, index: int) -> list[pytest.MarkDecorator]:
    """One signal at each place is sent by every run, one more by CI: at each place another."""
    if index == 0:
        return []
    return [pytest.mark.heavy] if index == 1 + place % 4 else [pytest.mark.nightly]


@pytest.mark.proves("in good order")
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("where", "first", "second", "number", "is_group"),
    [
        pytest.param(*place, number, is_group, marks=_when(at, index))
        for at, place in enumerate(PLACES)
        for index, (number, is_group) in enumerate(
            [
                (signal.SIGTERM, False),
                (signal.SIGINT, False),
                (signal.SIGUSR1, False),
                (signal.SIGTERM, True),
                (signal.SIGINT, True),
            ]
        )
    ],
)
@pytest.mark.sampled(3)
@pytest.mark.heavy
def test_a_signal_ends_a_training_that_continues_bit_for_bit(
    tmp_path: Path, where: str, first: int, second: int, number: signal.Signals, is_group: bool
) -> None:
    whole = ended(tmp_path, tmp_path / "whole", where, None, number, is_group)
    starts = [ended(tmp_path, tmp_path / "run", where, at, number, is_group) for at in (first, second, None)]

    for start, at in zip(starts[:2], (first, second), strict=True):
        assert isinstance(start.error, SystemExit), start.error
        assert start.error.code == 128 + number
        (line,) = [line for line in start.printed.splitlines() if line.startswith(number.name)]
        assert f"step {at}" in line or f"step {at + 1}" in line
    assert starts[2].value == whole.value
    run = Run(tmp_path / "run")
    for found in run.checkpoints():
        found.verify()


@pytest.mark.proves("in good order")
def test_inside_an_accumulation_window_it_waits_for_the_end_of_the_window(tmp_path: Path) -> None:
    ended(tmp_path, tmp_path / "run", "window", 3, signal.SIGTERM, False)

    newest = Run(tmp_path / "run").checkpoints()[-1].about
    assert (newest.step, newest.batch) == (4, 8)


def test_what_was_saved_at_the_same_place_is_not_saved_again(tmp_path: Path) -> None:
    ended(tmp_path, tmp_path / "run", "save", 6, signal.SIGTERM, False)

    assert [found.about.step for found in Run(tmp_path / "run").checkpoints()] == [6]


SCRIPT = """
import os, signal, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from resumable import Preempted, RunState

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(12, 4)), batch_size=2, num_workers=2)
state = RunState.load(sys.argv[1], model=model, optimizer=optimizer, loader=loader)
for epoch in state.epochs(3):
    for (x,) in state.batches():
        model(x).sum().backward()
        optimizer.step()
        if state.step % 4 == 0:
            for name in sys.argv[2:]:
                signal.raise_signal(getattr(signal, name))
print(f"done after {state.step}")
"""


def script(run_dir: Path, *names: str) -> Life:
    return WARM.run(["-c", SCRIPT, run_dir, *names], Path.cwd())


@pytest.mark.proves("in good order")
@pytest.mark.heavy
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_the_exit_code_says_which_signal_it_was_and_one_line_what_happened(run_dir: Path, name: str) -> None:
    done = script(run_dir, name)

    assert done.code == 128 + getattr(signal, name), done.err
    assert done.out.splitlines()[1:] == [
        f"{name}: {run_dir} is saved, checkpoint 1: epoch 0, batch 4/6, step 4; "
        "the same command continues from there"
    ]
    assert script(run_dir).out.splitlines()[-1] == "done after 18"


@pytest.mark.heavy
def test_a_second_ctrl_c_leaves_at_once_and_saves_nothing(run_dir: Path) -> None:
    done = script(run_dir, "SIGINT", "SIGINT")

    assert done.code == 130
    assert "Traceback" not in done.err
    left = "left at once, without saving; the same command"
    assert done.out.splitlines()[-1] == f"{left} starts fresh"
    assert Run(run_dir).numbers() == []
    assert listing.of_run(Run(run_dir)).state == "stopped"

    script(run_dir, "SIGINT")
    done = script(run_dir, "SIGINT", "SIGINT")

    assert done.out.splitlines()[-1] == f"{left} continues from checkpoint 1 (step 4)"


class Training:
    """A training in this process that can be signalled."""

    def __init__(self) -> None:
        self.error: type[Exception] | None = None
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def load(self, run_dir: Path, **options: Any) -> RunState:
        return RunState.load(run_dir, model=self.model, optimizer=self.optimizer, **grouped(**options))

    def step(self) -> None:
        self.model(torch.ones(2)).sum().backward()
        self.optimizer.step()

    def train(self, state: RunState, number: signal.Signals | None = None, at: int = 0) -> list[int]:
        """Make six steps; a signal comes in one of them, and perhaps an error right after it."""
        done = []
        for step in state.steps(6):
            self.step()
            done.append(step)
            if number and step == at:
                signal.raise_signal(number)
                if self.error:
                    raise self.error
        return done


@pytest.fixture
def training() -> Training:
    return Training()


def test_it_can_raise_instead_and_then_continue(run_dir: Path, training: Training) -> None:
    with training.load(run_dir, on_preempt="raise") as state:
        with pytest.raises(Preempted, match=r"SIGTERM: .* is saved, checkpoint 1: epoch 0, step 3") as caught:
            training.train(state, signal.SIGTERM, at=2)
        assert caught.value.signal is signal.SIGTERM
        assert training.train(state) == [3, 4, 5]


def test_the_run_is_closed_when_it_exits(run_dir: Path, training: Training) -> None:
    state = training.load(run_dir)
    with pytest.raises(SystemExit, match="143"):
        training.train(state, signal.SIGTERM)

    # Another process could write it now
    assert state.run._lock is None
    assert Run(run_dir).checkpoints()[-1].about.step == 1


def test_signals_that_are_not_watched_do_what_they_always_do(run_dir: Path, training: Training) -> None:
    with training.load(run_dir, signals=["SIGTERM"], every=None) as state, pytest.raises(KeyboardInterrupt):
        training.train(state, signal.SIGINT)


def test_a_signal_after_a_break_is_passed_on_when_the_state_is_closed(
    run_dir: Path, training: Training
) -> None:
    state = training.load(run_dir)
    for _ in state.steps(6):
        signal.raise_signal(signal.SIGINT)
        break

    with pytest.raises(KeyboardInterrupt):
        state.close()


def test_a_signal_during_an_error_does_not_hide_the_error(run_dir: Path, training: Training) -> None:
    training.error = ZeroDivisionError

    with pytest.raises(ZeroDivisionError), training.load(run_dir) as state:
        training.train(state, signal.SIGINT)

    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_limit_of_time_is_left_before(
    run_dir: Path, training: Training, capsys: pytest.CaptureFixture[str]
) -> None:
    # What a save takes is not known yet: 62 s are left for it.
    limit = time.time() - began() + 30
    with training.load(run_dir, max_time=limit) as state, pytest.raises(SystemExit, match="143"):
        training.train(state)

    assert "max_time: " in capsys.readouterr().out
    with training.load(run_dir, max_time="10 days") as state:
        assert training.train(state) == [1, 2, 3, 4, 5]


def test_automatic_saves_are_at_clean_boundaries_and_continue_bit_for_bit(run_dir: Path) -> None:
    def run_once(path: Path, until: int | None = None) -> tuple[list[float], Iterator[int]]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        optimizer = torch.optim.Adam(model.parameters())
        loader = DataLoader(list(torch.rand(20, 4)), batch_size=2, shuffle=True)
        with RunState.load(
            path, model=model, optimizer=optimizer, loader=loader, every=3, keep=None
        ) as state:
            for _ in state.epochs(2):
                for x in state.batches():
                    model(x).sum().backward()
                    if state.batch % 2:
                        optimizer.step()
                        optimizer.zero_grad()
                    if state.samples == until:
                        raise KeyError
        return [p.sum().item() for p in model.parameters()], torch.rand(1).item()

    whole = run_once(run_dir / "whole")
    for until in (14, 34):
        with contextlib.suppress(KeyError):
            run_once(run_dir / "cut", until)

    assert run_once(run_dir / "cut") == whole
    places = [
        (found.about.step, found.about.epoch, found.about.batch)
        for found in Run(run_dir / "whole").checkpoints()
    ]
    assert places == [(3, 0, 6), (6, 1, 2), (9, 1, 8), (10, 2, 0)]


def test_metrics_are_those_that_were_given_last(run_dir: Path, training: Training) -> None:
    with training.load(run_dir, every=2, minimize="loss") as state:
        for step in state.steps(4):
            training.step()
            if step == 0:
                state.save(loss=3.0)
    assert (state.metrics, state.best) == ({"loss": 3.0}, 3.0)

    with training.load(run_dir, minimize="loss") as state:
        assert (state.metrics, state.best, state.step) == ({"loss": 3.0}, 3.0, 4)
    assert Run(run_dir).checkpoints()[-1].about.metrics == {}


@pytest.mark.parametrize("shape", ["another loader", "steps"])
def test_automatic_saves_in_epochs_without_a_loader_are_exact(run_dir: Path, shape: str) -> None:
    def run_once(path: Path, **options: Any) -> tuple[list[float], int]:
        torch.manual_seed(3)
        training = Training()
        with training.load(path, keep=None, **options) as state:
            for epoch in state.epochs(3):
                rest = state.steps(2 * (epoch + 1)) if shape == "steps" else range(2)
                for _ in rest:
                    training.optimizer.zero_grad()
                    training.model(torch.rand(2)).sum().backward()
                    training.optimizer.step()
            return [p.sum().item() for p in training.model.parameters()], state.step

    whole = run_once(run_dir / "whole", every=1)
    saved = Run(run_dir / "whole").checkpoints()

    assert len(saved) >= 3
    for number, found in enumerate(saved):
        assert run_once(run_dir / f"{number}", resume=found.path) == whole


def test_a_signal_is_acted_on_whichever_iterator_was_made_first(run_dir: Path, training: Training) -> None:
    loaders = {"real": DataLoader(range(8)), "noise": DataLoader(range(8))}
    with training.load(run_dir, loader=loaders, on_preempt="raise") as state, contextlib.suppress(Preempted):
        for _ in state.epochs(1):
            noise = iter(state.batches("noise"))
            for _ in state.batches("real"):
                next(noise)
                training.step()
                if state.batch == 2:
                    signal.raise_signal(signal.SIGTERM)

    assert Run(run_dir).checkpoints()[-1].about.batch == 3


def test_a_batch_that_only_one_optimizer_stepped_for_is_trained_once(run_dir: Path) -> None:
    models = {name: nn.Linear(1, 1) for name in ("generator", "critic")}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}
    seen = []
    with RunState.load(
        run_dir,
        model=models,
        optimizer=optimizers,
        loader=DataLoader(range(6)),
        preempt=Preempt(on_preempt="raise"),
    ) as state:
        for _ in range(2):
            with contextlib.suppress(Preempted):
                for _ in state.epochs(1):
                    for batch in state.batches():
                        seen.append(batch.item())
                        models["critic"](torch.ones(1)).backward()
                        optimizers["critic"].step()
                        if len(seen) == 2:
                            signal.raise_signal(signal.SIGTERM)

    assert seen == [*range(6)]


def test_ctrl_c_that_was_acted_on_is_not_the_first_of_two(run_dir: Path, training: Training) -> None:
    with training.load(run_dir, on_preempt="raise") as state:
        for at in (1, 3):
            with pytest.raises(Preempted):
                training.train(state, signal.SIGINT, at=at)

    assert Run(run_dir).checkpoints()[-1].about.step == 4


@pytest.mark.filterwarnings("ignore:next.. took")
def test_an_iterator_that_is_kept_notes_no_signals_after_the_loops(run_dir: Path, training: Training) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with training.load(run_dir, loader=DataLoader(range(8))) as state:
        for _ in state.epochs(2):
            batches = iter(state.batches())
            next(batches)
            training.step()

        assert signal.getsignal(signal.SIGTERM) is before


def _fit(run_dir: Path, at: int | None, left: RunState | None = None) -> dict[str, Any]:
    """Train two epochs; at a step another training is dropped in its loop, and a signal comes."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    optimizer = torch.optim.Adam(model.parameters())
    loader = DataLoader(Augmented(), batch_size=8)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
    with RunState.load(run_dir, **parts, preempt=Preempt(on_preempt="raise")) as state:
        for _ in state.epochs(2):
            for batch in state.batches():
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
                if left is not None and state.step == at:
                    left.close()
                    os.kill(os.getpid(), signal.SIGTERM)
            state.save()
    return {**model.state_dict(), "drawn": torch.rand(3)}


@pytest.mark.quick(3)
@pytest.mark.parametrize("steps", [(2, 6), (3, 7), (4, 8)], ids=["middle", "last but one", "epoch's end"])
def test_a_training_is_saved_though_another_ends_in_its_loop(tmp_path: Path, steps: tuple[int, int]) -> None:
    for at in steps:
        # A loop that an error has left in a notebook, say.
        left = RunState.load(tmp_path / f"left at {at}", model=nn.Linear(1, 1))
        kept = iter(left.steps(9))
        next(kept)
        with pytest.raises(Preempted):
            _fit(tmp_path / "stopped", at, left)

    whole, stopped = _fit(tmp_path / "whole", None), _fit(tmp_path / "stopped", None)
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)


def _refuse(*_: object) -> int:
    raise BrokenPipeError


def test_it_exits_as_the_signal_says_although_its_output_is_no_longer_read(
    run_dir: Path, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = training.load(run_dir)
    monkeypatch.setattr(sys.stdout, "write", _refuse)
    with pytest.raises(SystemExit, match="143"):
        training.train(state, signal.SIGTERM)
    monkeypatch.undo()

    assert state.run._lock is None


def test_the_loops_tell_how_long_bodies_and_the_rest_of_an_epoch_take(
    run_dir: Path, training: Training
) -> None:
    with training.load(run_dir, loader=DataLoader(range(4))) as state:
        pace = state._saving.save_cost
        for _ in state.epochs(2):
            for _ in state.batches():
                training.step()

    assert pace.body() > 0
    assert pace.time_to_leave(is_rest_next=True) > 2 + 2 * 30


# Signals to the whole process group while workers start, or load.

_at_fork: list[Callable[[], None]] = []
os.register_at_fork(after_in_child=lambda: [call() for call in _at_fork])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_at_a_workers_first_instruction_does_not_end_it(
    run_dir: Path, training: Training, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    loader = DataLoader(Augmented(), 4, num_workers=2)
    seen = []
    with training.load(run_dir, loader=loader, on_preempt="raise") as state:
        for _ in state.epochs(1):
            batches = state.batches()
            monkeypatch.setattr(sys.modules[__name__], "_at_fork", [lambda: signal.raise_signal(number)])
            for x in batches:
                monkeypatch.undo()
                training.step()
                seen.append(x)

    assert len(seen) == 8


GROUP = """
import sys
import threading
import torch
from torch.utils.data import DataLoader, Dataset
from resumable import RunState

class Slow(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        import time
        # The workers are in the middle of a sample when the signal comes.
        time.sleep(0.05)
        return torch.randn(4)

if __name__ == "__main__":
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Slow(), 4, num_workers=2, multiprocessing_context=sys.argv[2])
    with RunState.load(sys.argv[1], model=model, optimizer=optimizer, loader=loader, progress=False) as state:
        for epoch in state.epochs(3):
            print("start", epoch, flush=True)
            for batch in state.batches():
                print("mid", epoch, flush=True)
                model(batch).sum().backward()
                optimizer.step()
    print("done after", state.step)
"""


@contextlib.contextmanager
def _no_longer_than(seconds: float, started: subprocess.Popen[str]) -> Iterator[None]:
    """End a process and its group if it hangs: a test that waits for its output would hang, too."""
    timer = threading.Timer(seconds, os.killpg, (started.pid, signal.SIGKILL))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@pytest.mark.proves("in good order")
@pytest.mark.heavy
@pytest.mark.sampled(6)
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(("name", "when"), [("SIGTERM", "start"), ("SIGINT", "mid")])
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_signal_to_the_group_saves_with_every_start_method(
    tmp_path: Path, method: str, when: str, name: str
) -> None:
    number, run_dir = getattr(signal, name), tmp_path / "run"
    (tmp_path / "script.py").write_text(GROUP)
    command = [sys.executable, str(tmp_path / "script.py"), str(run_dir), method]
    options: Any = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    for epoch in (0, 1):
        with subprocess.Popen(command, **options) as started, _no_longer_than(400, started):
            assert started.stdout
            is_sent = False
            for line in started.stdout:
                # Once: a second Ctrl-C leaves without a save.
                if line == f"{when} {epoch}\n" and not is_sent:
                    is_sent = True
                    # The workers are just starting then.
                    time.sleep(0.3 if when == "start" else 0)
                    os.killpg(started.pid, number)
            assert started.wait(400) == 128 + number
        assert Run(run_dir).highest() == epoch + 1

    left = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert left.stdout.endswith("done after 12\n")
