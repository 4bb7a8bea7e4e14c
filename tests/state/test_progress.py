"""Bars: where they begin, what they say, and that what is printed besides them stays readable."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tqdm import tqdm

from resumable import RunState, progress
from resumable.progress import Progress, is_shown


class Terminal(io.StringIO):
    """A terminal that remembers what was written to it."""

    def isatty(self) -> bool:
        return True

    @property
    def screen(self) -> list[str]:
        """What stands on its lines now, but for empty ones."""
        return [line for line in self._look()[0] if line]

    @property
    def is_at_an_empty_line(self) -> bool:
        """Whether what is printed next has a line of its own."""
        lines, row, column = self._look()
        return not lines[row] and not column

    def _look(self) -> tuple[list[str], int, int]:
        lines: list[str] = [""]
        row = column = 0
        for sign in re.findall(r"\x1b\[A|.|\n|\r", self.getvalue()):
            if sign == "\x1b[A":
                row -= 1
            elif sign in "\n\r":
                row, column = row + (sign == "\n"), 0
                lines += [""] * (row + 1 - len(lines))
            else:
                lines[row] = lines[row][:column].ljust(column) + sign + lines[row][column + 1 :]
                column += 1
        return [line.rstrip() for line in lines], row, column


@pytest.fixture
def plug_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Terminal]:
    """Let both streams be one terminal, and every look of the bars be due.

    A test does so itself: before it begins, pytest puts streams of its own there.
    """

    def plug() -> Terminal:
        found = Terminal()
        monkeypatch.setattr(sys, "stderr", found)
        monkeypatch.setattr(sys, "stdout", found)
        monkeypatch.setattr(progress, "_EVERY", 0.0)
        return found

    return plug


class Clock:
    """A clock that can be put back."""

    def __init__(self) -> None:
        self.ago = 0.0
        self._now = time.time

    def time(self) -> float:
        return self._now() - self.ago


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Let the bars ask another clock (but not tqdm, which has its own) when they have begun."""
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
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    ).stdout


# When they are shown


def test_bars_are_for_people_who_look_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    shown = []
    for stderr in (Terminal(), io.StringIO(), closed, None):
        monkeypatch.setattr(sys, "stderr", stderr)
        shown.append([is_shown(wanted) for wanted in (None, True, False)])

    assert shown == [[True, True, False], *[[False, True, False]] * 3]


def test_only_the_first_process_shows_bars(plug_in: Callable[[], Terminal]) -> None:
    plug_in()
    assert not is_shown(None, is_first=False)
    assert not is_shown(True, is_first=False)
    assert not Progress(True, is_first=False).is_shown()


@pytest.mark.parametrize(("config", "shown"), [({"IPKernelApp": {}}, True), ({}, False), (None, False)])
def test_a_notebook_is_somewhere_people_look(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any] | None, shown: bool
) -> None:
    shell = None if config is None else SimpleNamespace(config=config)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))

    assert is_shown(None) is shown


def test_no_bar_is_written_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    bars = Progress()
    with bars.loop("epochs", 2, 0), bars.reading("reading", 10) as told:
        of_three(bars)
        bars.count("epochs", 1)
        bars.go_to(epochs=0, steps=0)

    assert (stderr.getvalue(), told) == ("", None)


def test_tqdm_is_imported_only_for_a_bar() -> None:
    code = """
import sys
from resumable.progress import Progress
for bars in Progress(False), Progress():
    with bars.loop("steps", 2, 0), bars.reading("reading", 10):
        bars.count("steps", 1)
print("tqdm" in sys.modules, "torch" in sys.modules)
with Progress(True).loop("steps", 2, 0):
    print("tqdm" in sys.modules)
"""
    assert python(code).split() == ["False", "False", "True"]


def test_a_bar_neither_starts_a_thread_nor_decides_how_processes_start() -> None:
    code = """
import multiprocessing, threading
from resumable.progress import Progress
with Progress(True).loop("steps", 2, 0):
    multiprocessing.set_start_method("spawn")
    print(threading.active_count())
"""
    assert python(code) == "1\n"


