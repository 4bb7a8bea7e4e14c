"""Starting a script again and again: what each start prints, where it stops, and what is read of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import faked
import pytest
from faked import Script

from resumable import UsageError
from resumable.audit import trials
from resumable.audit.trials import Trials
from resumable.cli import app
from resumable.trace import trace_file
from resumable.trace.trace_file import At


def made(folder: Path, script: Script, steps: int = 6) -> Trials:
    return Trials(
        ["python", "train.py"], folder, steps, start=script, told=lambda _: None, deterministic=False
    )


def test_every_trial_has_a_run_of_its_own_that_no_remote_and_no_trace_of_the_script_reaches(
    tmp_path: Path,
) -> None:
    script = Script(faked.boundaries(3, 4))
    trial = made(tmp_path, script)

    trial.straight("one")
    trial.straight("other")

    environments = [start.environment for start in script.starts]
    assert len({one["RESUMABLE_RUN_DIR"] for one in environments}) == 2
    assert all(Path(one["RESUMABLE_RUN_DIR"]).is_relative_to(tmp_path) for one in environments)
    for one in environments:
        assert (one["RESUMABLE_REMOTE"], one["RESUMABLE_TRACE"], one["RESUMABLE_RESUME"]) == ("", "", "auto")


def test_a_straight_trial_ends_after_a_number_of_batches_and_epochs_do_not_count(tmp_path: Path) -> None:
    trial = made(tmp_path, Script(faked.boundaries(3, 4)), steps=6).straight("straight")

    counted = [at for at in trial.boundaries() if at.kind == "batch"]
    assert len(counted) == 6
    assert [at.kind for at in trial.boundaries()].count("epoch") == 1


def test_a_stopped_trial_is_started_once_more_than_it_is_stopped_and_comes_to_the_last(
    tmp_path: Path,
) -> None:
    script = Script(faked.boundaries(3, 4))
    places = [*faked.boundaries(3, 4)]

    trial = made(tmp_path, script).stopped("stopped", [places[1], places[3]], places[6])

    assert [start.plan["stop"] for start in script.starts] == [[*places[n]] for n in (1, 3, 6)]
    assert [record.why for record in trial.records].count("resumed") == 2
    assert [*trial.boundaries()] == places[:7]


def test_a_stopped_trial_is_not_started_again_once_it_has_missed_a_stop(tmp_path: Path) -> None:
    script = Script(faked.boundaries(1, 4), lambda record, start: None if record.at.step == 3 else record)
    places = [*faked.boundaries(1, 4)]

    trial = made(tmp_path, script).stopped("stopped", [places[2]], places[3])

    assert [one.code for one in trial.attempts] == [1]


def test_the_end_of_what_a_start_printed_is_kept(tmp_path: Path) -> None:
    script = Script(faked.boundaries(1, 4), lambda record, start: None)

    (attempt,) = made(tmp_path, script).straight("straight").attempts

    assert attempt.log.endswith("ValueError: it fails here")
    assert attempt.error == "ValueError: it fails here"
    assert attempt.has_failed


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


def test_starts_that_share_nothing_replace_the_others_once_they_are_asked_for(tmp_path: Path) -> None:
    usual, apart = Script(faked.boundaries(3, 4)), Script(faked.boundaries(3, 4))
    trial = Trials([], tmp_path, 2, start=usual, start_apart=apart, told=lambda _: None, deterministic=False)

    trial.straight("one")
    trial.start_apart()
    trial.straight("other")

    assert (len(usual.starts), len(apart.starts)) == (1, 1)


def test_ranks_are_read_as_long_as_the_next_one_has_written(tmp_path: Path) -> None:
    script = Script(faked.boundaries(1, 4))

    def of_two(command: object, environment: dict[str, str], log: Path) -> int:
        code = script([], environment, log)
        path = Path(json.loads(environment["RESUMABLE_AUDIT"])["trace"])
        trace_file.path_of(path, 1).write_bytes(path.read_bytes())
        return code

    trial = Trials([], tmp_path, 2, start=of_two, told=print, deterministic=False).straight("x")  # type: ignore[arg-type]

    assert len(trial.ranks) == 2
    assert trial.boundaries(0).keys() == trial.boundaries(1).keys() != set()
    assert trial.boundaries(2) == {}


def test_a_command_that_is_not_there_is_reported_with_what_a_command_looks_like(tmp_path: Path) -> None:
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


def test_the_last_words_of_what_fails_without_a_traceback_are_its_error(tmp_path: Path) -> None:
    def fails(command: object, environment: object, log: Path) -> int:
        log.write_text("usage: train.py DATA\ntrain.py: error: the following arguments are required: DATA\n")
        return 2

    (attempt,) = made(tmp_path, fails).straight("straight").attempts  # type: ignore[arg-type]

    assert attempt.error == "train.py: error: the following arguments are required: DATA"


def test_a_start_returns_how_it_ended_and_gives_no_input(tmp_path: Path) -> None:
    text = "import sys; print(repr(sys.stdin.read())); sys.exit(7)"

    code = trials.start([sys.executable, "-c", text], os.environ, tmp_path / "log")

    assert (code, (tmp_path / "log").read_text()) == (7, "''\n")


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


def test_what_is_stilled_comes_before_the_paths_that_are_given_already(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", "mine")

    found = trials.stilled("clock", "numpy")

    assert found == {"RESUMABLE_STILL": "clock numpy", "PYTHONPATH": f"{trials.STILLED}{os.pathsep}mine"}


def test_a_place_reads_as_people_count_it() -> None:
    assert str(At("batch", 1, 2, 6)) == "step 6 (epoch 1, batch 2)"
    assert str(At("epoch", 2, 0, 8)) == "step 8 (epoch 2)"
