"""Real torchrun: workers that are killed, signals that end a job, another number of processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forks import WARM, Child
from places import ROOT

from resumable import Run

pytestmark = pytest.mark.timeout(900)
LIMIT = 250.0

SCRIPT = """
import hashlib
import json
import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from resumable import Ranks, RunState

plan = json.loads(sys.argv[1])
folder = Path(plan["folder"])
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()


class Augmented(Dataset):
    def __len__(self):
        return plan["samples"]

    def __getitem__(self, index):
        return index, torch.rand(4) + random.random() + float(np.random.rand())


torch.manual_seed(0)
layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1)
model = DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for seed in (random.seed, np.random.seed, torch.manual_seed):
    seed(100 + rank)
sampler = DistributedSampler(Augmented(), seed=3)
loader = DataLoader(Augmented(), batch_size=2, sampler=sampler, num_workers=1)


def note(name, **facts):
    with open(folder / f"{name}-{rank}", "a") as file:
        file.write(json.dumps(facts) + "\\n")


def digest(*values):
    plain = [v.detach().numpy().tobytes() if torch.is_tensor(v) else repr(v).encode() for v in values]
    return hashlib.sha256(b"|".join(plain)).hexdigest()[:12]


def comes(kind, done):
    # Each trouble comes once: torch itself now and then needs another restart, so those are not counted.
    for number, (what, whom, step) in enumerate(plan["troubles"]):
        mark = folder / f"trouble-{number}"
        if not mark.exists():
            if (what, whom, step) == (kind, rank, done):
                mark.touch()
                return True
            return False
    return False


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


state = RunState.load(
    folder / "run", model=model, optimizer=optimizer, loader=loader, keep=None,
    ranks=Ranks(timeout=plan["timeout"]),
)
note("starts", step=state.step, epoch=state.epoch, batch=state.batch)


def train():
    for epoch in state.epochs(plan["epochs"]):
        sampler.set_epoch(epoch)
        for indices, x in state.batches():
            note("batches", at=[epoch, state.batch], indices=indices.tolist(), digest=digest(x))
            loss = model(x).square().mean()
            optimizer.zero_grad()
            if comes("step", state.step):
                model.module[0].weight.register_hook(die)
            loss.backward()
            optimizer.step()
            is_dying = comes("save", state.step)
            if is_dying:
                state.wait()
                os.fsync = die
            if comes("told", state.step):
                os.kill(os.getpid(), signal.SIGTERM)
            if state.step % 2 == 0:
                state.save()
            # The thread that writes may be slow: the next trouble is not to come in the same life.
            while is_dying:
                time.sleep(0.1)
            time.sleep(plan["pause"])
        state.save()


try:
    train()
except SystemExit as exc:
    note("left", step=state.step, code=exc.code)
    raise
state.close()
moments = [v for of_one in optimizer.state.values() for v in of_one.values()]
note(
    "ends",
    step=state.step,
    samples=state.samples,
    weights=digest(*model.parameters()),
    buffers=digest(*model.buffers()),
    optimizer=digest(*moments),
    random=digest(random.random(), float(np.random.rand()), torch.rand(1)),
)
dist.destroy_process_group()
"""


class Job:
    """One start of torchrun, in a folder that holds its run, what its workers note, and what they print."""

    def __init__(self, folder: Path, child: Child, before: str) -> None:
        self.folder = folder
        self.child = child
        self._before = before

    def ended(self) -> int:
        """Return the exit code of torchrun; nothing that it has started is there any more."""
        code = self.child.ended().code
        until(lambda: not self.processes(), "all processes of torchrun have ended", limit=5)
        # What torchrun raises at its end is 1, unless a thread of its own store makes it abort even later.
        return 1 if code == -signal.SIGABRT else code

    def processes(self) -> list[int]:
        """Return the living processes of the workers, by their folder: each has a session of its own."""
        found = []
        for cwd in Path("/proc").glob("[0-9]*/cwd"):
            with contextlib.suppress(OSError):
                if cwd.samefile(self.folder) and (pid := int(cwd.parent.name)) != self.child.pid:
                    found.append(pid)
        return found

    def tell(self, number: int) -> None:
        """Send a signal to torchrun, and to nobody else."""
        self.child.send(number)

    def printed(self) -> str:
        """Return what this start and those before it in the folder have printed."""
        return self._before + self.child.out + self.child.err


@contextlib.contextmanager
def torchrun(folder: Path, script: Path, *options: str, arguments: list[str]) -> Iterator[Job]:
    """Start torchrun; whatever of it is still there at the end of the block is killed."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["-m", "torch.distributed.run", "--standalone", *options, script, *arguments]
    printed = folder / "printed"
    child = WARM.begin(command, folder, environment={"PYTHONPATH": str(ROOT)}, deadline=LIMIT)
    job = Job(folder, child, printed.read_text() if printed.exists() else "")
    try:
        yield job
    finally:
        for pid in job.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        child.kill()
        child.ended()
        printed.write_text(job.printed())


