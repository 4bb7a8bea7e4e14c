"""Forks of interpreters that have imported torch: each start is as one of a process of its own."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from places import DATA

from resumable.audit import trials
from resumable.audit.audit import audit
from resumable.audit.interpreters import Interpreters
from resumable.audit.trials import Trial, Trials

FACTS = """
import gc, os, signal, sys, threading
main, frame = sys.modules["__main__"], sys._getframe()
print(sorted((name, repr(value)) for name, value in vars(main).items() if name.startswith("__")))
print(sys.argv, sys.orig_argv, sys.path, sys.flags, sys.warnoptions, os.getcwd(), dict(os.environ))
print(frame.f_code.co_filename, frame.f_globals is vars(main), sys.getrecursionlimit())
print(os.listdir("/proc/self/fd"), os.getpgid(0) == os.getpid() == os.getsid(0), os.read(0, 1))
print(sys.stdout, sys.stdout.line_buffering, sys.stderr.line_buffering, sys.stdout.buffer.tell())
print([signal.getsignal(number) for number in signal.valid_signals()], gc.get_threshold())
print(threading.enumerate(), len(os.listdir("/proc/self/task")))
import torch, multiprocessing
print(torch.get_num_threads(), torch.cuda.is_initialized(), multiprocessing.get_start_method(allow_none=True))
def fails():
    raise ValueError("as it is printed")
fails()
"""


def said(start: trials.Start, command: Sequence[str], log: Path, **more: str) -> tuple[int, str]:
    """Return how a start ended and what it printed, without what is another in every process."""
    code = start([*map(str, command)], {**os.environ, **more}, log)
    return code, re.sub(r"0x[0-9a-f]+|started \d+", "", log.read_text())


def opened(command: Sequence[str], folder: Path, told: list[str] | None = None) -> closing[Interpreters]:
    return closing(Interpreters([*map(str, command)], folder, (told if told is not None else []).append))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to start scripts in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.heavy
@pytest.mark.parametrize("how", [["facts.py"], ["-u", "facts.py", "--lr", "1"], ["-m", "facts", "a b"]])
def test_a_fork_sees_what_a_process_of_its_own_sees(here: Path, how: list[str]) -> None:
    (here / "facts.py").write_text(FACTS)
    command = [sys.executable, *how]

    with opened(command, here) as forks:
        found = said(forks, command, here / "log")

    assert found == said(trials.start, command, here / "log")
    assert found[0] == 1


@pytest.mark.heavy
def test_a_script_that_sets_what_imports_read_gets_a_new_process(here: Path) -> None:
    (here / "sets.py").write_text(
        "import os, sys\n"
        "print('before', flush=True)\n"
        "os.chdir('/')\n"
        "os.environ['OMP_NUM_THREADS'] = sys.argv[1]\n"
        "import torch\n"
        "print(torch.get_num_threads())"
    )
    command = [sys.executable, "sets.py", "1"]

    with opened(command, here) as forks:
        assert said(forks, command, here / "log") == (0, "before\n1\n")


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("text", "ended"),
    [
        ("import os; os.kill(os.getpid(), 9)", (-9, "")),
        ("import atexit; atexit.register(print, 'over'); raise SystemExit(7)", (7, "over\n")),
        ("open('kept', 'w').write('flushed')", (0, "")),
        ("import sys; sys.exit('no data')", (1, "no data\n")),
        ("x = = 1", (1, '  File "{}", line 1\n    x = = 1\n        ^\nSyntaxError: invalid syntax\n')),
    ],
)
def test_a_fork_ends_as_a_process_of_its_own_does(here: Path, text: str, ended: tuple[int, str]) -> None:
    (here / "ends.py").write_text(text)
    command = [sys.executable, "ends.py"]

    with opened(command, here) as forks:
        assert said(forks, command, here / "log") == (ended[0], ended[1].format(here / "ends.py"))


IMPORTED = "import sys; print('torch' in sys.modules, sys.flags.hash_randomization)"


@pytest.mark.parametrize(
    "command", [[sys.executable, "-c", IMPORTED], ["env", sys.executable, "imported.py"]]
)
def test_other_commands_are_started_by_themselves_and_it_says_so(here: Path, command: list[str]) -> None:
    (here / "imported.py").write_text(IMPORTED)
    told: list[str] = []

    with opened(command, here, told) as forks:
        assert [said(forks, command, here / "log")[1] for _ in "ab"] == ["False 1\n"] * 2

    assert told == ["(each start imports torch again) "]


SEEDED = """
import torch
import resumable

resumable.seed_everything(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(torch.randn(32, 8), batch_size=8, shuffle=True)
with resumable.RunState.load("runs", model=model, optimizer=optimizer, loader=loader) as state:
    for epoch in state.epochs(2):
        for batch in state.batches():
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        state.save()
"""


def trained(start: trials.Start, command: Sequence[str], folder: Path) -> Trial:
    made = Trials(command, folder, 20, start=start, told=lambda _: None, deterministic=False)
    return made.straight("straight")


@pytest.mark.heavy
def test_a_fork_trains_the_bits_of_a_process_of_its_own(here: Path) -> None:
    (here / "train.py").write_text(SEEDED)
    command = [sys.executable, "train.py"]

    with opened(command, here) as forks:
        forked = trained(forks, command, here / "forked")

    assert forked.attempts[-1].code == 0
    assert len(forked.boundaries()) == 10
    assert forked.ranks == trained(trials.start, command, here / "apart").ranks


@pytest.mark.heavy
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("script", "kind", "forks"),
    [
        ("correct/classifier.py", None, 9),
        ("broken/log_beside_its_file.py", "state", 9),
        ("broken/torch_unseeded.py", "repeat", 2),
    ],
)
def test_only_looking_for_a_cause_takes_processes_of_their_own(
    here: Path, script: str, kind: str | None, forks: int
) -> None:
    noted = "import sys; print('torch' in sys.modules, file=open('starts', 'a'))\n"
    (here / "train.py").write_text(noted + (DATA / "zoo" / script).read_text())

    found = audit([sys.executable, "train.py"])

    assert [one.kind for one in found.findings] == ([kind] if kind else [])
    starts = (here / "starts").read_text().split()
    assert len(starts) == len(found.attempts)
    assert starts[:forks].count("True") == starts.count("True") == forks