# What they say


def test_the_bars_begin_where_the_training_continues(plug_in: Callable[[], Terminal], bars: Progress) -> None:
    terminal = plug_in()
    with bars.loop("epochs", 90, 12):
        bars.begin_batches("loop", 5004, 310)
        epochs, batches = terminal.screen

    assert "| 12/90 [" in epochs
    assert "| 310/5004 [" in batches
    assert "| 0/" not in terminal.getvalue()


def test_every_number_from_there_on_is_shown(plug_in: Callable[[], Terminal], bars: Progress) -> None:
    terminal = plug_in()
    with bars.loop("steps", 103, 100):
        for done in (101, 102, 103):
            bars.count("steps", done)

    assert re.findall(r"(\d+)/103 ", terminal.getvalue()) == ["100", "101", "102", "103", "103"]


def test_where_it_is_unknown_how_many_batches_there_are_the_bar_counts_them(
    plug_in: Callable[[], Terminal], bars: Progress
) -> None:
    terminal = plug_in()
    with bars.loop("epochs", 2, 1):
        bars.begin_batches("loop", None, 7)
        bars.count_batches("loop", 8)
        epochs, batches = terminal.screen

    assert "| 1/2 [" in epochs
    assert batches.startswith("batches: 8batch [")


@pytest.mark.parametrize("what", ["epochs", "steps"])
def test_a_loop_that_is_complete_has_no_bar(
    plug_in: Callable[[], Terminal], bars: Progress, what: str
) -> None:
    terminal = plug_in()
    with bars.loop(what, 3, 3):
        pass

    assert terminal.getvalue() == ""


def test_the_time_that_is_left_is_reported_by_the_rate_of_this_process(
    plug_in: Callable[[], Terminal], bars: Progress, clock: Clock
) -> None:
    terminal = plug_in()
    clock.ago = 10
    bars.begin_batches("loop", 1000, 900)
    clock.ago = 0
    bars.count_batches("loop", 910)

    # 10 batches in 10 seconds, and 90 to go. Were the 900 of an earlier process among them: 1 second.
    assert re.search(r"910/1000 \[00:1\d<01:3\d", terminal.getvalue())


def test_batches_of_an_earlier_process_do_not_count_for_the_rate_of_epochs(
    plug_in: Callable[[], Terminal], bars: Progress, clock: Clock
) -> None:
    terminal = plug_in()
    clock.ago = 10
    with bars.loop("epochs", 3, 1):
        bars.begin_batches("loop", 99, 90)
        clock.ago = 0
        bars.count_batches("loop", 95)

    # A twentieth of an epoch took 10 seconds, so 1.05 of them take 210 seconds.
    assert re.search(r"1/3 \[00:1\d<03:[23]\d, +2\d\d\.\d+s/epoch\]", terminal.getvalue())


def test_going_back_sets_the_bar_back_and_not_the_rate(
    plug_in: Callable[[], Terminal], bars: Progress, clock: Clock
) -> None:
    terminal = plug_in()
    clock.ago = 10
    with bars.loop("steps", 100, 0):
        clock.ago = 0
        bars.count("steps", 50)
        bars.go_to(epochs=0, steps=20)
        bars.count("steps", 21)

    # 51 steps in 10 seconds.
    assert re.search(r"21/100 \[00:1\d<00:1\d, +[45]\.\d+step/s\]", terminal.getvalue())


def test_going_back_before_a_bar_was_drawn_is_no_work_either(
    plug_in: Callable[[], Terminal], bars: Progress, clock: Clock
) -> None:
    terminal = plug_in()
    clock.ago = 10
    with bars.loop("epochs", 100, 50):
        clock.ago = 0
        bars.go_to(epochs=20, steps=0)
        bars.count("epochs", 30)

    assert re.search(r"30/100 \[00:1\d<01:[01]\d, +[1]\.\d+s/epoch\]", terminal.getvalue())


