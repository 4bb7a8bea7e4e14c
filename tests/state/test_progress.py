"""Bars: where they begin, what they say, and which loops have one; test_terminal.py looks at real screens."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pty_screen import Pty, opened

from resumable import RunState, UsageError, progress
from resumable.progress import Progress, where
from resumable.terminal import TERMINAL


@pytest.fixture
def plug_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Pty]]:
    """Let stderr be a terminal, and every look of the bars be due.

    A test does so itself: before it begins, pytest puts streams of its own there.
    """
    with contextlib.ExitStack() as stack:

        def plug(**size: int) -> Pty:
            found = stack.enter_context(opened(**size))
            monkeypatch.setenv("TERM", "xterm")
            monkeypatch.setattr(sys, "stderr", found.stream)
            monkeypatch.setattr(progress, "_EVERY", 0.0)
            return found

        yield plug
        TERMINAL.clear()
        monkeypatch.undo()


class Clock:
    """A clock that can be put back."""

    def __init__(self) -> None:
        self.ago = 0.0
        self._now = time.time

    def time(self) -> float:
        return self._now() - self.ago


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Let the bars ask another clock when they have begun."""
    found = Clock()
    monkeypatch.setattr(time, "time", found.time)
    return found


@pytest.fixture
def bars() -> Iterator[Progress]:
    """The bars of a training that shows them where they can be seen."""
    found = Progress()
    yield found
    found.close()


def of_three(bars: Progress, name: str = "loop", *, leave_at: int = 4) -> None:
    """Loop over three batches, and maybe leave the loop."""
    bars.begin_batches(name, 3, 0)
    for done in range(1, min(4, leave_at)):
        bars.count_batches(name, done)
    bars.end_batches(name)


def python(code: str) -> str:
    """Return what a process prints."""
    # Coverage imports multiprocessing, and here counts what is imported.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    how: Any = {"check": True, "capture_output": True, "text": True, "timeout": 60, "env": environment}
    return str(subprocess.run([sys.executable, "-c", code], **how).stdout)


# Where they are shown


def test_bars_are_for_terminals_and_lines_for_all_else(
    plug_in: Callable[[], Pty], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = plug_in()
    closed = io.StringIO()
    closed.close()
    found = []
    for stderr in (terminal.stream, io.StringIO(), closed, None):
        monkeypatch.setattr(sys, "stderr", stderr)
        found.append([where(wanted) for wanted in (None, True, False)])

    assert found == [["terminal", "terminal", None], *[["log", "log", None]] * 3]


def test_only_the_first_process_shows_progress(plug_in: Callable[[], Pty]) -> None:
    plug_in()
    assert where(None, is_first=False) is None
    assert where(True, is_first=False) is None
    assert not Progress(True, is_first=False).is_shown()


@pytest.mark.parametrize(("config", "place"), [({"IPKernelApp": {}}, "notebook"), ({}, "log"), (None, "log")])
def test_a_notebook_is_somewhere_people_look(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any] | None, place: str
) -> None:
    shell = None if config is None else SimpleNamespace(config=config)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))

    assert where(None) == place


def test_bars_neither_start_a_thread_nor_decide_how_processes_start() -> None:
    code = """
import fcntl, os, struct, sys, termios
pair = os.openpty()
fcntl.ioctl(pair[0], termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
sys.stderr = os.fdopen(pair[1], "w")
os.environ["TERM"] = "xterm"
from resumable.progress import Progress
print("multiprocessing" in sys.modules, "torch" in sys.modules)
with Progress().loop("steps", 2, 0):
    import multiprocessing, threading
    from resumable.terminal import TERMINAL
    multiprocessing.set_start_method("spawn")
    print(threading.active_count(), TERMINAL._claim is not None)
"""
    assert python(code).split() == ["False", "False", "1", "True"]


# What they say


def test_the_bars_begin_where_the_training_continues(plug_in: Callable[[], Pty], bars: Progress) -> None:
    terminal = plug_in()
    with bars.loop("epochs", 90, 12):
        bars.begin_batches("loop", 5004, 310)
        epochs, batches = terminal.rows

    assert re.match("epoch 12/90 +13% ━━", epochs)
    assert re.match("batch 310/5004 +6% ━", batches)
    assert "epoch 0/" not in terminal.text


def test_the_time_that_is_left_follows_the_rate_of_this_process(
    plug_in: Callable[[], Pty], bars: Progress, clock: Clock
) -> None:
    terminal = plug_in()
    clock.ago = 10
    bars.begin_batches("loop", 1000, 900)
    clock.ago = 0
    bars.count_batches("loop", 910)

    # 10 batches in 10 seconds, and 90 to go. Were the 900 of an earlier process among them: 1 second.
    assert re.search(r"910/1000 .* 00:1\d<01:3\d ", terminal.rows[0])


