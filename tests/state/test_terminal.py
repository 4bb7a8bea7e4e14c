"""What people see: bars and all that is printed beside them, on the screen of a real terminal."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tmux import Pane, pane, python

BARS = """
import os, subprocess, sys, time
from resumable.progress import Progress

bars = Progress()
with bars.loop("epochs", 3, 0):
    for epoch in range(3):
        bars.begin_batches("batches", 10, 0)
        for batch in range(10):
            number = 10 * epoch + batch
            if batch % 4 == 0:
                print("printed", number)
            elif batch % 4 == 1:
                print("logged", number, file=sys.stderr)
            elif batch % 4 == 2:
                subprocess.run(["echo", f"child {number}"])
            else:
                os.write(1, b"native %d\\n" % number)
            bars._next = 0
            bars.count_batches("batches", batch + 1)
            time.sleep(float(sys.argv[1]))
        bars.end_batches("batches")
        bars.count("epochs", epoch + 1)
print("last")
"""
"""Bars without a training: no torch, and each batch draws."""

TRAIN = """
import logging, os, subprocess, sys, time, warnings
import torch
from resumable import RunState

open("pid", "w").write(str(os.getpid()))
logging.basicConfig(format="logged %(message)s", handlers=[logging.StreamHandler()])
logging.getLogger("resumable").addHandler(logging.StreamHandler(sys.stdout))
logging.getLogger("resumable").propagate = False
warnings.simplefilter("always")

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        if index % 8 == 0:
            print("worker", index, flush=True)
        return torch.randn(2)

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(Data(), batch_size=2, shuffle=True, num_workers=1)
state = RunState.load("run", model=model, optimizer=optimizer, loader=loader, minimize="val")
for epoch in state.epochs(int(sys.argv[1])):
    for batch in state.batches():
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state.show(loss=loss)
        if state.step % 5 == 0:
            print("printed", state.step)
        elif state.step % 5 == 1:
            logging.warning("%d", state.step)
        elif state.step % 5 == 2:
            warnings.warn(f"warned {state.step}")
        elif state.step % 5 == 3:
            subprocess.run(["echo", f"child {state.step}"])
        else:
            state.print("shown", state.step)
        time.sleep(0.05)
    state.save(val=loss.detach())