def test_going_back_ends_the_batches_that_were_under_way(
    plug_in: Callable[[], Terminal], bars: Progress
) -> None:
    terminal = plug_in()
    with bars.loop("epochs", 5, 4):
        bars.begin_batches("loop", 9, 0)
        bars.go_to(epochs=2, steps=0)
        empty = terminal.screen
        bars.count_batches("loop", 5)
        bars.begin_batches("loop", 9, 3)
        epochs, batches = terminal.screen

    assert empty == []
    assert ("| 2/5 [" in epochs, "| 3/9 [" in batches) == (True, True)


def test_the_first_bar_says_how_old_the_newest_durable_checkpoint_is(
    plug_in: Callable[[], Terminal], bars: Progress, clock: Clock
) -> None:
    terminal = plug_in()
    with bars.loop("epochs", 5, 4):
        bars.begin_batches("loop", 9, 0)
        bars.saved(41, time.time() - 12.5)
        bars.count_batches("loop", 1)
        epochs, batches = terminal.screen

    assert epochs.endswith(", saved 41, 12 s ago]")
    assert "saved" not in batches


def test_batches_without_epochs_say_it_themselves(plug_in: Callable[[], Terminal], bars: Progress) -> None:
    terminal = plug_in()
    bars.saved(41, time.time() - 720.5)
    bars.begin_batches("loop", 9, 0)

    assert terminal.screen[0].endswith(", saved 41, 12 min ago]")


def test_a_save_on_its_way_is_reported_until_it_has_ended(
    plug_in: Callable[[], Terminal], bars: Progress
) -> None:
    terminal = plug_in()
    said = []
    with bars.loop("steps", 9, 0):
        with bars.saving(42):
            bars.count("steps", 1)
            said.append(terminal.screen[0])
        bars.count("steps", 2)
        said.append(terminal.screen[0])
        with pytest.raises(OSError, match="full"), bars.saving(43):
            raise OSError("the disk is full")
        bars.count("steps", 3)
        said.append(terminal.screen[0])

    assert [line.rpartition("step/s, ")[2] for line in said] == ["saving 42]", *["saved 42, 0 s ago]"] * 2]