def test_batches_of_an_earlier_process_do_not_count_for_the_rate_of_epochs(
    plug_in: Callable[[], Pty], bars: Progress, clock: Clock
) -> None:
    terminal = plug_in()
    clock.ago = 10
    with bars.loop("epochs", 3, 1):
        bars.begin_batches("loop", 99, 90)
        clock.ago = 0
        bars.count_batches("loop", 95)
        epochs, _ = terminal.rows

    # A twentieth of an epoch took 10 seconds, so 1.05 of them take 210 seconds.
    assert re.search(r"1/3 .* 00:1\d<03:[23]\d", epochs)


def test_a_save_on_its_way_is_shown_until_it_has_ended(plug_in: Callable[[], Pty], bars: Progress) -> None:
    terminal = plug_in()
    said = []
    with bars.loop("steps", 9, 0):
        with bars.saving(42):
            bars.count("steps", 1)
            said.append(terminal.rows[0])
        bars.count("steps", 2)
        said.append(terminal.rows[0])
        with pytest.raises(OSError, match="full"), bars.saving(43):
            raise OSError("the disk is full")
        bars.count("steps", 3)
        said.append(terminal.rows[0])

    found = [re.findall(r"  (sav\w+ \d+)", row) for row in said]
    assert found == [["saving 42"], ["saved 42"], ["saved 42"]]


def test_a_push_on_its_way_is_shown_beside_the_loops(plug_in: Callable[[], Pty], bars: Progress) -> None:
    terminal = plug_in(columns=140)  # type: ignore[call-arg]
    with bars.loop("steps", 9, 0):
        with bars.moving("pushing checkpoint 42", 200) as moved:
            moved(50)
            bars.count("steps", 1)
            pushing = terminal.rows
        bars.pushed(42)
        bars.count("steps", 2)
        pushed = terminal.rows

    assert ["  pushing checkpoint 42 25%" in row for row in pushing] == [True]
    assert "  pushed 42" in pushed[0]


def test_a_shown_tensor_is_read_when_it_is_drawn_and_keeps_no_graph(
    plug_in: Callable[[], Pty], bars: Progress
) -> None:
    terminal = plug_in()
    weight = torch.ones(1, requires_grad=True)
    loss = (weight * 2).square()
    bars.show({"loss": loss})
    with torch.no_grad():
        loss.mul_(2)
    with bars.loop("steps", 9, 0):
        assert "  loss 8" in terminal.rows[0]
        assert not bars._values["loss"].requires_grad


def test_a_value_with_several_elements_is_refused_where_it_is_given(run_dir: Path) -> None:
    with (
        RunState.load(run_dir) as state,
        pytest.raises(UsageError, match=r"loss=\.{3}.*was given 3 elements"),
    ):
        state.show(loss=torch.ones(3))


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 140])
def test_no_row_is_wider_than_the_terminal(plug_in: Callable[..., Pty], bars: Progress, columns: int) -> None:
    terminal = plug_in(columns=columns)
    with bars.loop("epochs", 90, 12):
        bars.saved(41, time.time(), {"validation_accuracy": 0.5})
        bars.show({"loss": 0.25, "gradient_norm": 2.5, "learning_rate": 0.001})
        bars.begin_batches("loop", 5004, 310)
        bars.count_batches("loop", 311)

        assert [len(row) < columns for row in terminal.rows] == [True, True]


def test_a_stream_that_cannot_encode_lines_gets_plain_bars(
    plug_in: Callable[[], Pty], bars: Progress
) -> None:
    terminal = plug_in()
    terminal.stream.reconfigure(encoding="ascii")  # type: ignore[attr-defined]
    with bars.loop("steps", 4, 2):
        assert re.match(r"step 2/4 50% #+-+ ", terminal.rows[0])


# Which loops have one


# How they end


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
def test_a_loop_that_an_error_ends_leaves_no_bar(
    plug_in: Callable[[], Pty], bars: Progress, error: type[BaseException]
) -> None:
    terminal = plug_in()
    with contextlib.suppress(error), bars.loop("epochs", 2, 0):
        bars.begin_batches("loop", 3, 0)
        raise error

    assert terminal.rows == []
    assert terminal.text.endswith("\x1b8")


def test_a_forked_process_neither_draws_nor_removes_the_bars(
    plug_in: Callable[[], Pty], bars: Progress
) -> None:
    terminal = plug_in()
    with bars.loop("epochs", 2, 0):
        before = terminal.text
        if (child := os.fork()) == 0:
            with contextlib.suppress(BaseException):
                of_three(bars)
                bars.close()
            os._exit(0)
        os.waitpid(child, 0)

        assert terminal.text == before