state.close()
"""
"""A training that writes in all ways."""

KINDS = ("printed", "logged", "child", "native", "worker", "shown")
ROW = r"(epoch|batch) \d+/\d+ +\d+% [━─]{5,}  [\d:]+(<[\d:]+)?(  \S.*)?"
ANY = re.compile(
    rf"{ROW}|({'|'.join(KINDS)}) \d+|last|\$( .*)?|\^C|Ctrl-C: saving when .* at once|SIGINT: run is saved.*"
    r"|\S+/train\.py:\d+: UserWarning: warned \d+|  warnings\.warn\(f\"warned \{state\.step\}\"\)"
    r"|run (is empty|has no checkpoint yet): starting fresh"
    r"|resumed run from .*|  \S.*(from there|from|there|\([\d.]+ m?s\))"
)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Write a script into the folder of the panes."""

    def written(text: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(text)
        return path

    return written


@pytest.fixture
def open_pane(tmp_path: Path) -> Iterator[Callable[..., Pane]]:
    """Open a terminal that closes as the test ends."""
    with contextlib.ExitStack() as stack:
        yield lambda columns=80, lines=24: stack.enter_context(pane(tmp_path, columns, lines))


def torn(lines: list[str]) -> list[str]:
    """Return the lines that no one has written so."""
    return [line for line in lines if not ANY.fullmatch(line)]


def bars_in(screen: list[str]) -> list[str]:
    """Return the kinds of bars on a screen, from above."""
    return [line.split()[0] for line in screen if re.fullmatch(ROW, line)]


def drawn(screen: list[str]) -> bool:
    """Whether both bars are there."""
    return bars_in(screen)[-2:] == ["epoch", "batch"]


def beside(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith(KINDS) or line == "last"]


EXPECTED = [f"{('printed', 'logged', 'child', 'native')[n % 10 % 4]} {n}" for n in range(30)] + ["last"]


# What is written beside the bars


@pytest.mark.parametrize("columns", [80, pytest.param(140, marks=pytest.mark.nightly)])
def test_what_anyone_writes_beside_the_bars_stays_whole(
    open_pane: Callable[..., Pane], write: Callable[[str], Path], columns: int
) -> None:
    terminal = open_pane(columns)
    terminal.type(python(write(BARS), "0.02"))
    during = terminal.until(lambda screen: "printed 14" in screen)
    terminal.until_prompt()

    assert during[-2:] == [line for line in during if re.fullmatch(ROW, line)]
    assert drawn(during)
    assert beside(terminal.written) == EXPECTED
    # One bar is left, of the finished loop; all others are gone.
    assert [line[:14] for line in terminal.written if re.fullmatch(ROW, line)] == ["epoch 3/3 100%"]
    assert torn(terminal.written[1:]) == []


@pytest.mark.nightly
def test_after_a_resize_the_bars_are_at_the_bottom_and_nowhere_else(
    open_pane: Callable[..., Pane], write: Callable[[str], Path], tmp_path: Path
) -> None:
    terminal = open_pane()
    waiting = 'while number and not os.path.exists(f"go{number}"): time.sleep(0.01)\n            if'
    terminal.type(python(write(BARS.replace("if", waiting, 1)), "0"))
    for number, (columns, lines) in enumerate([(60, 12), (100, 30), (50, 9), (80, 24)], 1):
        terminal.until(drawn)
        terminal.resize(columns, lines)
        wide = rf"epoch 0/3 +\d+% [━─]{{{(columns - 1) // 5}}}  .*"
        screen = terminal.until(lambda screen, wide=wide: any(re.fullmatch(wide, line) for line in screen))
        assert bars_in(screen) == bars_in(screen[-2:]) == ["epoch", "batch"]
        (tmp_path / f"go{number}").touch()
    for number in range(5, 30):
        (tmp_path / f"go{number}").touch()
    terminal.until_prompt()

    assert torn(terminal.written[1:]) == []
    assert beside(terminal.written) == EXPECTED


@pytest.mark.nightly
def test_ctrl_z_gives_the_screen_to_the_shell_and_fg_takes_it_back(
    open_pane: Callable[..., Pane], write: Callable[[str], Path]
) -> None:
    terminal = open_pane()
    terminal.type(python(write(BARS), "0.1"))
    terminal.until(drawn)
    terminal.press("C-z")
    terminal.until_prompt()
    terminal.type("seq 30; clear; seq 24 | tr '\\n' ,")
    stopped = terminal.until(lambda screen: any("23,24," in line for line in screen))
    terminal.type("clear; fg")

    assert bars_in(stopped) == []
    assert drawn(terminal.until(drawn))


@pytest.mark.nightly
def test_an_error_is_shown_whole_and_leaves_no_bar(
    open_pane: Callable[..., Pane], write: Callable[[str], Path]
) -> None:
    terminal = open_pane()
    failing = BARS.replace("number = 10 * epoch + batch", "number = 10 * epoch + batch; 1 / (number < 12)")
    terminal.type(python(write(failing), "0.02"))
    screen = terminal.until_prompt()

    assert screen[-2:] == ["ZeroDivisionError: division by zero", "$"]
    assert bars_in(terminal.written) == []


@pytest.mark.nightly
@pytest.mark.parametrize("columns", [80, 140])
def test_a_training_whose_workers_write_is_stopped_by_ctrl_c(
    open_pane: Callable[..., Pane], write: Callable[[str], Path], columns: int
) -> None:
    write(TRAIN)
    terminal = open_pane(columns)
    for first in ("run is empty: starting fresh", "resumed run from checkpoint"):
        terminal.type(f"clear; {sys.executable} train.py 4")
        screen = terminal.until(lambda screen: drawn(screen) and any("shown" in line for line in screen))
        assert drawn(screen[-2:])
        assert torn(terminal.written[1:]) == []
        terminal.press("C-c")
        screen = terminal.until_prompt()
        assert any(line.startswith(first) for line in terminal.written)
        assert [line[:6] for line in terminal.written if line.startswith(("^C", "Ctrl-C", "SIGINT"))][
            -3:
        ] == [*("^C", "Ctrl-C", "SIGINT")]
        assert bars_in(screen) == []
    assert torn(terminal.written[1:]) == []


@pytest.mark.nightly
def test_two_ctrl_c_end_a_training_at_once_without_a_bar(
    open_pane: Callable[..., Pane], write: Callable[[str], Path]
) -> None:
    write(TRAIN.replace("time.sleep(0.05)", "time.sleep(3)"))
    terminal = open_pane()
    terminal.type(f"{sys.executable} train.py 4")
    terminal.until(drawn)
    terminal.press("C-c")
    terminal.until(lambda screen: any(line.startswith("Ctrl-C: saving") for line in screen))
    terminal.press("C-c")
    screen = terminal.until_prompt()

    left = "left at once, without saving; the same command starts fresh"
    assert screen[-3:] == ["^C", left, "$"]
    assert bars_in(terminal.written) == []


NO_REGION = r"printf '\0337\033[r\0338'"
"""What an editor does as it ends."""


@pytest.mark.nightly
@pytest.mark.parametrize("meanwhile", ["true", "seq 40", "clear", NO_REGION])
def test_what_a_sigkill_has_left_the_next_start_removes(
    open_pane: Callable[..., Pane], write: Callable[[str], Path], tmp_path: Path, meanwhile: str
) -> None:
    write(TRAIN)
    terminal = open_pane(lines=14)
    terminal.type(f"{sys.executable} train.py 4")
    terminal.until(lambda screen: drawn(screen) and "shown 14" in screen)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    terminal.until(lambda screen: any(line.endswith("Killed") for line in screen))
    terminal.type(f"{meanwhile}; {sys.executable} train.py 4")
    screen = terminal.until(lambda screen: drawn(screen) and "shown 4" in screen)

    assert bars_in(terminal.written) == bars_in(screen[-2:]) == ["epoch", "batch"]
    assert [line for line in torn(terminal.written[1:]) if not re.fullmatch(r"Killed|\d+", line)] == []


# The first thing that people run


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("columns", [80, 140])
def test_the_demo_is_whole(open_pane: Callable[..., Pane], columns: int) -> None:
    terminal = open_pane(columns, 40)
    terminal.type(python("-m", "resumable", "demo"))
    terminal.until_prompt(280)
    text = re.sub(r"\n {5,}", " ", "\n".join(terminal.written[1:]))

    fresh, digest = r"   \S+/{} is empty: starting fresh\n", r"   digest \w{{32}}\n"
    done = r"epoch 4/4 100% ━+  \d\d:\d\d  saved 16  loss \d\.\d+\n"
    resumed = r"   resumed \S+/killed from checkpoint {}: .* best loss \d\.\d+ \([\d.]+ m?s\)\n"
    killed = r"   killed \(SIGKILL\) at step {}\n"
    expected = (
        r"A conv net .* 64 steps\.\n1\. never stopped\n" + fresh.format("straight") + done + digest.format()
        + r"2\. killed twice, .*\n" + fresh.format("killed") + killed.format(29) + resumed.format(r"\d+")
        + killed.format(44) + resumed.format(r"\d+") + done + digest.format() + r"Equal, bit for bit: .*\n\$"
    )  # fmt: skip
    assert re.fullmatch(expected, text), text
