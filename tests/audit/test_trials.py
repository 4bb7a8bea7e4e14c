"""Starting a script again and again: what each start prints, where it stops, and what is read of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from resumable import UsageError
from resumable.audit import trials
from resumable.cli import app

FRAMES = [
    "Traceback (most recent call last):",
    '  File "train.py", line 3, in main',
    "    step()",
    "    ^^^^",
]
OF_TORCHRUN = [
    *("Traceback (most recent call last):", '  File "/torch/run.py", line 901, in main'),
    *("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ", "===", "train.py FAILED"),
]


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (["epoch 0", "loss 0.5"], ""),
        ([*FRAMES, "ValueError: boom"], "ValueError: boom"),
        ([*FRAMES, "Refused: no", "  such thing", "", "bye"], "Refused: no such thing"),
        ([*FRAMES, "KeyError: 1", "", *FRAMES, "ValueError: boom"], "ValueError: boom"),
        ([*(f"[rank1]: {line}" for line in [*FRAMES, "ValueError: boom"]), *OF_TORCHRUN], "ValueError: boom"),
        (OF_TORCHRUN, ""),
        (
            ['  File "train.py", line 3', "    x = = 1", "        ^", "SyntaxError: invalid syntax"],
            "SyntaxError: invalid syntax",
        ),
    ],
)
def test_the_error_is_that_of_the_script_and_not_of_what_has_started_it(lines: list[str], error: str) -> None:
    assert trials.error_in(lines) == error


def test_a_command_that_is_not_there_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no-such-program cannot be started: No such file"):
        trials.start(["no-such-program"], os.environ, tmp_path / "log")


@pytest.mark.parametrize(
    ("command", "fix"), [("no-such-program", "python train.py"), ("./fit.py", "python ./fit.py")]
)
def test_what_is_no_program_is_refused_before_anything_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    fix: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fit.py").touch()

    assert app.main(["audit", "--", command]) == 2

    assert capsys.readouterr().err == (
        f"resumable: {command} cannot be started: it is no program.\n"
        f"Fix: give the command that starts the training, as in: resumable audit -- {fix}\n"
    )


WAITS = """
import os, signal, sys, time
child = os.fork() if sys.argv[1:] in (["forks"], ["sessions"]) else 0
if sys.argv[1:] == ["sessions"] and not child:
    os.setsid()
if sys.argv[1:] == ["ignores"]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(f"pid-{os.getpid()}", "w").close()
time.sleep(600)
"""


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("sent", "how", "code"),
    [
        (signal.SIGINT, "alone", 130),
        (signal.SIGINT, "forks", 130),
        (signal.SIGTERM, "forks", 143),
        (signal.SIGHUP, "alone", 129),
        (signal.SIGTERM, "ignores", 143),
        (signal.SIGTERM, "sessions", 143),
    ],
)
def test_an_audit_that_is_asked_to_leave_ends_what_it_has_started(
    tmp_path: Path, sent: signal.Signals, how: str, code: int
) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    environment = {**os.environ, "PYTHONPATH": str(Path(trials.__file__).parents[2])}
    command = [sys.executable, "-m", "resumable", "audit", "--", sys.executable, "waits.py", how]
    # A shell gives the whole group Ctrl-C; here only the parent gets it
    audit = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL)
    while len(pids := [*tmp_path.glob("pid-*")]) < (2 if how in ("forks", "sessions") else 1):
        assert audit.poll() is None
        time.sleep(0.01)

    audit.send_signal(sent)
    if how == "ignores":
        with pytest.raises(subprocess.TimeoutExpired):
            audit.wait(1)
        audit.send_signal(sent)

    assert audit.wait(30) == code
    for path in pids:
        assert not is_alive(int(path.name.removeprefix("pid-")))


def is_alive(pid: int) -> bool:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
        except FileNotFoundError:
            return False
        time.sleep(0.01)
    return True