def test_a_terminal_that_is_low_has_no_bars_and_gets_them_back(
    plug_in: Callable[[], Pty], bars: Progress
) -> None:
    terminal = plug_in()
    found = []
    with bars.loop("steps", 9, 0):
        for lines in (24, 5, 6):
            terminal.resize(100, lines)
            bars.count("steps", 1)
            found.append(len(terminal.rows))

    assert found == [1, 0, 1]


# Reading


# A log file


def log_file(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Let stderr be a file."""
    found = io.StringIO()
    monkeypatch.setattr(sys, "stderr", found)
    return found


def test_a_log_file_gets_no_line_in_the_first_minute(monkeypatch: pytest.MonkeyPatch, bars: Progress) -> None:
    log = log_file(monkeypatch)
    with bars.loop("epochs", 2, 0), bars.reading("reading", 10) as told:
        assert told
        told(10)
        of_three(bars)
        bars.count("epochs", 1)

    assert log.getvalue() == ""


def test_a_log_file_gets_plain_lines(bars: Progress, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_file(monkeypatch)
    monkeypatch.setattr(progress, "_EVERY_LINE", 0.0)
    clock.ago = 60
    bars.saved(41, time.time() - 65, {"val": 0.5})
    bars.step = lambda: 12400
    with bars.loop("steps", 4, 2):
        pass
    with bars.loop("epochs", 4, 2):
        bars.begin_batches("a loop", 9, 0)
        clock.ago = 0
        bars.show({"loss": 0.41})
        bars.count_batches("a loop", 5)
        line = log.getvalue().splitlines()[-1]

    expected = r"epoch 2/4, batch 5/9, step 12400, loss 0\.41, 3 min left, saved 41 \(2 min ago\), val 0\.5"
    assert re.fullmatch(expected, line)
    assert not re.search("[\x1b\r━]", log.getvalue())


# A terminal that is not there any more


def test_a_terminal_that_goes_away_does_not_end_the_training(
    plug_in: Callable[[], Pty], monkeypatch: pytest.MonkeyPatch, bars: Progress
) -> None:
    terminal = plug_in()
    monkeypatch.setattr(progress, "_LONG", 0.0)
    with bars.loop("epochs", 2, 0):
        bars.begin_batches("a loop", 3, 0)
        terminal.stream.close()
        bars.count_batches("a loop", 2)
        bars.end_batches("a loop")
        bars.count("epochs", 1)
    another = plug_in()
    with bars.moving("pushing checkpoint 1", 2) as moved:
        moved(2)
        assert another.rows[0].startswith("pushing checkpoint 1: ")


# A notebook


def test_a_notebook_has_one_output_that_is_updated(monkeypatch: pytest.MonkeyPatch, bars: Progress) -> None:
    shown: list[str] = []

    class Handle:
        def update(self, content: dict[str, str], raw: bool) -> None:
            shown.append(content["text/plain"])

    def display(content: dict[str, str], raw: bool, display_id: bool) -> Handle:
        assert shown == []
        Handle().update(content, raw)
        return Handle()

    kernel = SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: kernel))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(progress, "_EVERY", 0.0)
    with bars.loop("epochs", 1, 0):
        of_three(bars)
        bars.count("epochs", 1)

    assert "epoch 0/1" in shown[0]
    assert re.search("epoch 0/1.*\nbatch 1/3", "\n".join(shown))
    assert re.fullmatch("epoch 1/1 100% ━+  00:0.", shown[-1])


# A real training


def train(run_dir: Path, epochs: int, **shown: bool) -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(6, 1)), 2)
    parts = {"model": torch.nn.Linear(1, 1), "loader": loader}
    with RunState.load(run_dir, **parts, **shown) as state:  # type: ignore[arg-type]
        for _ in state.epochs(epochs):
            for _ in state.batches():
                pass
            state.save(loss=0.25)
            state.wait()


def test_a_resumed_training_shows_its_bars_from_there(
    plug_in: Callable[[], Pty], monkeypatch: pytest.MonkeyPatch, run_dir: Path
) -> None:
    monkeypatch.setattr(progress, "_LONG", 0.0)
    for before in (0, 2):
        terminal = plug_in()
        train(run_dir, before + 2)
        first = next(row for row in re.findall(r"epoch \d.*?(?=\x1b)", terminal.text))
        saved = rf"  saved {before} \(\d+ s ago\)  loss 0.25" if before else ""
        assert re.fullmatch(rf"epoch {before}/{before + 2} +\d+% [━─]+  00:0\d{saved}", first)
        assert ("reading checkpoint 2: " in terminal.text) == bool(before)
        last = rf"\repoch {before + 2}/{before + 2} 100% ━+  00:..  saved {before + 2}  loss"
        assert re.search(last, terminal.text)


def test_a_training_shows_no_bars_where_they_are_turned_off(
    plug_in: Callable[[], Pty], run_dir: Path
) -> None:
    terminal = plug_in()
    train(run_dir, 1, progress=False)

    assert terminal.text == ""