def start(folder: Path, size: int = 2, *options: str, **plan: Any) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "train.py"
    script.write_text(SCRIPT)
    whole = {
        "folder": str(folder),
        "troubles": [],
        "epochs": 2,
        "samples": 24,
        "pause": 0,
        "timeout": 5,
        **plan,
    }
    return torchrun(folder, script, f"--nproc-per-node={size}", *options, arguments=[json.dumps(whole)])


def until(is_so: Callable[[], Any], what: str, limit: float = LIMIT) -> None:
    end = time.monotonic() + limit
    while not is_so():
        assert time.monotonic() < end, f"waited {limit:g} s until {what}"
        time.sleep(0.02)


def notes(folder: Path, name: str, rank: int) -> list[Any]:
    path = folder / f"{name}-{rank}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job that nothing has happened to."""
    folder = tmp_path_factory.mktemp("straight")
    with start(folder) as job:
        assert job.ended() == 0, job.printed()
    return folder


def check_same_end(folder: Path, straight: Path) -> None:
    """All ranks have ended as in a job that nothing has happened to, and have had the same batches."""
    for rank in (0, 1):
        assert notes(folder, "ends", rank) == notes(straight, "ends", rank)
        expected = {tuple(one["at"]): one for one in notes(straight, "batches", rank)}
        found = notes(folder, "batches", rank)
        assert {tuple(one["at"]) for one in found} == expected.keys()
        assert all(one == expected[tuple(one["at"])] for one in found)
    first, second = (notes(straight, "ends", rank)[0] for rank in (0, 1))
    assert first["weights"] == second["weights"]
    assert first["random"] != second["random"]
    for checkpoint in Run(folder / "run").checkpoints():
        checkpoint.verify()


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("troubles", "resumed_at"),
    [
        pytest.param([["step", 1, 7]], [{4, 6}], marks=pytest.mark.nightly),
        pytest.param([["save", 1, 6]], [{4}], marks=pytest.mark.nightly),
        ([["save", 0, 8], ["step", 0, 9], ["save", 1, 10]], [{6}, {6, 8}, {8}]),
    ],
)
def test_a_group_whose_worker_is_killed_resumes_by_itself(
    tmp_path: Path,
    straight: Path,
    monkeypatch: pytest.MonkeyPatch,
    troubles: list[Any],
    resumed_at: list[set[int]],
) -> None:
    # Without it, a restarted worker may find in the agent's store where those before it have listened.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with start(tmp_path, 2, "--max-restarts=5", troubles=troubles) as job:
        assert job.ended() == 0, job.printed()

    check_same_end(tmp_path, straight)
    starts = [one["step"] for one in notes(tmp_path, "starts", 0)]
    assert len(list(tmp_path.glob("trouble-*"))) == len(troubles)
    assert len(starts) == 1 + len(troubles)
    assert all(step in steps for step, steps in zip(starts[1:], resumed_at, strict=True)), starts
    assert notes(tmp_path, "starts", 0) == notes(tmp_path, "starts", 1)


def has_flag(flag: str) -> bool:
    from torch.distributed.run import get_args_parser

    return flag in get_args_parser().format_help()


NEEDS_SIGUSR1 = pytest.mark.skipif(
    not has_flag("--signals-to-handle"), reason="this torch's torchrun has no --signals-to-handle"
)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("number", "options"),
    [
        (signal.SIGTERM, []),
        pytest.param(
            signal.SIGUSR1,
            ["--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"],
            marks=[NEEDS_SIGUSR1, pytest.mark.nightly],
        ),
    ],
)
def test_a_job_ended_by_a_signal_continues_from_exactly_there(
    tmp_path: Path, straight: Path, number: int, options: list[str]
) -> None:
    for batches in (3, 8):
        with start(tmp_path, 2, *options, pause=0.2) as job:
            until(lambda seen=batches: len(notes(tmp_path, "batches", 0)) >= seen, "some batches were done")
            job.tell(number)
            assert job.ended() == 1
        left = [notes(tmp_path, "left", rank)[-1] for rank in (0, 1)]
        saved = Run(tmp_path / "run").checkpoints()[-1].about.step
        assert left == [{"step": saved, "code": 128 + number}] * 2

    with start(tmp_path) as job:
        assert job.ended() == 0, job.printed()

    check_same_end(tmp_path, straight)
    for rank in (0, 1):
        assert notes(tmp_path, "batches", rank) == notes(straight, "batches", rank)


