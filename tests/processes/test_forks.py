"""What the tests fork ends as what a user starts: forks tell the truth."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import killed_training
import pytest
from forks import LATE, Forks, Life, Stop

SCRIPT = """
import atexit, os, signal, sys, threading, time
import killed_training
from pathlib import Path
from torch.optim.optimizer import register_optimizer_step_post_hook

how = sys.argv[2]
steps = []

def end(*_):
    steps.append(1)
    if len(steps) != 4:
        return
    print("in", os.path.basename(os.getcwd()), os.environ["OF_MINE"], sys.argv[1:], __name__, flush=True)
    if how == "raise":
        raise ValueError("no more")
    if how == "exit":
        sys.exit(3)
    if how == "abort":
        os.abort()
    if how.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, how))

register_optimizer_step_post_hook(end)
atexit.register(print, "at exit")
threading.Thread(target=lambda: (threading.main_thread().join(), print("a thread's end"))).start()
killed_training.main(Path(sys.argv[1]), 1)
"""
HOWS = {
    "raise": 1,
    "exit": 3,
    "SIGTERM": 143,
    "SIGKILL": -signal.SIGKILL,
    "abort": -signal.SIGABRT,
    "never": 0,
}


def started(command: list[str], folder: Path, environment: dict[str, str]) -> Life:
    """Start Python itself."""
    environment = {**os.environ, **environment, "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True
    )
    return Life(done.returncode, done.stdout, done.stderr)


@pytest.mark.heavy
def test_a_killed_training_is_in_forks_what_it_is_in_real_processes(forks: Forks, tmp_path: Path) -> None:
    environment = {"OF_MINE": "yes", "PYTHONPATH": os.pathsep.join(sys.path)}
    found: dict[str, list[Life]] = {}
    for name in ("real", "forked"):
        folder = tmp_path / name / "folder"
        folder.mkdir(parents=True)
        (folder / "train.py").write_text(SCRIPT)
        for how in HOWS:
            command = ["train.py", "run", how]
            if name == "real":
                life = started(command, folder, environment)
            else:
                life = forks.run(command, folder, environment=environment)
            errors = re.sub(".*save.. has waited.*\n(  .*\n)?", "", life.err.replace(str(folder), "FOLDER"))
            out = re.sub(r"\([0-9.]+ m?s\)", "(so long)", life.out)
            found.setdefault(how, []).append(Life(life.code, out, errors))

    for how, code in HOWS.items():
        real, forked = found[how]
        assert (how, real.code) == (how, code), real.err
        assert forked == real
    assert "ValueError: no more" in found["raise"][0].err
    ends = [
        (tmp_path / name / "folder/run" / killed_training.RESULT).read_text() for name in ("real", "forked")
    ]
    assert ends[0] == ends[1]


RANK = """
import os, signal, sys, time
from pathlib import Path

rank, life = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
is_leader = os.getpid() == os.getpgid(0) == os.getsid(0)
parent = Path(f"/proc/{os.getppid()}/comm").read_text().strip()
facts = os.environ["OF_MINE"], os.path.basename(os.getcwd()), sys.argv, __name__, is_leader, parent

def say(*what):
    sys.stdout.write(f"{what} | ")

def told(*_):
    say("told", rank, life)
    sys.exit(5)

say("begins", rank, life, *facts)
mark = Path(f"listens-{life}")
if rank == "1" and life < 3:
    signal.signal(signal.SIGTERM, told)
    mark.touch()
    time.sleep(60)
while life < 3 and not mark.exists():
    time.sleep(0.01)
say("ends", rank, life)
if life == 0:
    sys.exit(3)
if life == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if life == 2:
    raise ValueError("no more")
"""


@pytest.mark.heavy
def test_workers_of_torchrun_are_in_forks_what_they_are_in_real_processes(
    forks: Forks, tmp_path: Path
) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    found = []
    for start in (started, forks.run):
        folder = tmp_path / start.__name__ / "folder"
        folder.mkdir(parents=True)
        (folder / "rank.py").write_text(RANK)
        life = start([*command, "rank.py", "argument"], folder, environment={"OF_MINE": "yes"}).checked()
        ends = re.findall(r"exitcode: (\S+)\) local_rank: 0|^(ValueError: .*)", life.err, re.MULTILINE)
        found.append((sorted(life.out.split(" | ")), ends))

    real, forked = found
    assert forked == real
    assert sum(one.startswith("('told',") for one in real[0]) == 3
    assert real[1] == [("3", ""), ("-9", ""), ("", "ValueError: no more"), ("1", "")]


def test_several_run_at_once_and_each_ends_by_itself_or_by_a_signal(forks: Forks, tmp_path: Path) -> None:
    waits = ["-c", "import signal; print('ready'); signal.pause()"]
    first, second = forks.begin(waits, tmp_path), forks.begin(waits, tmp_path)
    for child in (first, second):
        child.wait_for("ready")

    assert forks.run(["-c", "print(1)"], tmp_path) == Life(0, "1\n", "")
    assert first.is_alive
    second.send(signal.SIGUSR1)
    assert second.ended().code == -signal.SIGUSR1
    assert first.is_alive
    first.kill()
    assert first.ended() == Life(-signal.SIGKILL, "ready\n", "")
    assert not first.is_alive


@pytest.mark.heavy
def test_what_hangs_is_ended_by_its_deadline_and_says_where(forks: Forks, tmp_path: Path) -> None:
    life = forks.run(["-c", "import time\ntime.sleep(60)"], tmp_path, deadline=0.2)

    assert life.code == LATE
    assert 'File "<string>", line 2 in <module>' in life.err
    assert life.err.endswith("ended after 0.2 s, its deadline\n")


def test_what_an_ended_process_leaves_behind_is_killed(forks: Forks, tmp_path: Path) -> None:
    leaves = "import os, time\nif child := os.fork(): print(child)\nelse: time.sleep(60)"

    left = int(forks.run(["-c", leaves], tmp_path).checked().out)

    end = time.monotonic() + 10
    while Path(f"/proc/{left}/stat").exists() and " Z " not in Path(f"/proc/{left}/stat").read_text():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.heavy
def test_killed_at_chosen_steps_a_training_ends_as_one_left_alone(forks: Forks, tmp_path: Path) -> None:
    for name, at in (("whole", []), ("killed", [4, Stop(7), 9])):
        forks.kill_and_resume(killed_training.main, tmp_path / name, 1, folder=tmp_path, at=at)

    ends = [(tmp_path / name / killed_training.RESULT).read_text() for name in ("whole", "killed")]
    assert ends[0] == ends[1]