def test_between_two_looks_nothing_is_formatted(
    plug_in: Callable[[], Terminal], bars: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = plug_in()
    monkeypatch.setattr(progress, "_EVERY", 1000.0)
    with bars.loop("epochs", 9, 0):
        bars.begin_batches("loop", 999, 0)
        first = terminal.getvalue()
        for done in range(1, 999):
            bars.count_batches("loop", done)
        assert terminal.getvalue() == first
        bars.end_batches("loop")
        wiped = terminal.getvalue()
        bars.count("epochs", 1)
        of_three(bars)
        bars.count("epochs", 2)

        assert terminal.getvalue() == wiped


# Which loops have one


def test_of_several_loops_over_batches_the_first_has_the_bar(
    plug_in: Callable[[], Terminal], bars: Progress
) -> None:
    terminal = plug_in()
    with bars.loop("epochs", 9, 0):
        bars.begin_batches("first", 10, 0)
        of_three(bars, "second")
        bars.count_batches("first", 1)
        _, batches = terminal.screen

    assert "| 1/10 [" in batches
    assert "/3 [" not in terminal.getvalue()


def test_steps_have_no_bar_for_batches_below_them(plug_in: Callable[[], Terminal], bars: Progress) -> None:
    terminal = plug_in()
    bars.begin_batches("before", 10, 0)
    with bars.loop("steps", 9, 0):
        bars.begin_batches("within", 10, 0)
        bars.count("steps", 1)
        alone = terminal.screen

    assert len(alone) == 1
    assert "| 1/9 [" in alone[0]


def test_a_loop_over_steps_in_an_epochs_body_has_no_bar(
    plug_in: Callable[[], Terminal], bars: Progress
) -> None:
    terminal = plug_in()
    with bars.loop("epochs", 9, 0):
        with bars.loop("steps", 7, 0):
            bars.count("steps", 3)
        bars.count("epochs", 1)

    assert "step" not in terminal.getvalue()
    assert "| 1/9 [" in terminal.getvalue()


def test_an_epochs_end_is_the_end_of_its_batches(plug_in: Callable[[], Terminal], bars: Progress) -> None:
    terminal = plug_in()
    with bars.loop("epochs", 9, 0):
        bars.begin_batches("left", 10, 0)
        bars.count("epochs", 1)
        left = terminal.screen
        bars.begin_batches("next", 7, 2)
        epochs, batches = terminal.screen

    assert left == []
    assert ("| 1/9 [" in epochs, "| 2/7 [" in batches) == (True, True)


# What is printed besides them


def test_an_epochs_body_has_the_terminal_for_itself_once_its_batches_have_ended(
    plug_in: Callable[[], Terminal], bars: Progress
) -> None:
    terminal = plug_in()
    with bars.loop("epochs", 2, 0):
        for epoch in range(2):
            print("before the batches")
            of_three(bars, leave_at=2 + epoch)
            print(f"loss {epoch}")
            bars.count("epochs", epoch + 1)

    *lines, last = terminal.screen
    assert lines == ["before the batches", "loss 0", "before the batches", "loss 1"]
    assert "| 2/2 [" in last
    assert terminal.is_at_an_empty_line


def test_epochs_without_batches_show_how_many_are_done(
    plug_in: Callable[[], Terminal], bars: Progress
) -> None:
    terminal = plug_in()
    with bars.loop("epochs", 3, 0):
        bars.count("epochs", 1)
        line = terminal.screen[0]

    assert "| 1/3 [" in line


def test_our_own_lines_stand_above_the_bars(plug_in: Callable[[], Terminal], bars: Progress) -> None:
    terminal = plug_in()
    bars.print("resumed")
    with bars.loop("epochs", 2, 0):
        bars.begin_batches("loop", 3, 0)
        bars.print("went back")
        resumed, line, epochs, batches = terminal.screen
        bars.end_batches("loop")
        bars.print("between")

    assert (resumed, line) == ("resumed", "went back")
    assert (epochs[:7], batches[:8]) == ("epochs:", "batches:")
    assert terminal.screen[2] == "between"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
def test_what_ends_the_loops_is_reported_on_a_line_of_its_own(
    plug_in: Callable[[], Terminal], bars: Progress, error: type[BaseException]
) -> None:
    terminal = plug_in()
    with contextlib.suppress(error), bars.loop("epochs", 2, 0):
        bars.begin_batches("loop", 3, 0)
        raise error
    print("Traceback")

    epochs, line = terminal.screen
    assert epochs.startswith("epochs: ")
    assert line == "Traceback"


def test_closing_ends_all_bars_and_may_be_done_twice(plug_in: Callable[[], Terminal], bars: Progress) -> None:
    terminal = plug_in()
    with bars.loop("epochs", 2, 0):
        bars.begin_batches("loop", 3, 0)
        bars.close()
        bars.close()
        before = terminal.getvalue()
        bars.count_batches("loop", 1)
        bars.end_batches("loop")
        bars.count("epochs", 1)

    assert len(terminal.screen) == 1
    assert terminal.is_at_an_empty_line
    assert terminal.getvalue() == before


def test_in_a_notebook_a_loop_that_was_left_is_no_error(
    plug_in: Callable[[], Terminal], bars: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    plug_in()
    is_red = {}

    class Notebook(tqdm):
        def close(self) -> None:
            # What tqdm's own goes by
            is_red[self.desc] = bool(self.total and self.n < self.total)
            super().close()

    monkeypatch.setitem(sys.modules, "tqdm.auto", SimpleNamespace(tqdm=Notebook))
    monkeypatch.setattr(progress, "_kind", progress._kind.__wrapped__)
    bars.begin_batches("loop", 10, 0)
    bars.end_batches("loop")

    assert [*is_red.values()] == [False]


# Reading


def test_reading_that_is_short_shows_nothing(plug_in: Callable[[], Terminal], bars: Progress) -> None:
    terminal = plug_in()
    with bars.reading("reading checkpoint 41", 10) as told:
        assert told
        told(10)

    assert terminal.getvalue() == ""


def test_all_that_several_threads_read_is_counted(
    plug_in: Callable[[], Terminal], bars: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = plug_in()
    monkeypatch.setattr(progress, "_LONG", 0.0)
    with bars.reading("reading checkpoint 41", 4 * 2_000_000) as told:
        assert told
        threads = [threading.Thread(target=lambda: [told(20_000) for _ in range(100)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        line = terminal.screen[0]

    assert line.startswith("reading checkpoint 41: 100%")
    assert "| 8.00M/8.00M [" in line
    assert terminal.screen == []
    assert terminal.is_at_an_empty_line


# A terminal that is not there any more


class Fleeting(Terminal):
    """One that may go, as the reader of a pipe does."""

    is_gone = False

    def write(self, text: str) -> int:
        if self.is_gone:
            raise BrokenPipeError
        return super().write(text)


def test_a_terminal_that_goes_away_ends_the_bars_and_not_the_training(
    plug_in: Callable[[], Terminal], monkeypatch: pytest.MonkeyPatch, bars: Progress
) -> None:
    plug_in()
    monkeypatch.setattr(sys, "stderr", terminal := Fleeting())
    monkeypatch.setattr(sys, "stdout", out := io.StringIO())
    with bars.loop("epochs", total=2, done=0):
        bars.begin_batches("a loop", 3, 0)
        bars.count_batches("a loop", 1)
        terminal.is_gone = True
        bars.print("a line")
        bars.count_batches("a loop", 2)
        bars.end_batches("a loop")
        bars.count("epochs", 1)

    assert out.getvalue() == "a line\n"


def test_after_a_terminal_has_gone_other_threads_can_still_show_bars(
    plug_in: Callable[[], Terminal], monkeypatch: pytest.MonkeyPatch, bars: Progress
) -> None:
    plug_in()
    monkeypatch.setattr(sys, "stderr", terminal := Fleeting())
    with bars.loop("epochs", total=2, done=0):
        bars.begin_batches("a loop", 3, 0)
        bars.count_batches("a loop", 1)
        terminal.is_gone = True
        bars.count_batches("a loop", 2)

    monkeypatch.setattr(progress, "_LONG", 0.0)
    plug_in()

    def push() -> None:
        with Progress(True).moving("pushing checkpoint 1", 2) as moved:
            moved(2)

    thread = threading.Thread(target=push, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


# A real training


def train(run_dir: Path, epochs: int, **shown: bool) -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(6, 1)), 2)
    parts = {"model": torch.nn.Linear(1, 1), "loader": loader}
    with RunState.load(run_dir, **parts, **shown) as state:  # type: ignore[arg-type]
        for _ in state.epochs(epochs):
            for _ in state.batches():
                pass
            state.save()


def test_a_training_that_continues_shows_its_bars_from_there_and_how_old_the_checkpoint_is(
    plug_in: Callable[[], Terminal], monkeypatch: pytest.MonkeyPatch, run_dir: Path
) -> None:
    monkeypatch.setattr(progress, "_LONG", 0.0)
    for before in (0, 2):
        terminal = plug_in()
        train(run_dir, before + 2)
        saved = rf", saved {before}, \d+ s ago" if before else ""
        at = f"{100 * before // (before + 2):>3}%"
        first = rf"\repochs: {at}\|[^\r]*\| {before}/{before + 2} \[[^\r]*{saved}\]"
        assert re.search(first, terminal.getvalue())
        assert ("reading checkpoint 2: " in terminal.getvalue()) == bool(before)
        assert re.match(rf"epochs: 100%.*, saved {before + 2}, \d+ s ago\]", terminal.screen[-1])


def test_a_training_shows_no_bars_where_they_are_turned_off(
    plug_in: Callable[[], Terminal], run_dir: Path
) -> None:
    terminal = plug_in()
    train(run_dir, 1, progress=False)

    assert terminal.screen == [f"{run_dir} is empty: starting fresh"]