@pytest.mark.heavy
@pytest.mark.parametrize("told", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_signal_to_one_worker_is_enough_for_all_to_leave(tmp_path: Path, straight: Path, told: int) -> None:
    for code in (1, 0):
        with start(tmp_path, pause=0.2, troubles=[["told", told, 3]]) as job:
            assert job.ended() == code, job.printed()

    check_same_end(tmp_path, straight)
    for rank in (0, 1):
        assert notes(tmp_path, "batches", rank) == notes(straight, "batches", rank)
        assert [one["code"] for one in notes(tmp_path, "left", rank)] == [143]


@pytest.mark.nightly
def test_each_epoch_may_have_another_number_of_processes(tmp_path: Path) -> None:
    for epochs, size in enumerate((2, 1, 3), 1):
        with start(tmp_path, size, epochs=epochs) as job:
            assert job.ended() == 0, job.printed()

    assert re.search(r"1 process\w* instead of 2.*3 processes instead of 1", job.printed(), re.DOTALL)
    seen = [one for rank in range(3) for one in notes(tmp_path, "batches", rank)]
    for epoch in range(3):
        of_epoch = [index for one in seen if one["at"][0] == epoch for index in one["indices"]]
        assert sorted(of_epoch) == list(range(24))
    assert [notes(tmp_path, "ends", rank)[-1]["step"] for rank in range(3)] == [6 + 12 + 4] * 3


@pytest.mark.heavy
def test_an_epoch_may_continue_with_another_number_of_processes(tmp_path: Path) -> None:
    troubles, steps = [["told", 1, 1]], 0
    for size, code in ((2, 1), (1, 1), (3, 0)):
        with start(tmp_path, size, epochs=1, samples=48, pause=0.2, troubles=troubles) as job:
            assert job.ended() == code, job.printed()
        steps = steps or notes(tmp_path, "left", 0)[0]["step"]
        # So many that the three have whole batches
        alone = (24 - 2 * steps) % 3 or 3
        troubles = [*troubles[:1], ["told", 0, steps + alone]]

    seen = [one for rank in range(3) for one in notes(tmp_path, "batches", rank)]
    assert sorted(index for one in seen for index in one["indices"]) == list(range(48))
    together = (24 - 2 * steps - alone) // 3
    assert [notes(tmp_path, "ends", rank)[-1]["step"] for rank in range(3)] == [steps + alone + together] * 3
    Run(tmp_path / "run").checkpoints()[-1].verify()


EXAMPLE = ROOT / "examples" / "distributed.py"


@pytest.mark.heavy
def test_all_ranks_of_the_example_leave_well_when_one_is_asked_to_end(tmp_path: Path) -> None:
    # Eight epochs are over before the processes have heard of each other
    arguments = [str(tmp_path / "run"), "--epochs=8000"]
    with torchrun(tmp_path, EXAMPLE, "--nproc-per-node=2", arguments=arguments) as job:
        until(lambda: list(tmp_path.glob("run/checkpoints/0*")), "a checkpoint is there")
        worker = job.processes()[0]
        os.kill(worker, signal.SIGTERM)
        assert job.ended() == 1

    assert job.printed().count("the same command continues from there") == 1
    # One that had not listened would have ended with -15
    assert re.search(r"Root Cause.*exitcode +: 143 ", job.printed(), re.DOTALL), job.printed()
    for checkpoint in Run(tmp_path / "run").checkpoints():
        checkpoint.verify()


@pytest.mark.nightly
def test_the_example_continues_by_itself_when_a_worker_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    options, weights = ["--nproc-per-node=2", "--max-restarts=3"], []
    for name, is_killed in (("killed", True), ("left-alone", False)):
        arguments = [str(tmp_path / name / "run"), "--epochs=25", "--device=cpu"]
        with torchrun(tmp_path / name, EXAMPLE, *options, arguments=arguments) as job:
            if is_killed:
                until(
                    lambda: list(tmp_path.glob("killed/run/checkpoints/*-step-*[1-9]?")), "10 steps are done"
                )
                os.kill(max(job.processes()), signal.SIGKILL)
            assert job.ended() == 0, job.printed()
        weights.append(re.findall(r"^weights \w+$", job.printed(), re.MULTILINE))
        assert job.printed().count("resumed ") == is_killed

    assert weights[0] == weights[1]
    assert len(weights[0]) == 1
