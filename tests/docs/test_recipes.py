"""The recipes: the scripts on their pages, run with real processes, signals and servers.

What is not here (SLURM, Kubernetes, a cloud) a stand-in plays, which does what its documentation says.
"""

from __future__ import annotations

import configparser
import contextlib
import http.server
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT
from proxy import Request
from safetensors.torch import load_file
from servers import S3, ProxiedS3, Sftp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import Remote, RemoteError, ResumableWarning, Run, RunState

pytestmark = [pytest.mark.timeout(900), pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")]
PAGES = ROOT / "docs" / "recipes"
FORKS = ROOT / "tests" / "support" / "fork_server.py"
LIMIT = 200.0

TRAIN = """
import json
import os
import random
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from resumable import Preempt, Ranks, RunState

plan = json.loads(os.environ["PLAN"])
if "RANK" in os.environ:
    dist.init_process_group("gloo")
else:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
rank = dist.get_rank()
torch.set_num_threads(1)


class Augmented(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        return index, torch.rand(4) + random.random()


torch.manual_seed(0)
layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)
model = DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
random.seed(rank)
torch.manual_seed(1 + rank)
sampler = DistributedSampler(Augmented(), seed=3)
loader = DataLoader(Augmented(), batch_size=48 // 8 // dist.get_world_size(), sampler=sampler, num_workers=1)
state = RunState.load(
    sys.argv[1], model=model, optimizer=optimizer, loader=loader,
    preempt=Preempt(max_time=plan.get("max_time")), ranks=Ranks(timeout=10),
)
for epoch in state.epochs(3):
    sampler.set_epoch(epoch)
    for indices, x in state.batches():
        with open(f"batches-{rank}", "a") as file:
            file.write(json.dumps([epoch, state.batch, indices.tolist()]) + "\\n")
        if state.step == plan.get("fails_at"):
            raise RuntimeError("this training fails")
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(plan.get("pause", 0))
state.save().wait()
state.close()
dist.destroy_process_group()
"""

# What each stand-in does is what is said of it on the page.
SRUN = """#!/bin/bash
set -m # a process group for each task
for ((task = 0; task < SLURM_NTASKS; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
    echo $! >> tasks
done
code=0
for task in $(tail -n "$SLURM_NTASKS" tasks); do
    wait "$task"
    last=$?
    ((last > code)) && code=$last
done
exit $code
"""
SCONTROL = """#!/bin/bash
case $1 in
show) echo localhost ;;
requeue)
    echo "$2" >> requeued
    kill "$PPID" # a job that is requeued is ended
    ;;
esac
"""
SCANCEL = """#!/bin/bash
[ "$1" = --signal=TERM ] || exit 2
kill -TERM -- $(sed s/^/-/ tasks)
"""


def blocks(page: str, kind: str) -> list[str]:
    """Return the blocks of one kind on a page."""
    return re.findall(rf"^```{kind}\n(.*?)^```", (PAGES / page).read_text(), re.DOTALL | re.MULTILINE)


def until_trained(folder: Path, count: int, job: subprocess.Popen[Any]) -> None:
    """Wait until a job has trained on so many batches, over all its starts."""
    end = time.monotonic() + LIMIT
    while len(batches(folder)) < count:
        assert job.poll() is None, "the job has ended too early"
        assert time.monotonic() < end, f"waited {LIMIT:g} s"
        time.sleep(0.02)


def batches(folder: Path, rank: int = 0) -> list[Any]:
    """Return what one process has trained on, over all starts."""
    path = folder / f"batches-{rank}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def environment(folder: Path, **plan: Any) -> dict[str, str]:
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    own = {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PLAN": json.dumps(plan)}
    return {**os.environ, **own}


def install(folder: Path, name: str, text: str) -> None:
    (folder / "bin" / name).write_text(text)
    (folder / "bin" / name).chmod(0o755)


def make(folder: Path) -> Path:
    """Make what the scripts of all recipes find where they run: train.py, and a python on the PATH."""
    (folder / "bin").mkdir(parents=True)
    install(folder, "python", f'#!/bin/bash\nexec "{sys.executable}" "$@"\n')
    # A process that has the signals that torchrun has, and forks its workers
    install(folder, "torchrun", f'#!/bin/bash\nexec "{sys.executable}" "{FORKS}" torchrun "$@"\n')
    (folder / "train.py").write_text(TRAIN)
    return folder


def check_same_end(folder: Path, straight: Path, size: int) -> None:
    """A run has the same weights, optimizer and buffers as one left alone, and trained on each batch once."""
    for rank in range(size):
        assert batches(folder, rank) == batches(straight, rank)
    ends = [Run(found / "runs/exp").checkpoints()[-1].path for found in (folder, straight)]
    files = [{path.name: load_file(path) for path in end.glob("*.safetensors")} for end in ends]
    assert files[0].keys() == files[1].keys() >= {"model.safetensors", "optimizer.safetensors"}
    for name, tensors in files[0].items():
        assert tensors.keys() == files[1][name].keys()
        assert all(torch.equal(tensor, files[1][name][key]) for key, tensor in tensors.items())
    for checkpoint in Run(folder / "runs/exp").checkpoints():
        checkpoint.verify()


class Slurm:
    """The controller and the daemons of SLURM, for one job: they start its script and send it signals."""

    def __init__(self, folder: Path, script: str, tasks: int, *, spares_children: bool = True) -> None:
        self.folder = make(folder)
        self._options = re.findall(
            r"--[^\n ]+", "".join(re.findall(r"^#SBATCH (.*\n)", script, re.MULTILINE))
        )
        self._tasks = tasks
        # Of it the script makes its port
        self._number = str(secrets.randbelow(10**6))
        self._spares_children = spares_children
        self._script = folder / "job.sh"
        self._script.write_text(script)
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("scancel", SCANCEL)):
            install(folder, name, text)
        self.restarts = 0

    def run(self, warn_after: int | None = None, *, began: float | None = None, **plan: Any) -> int:
        """Start the script; send what `--signal` says so many batches later; return how the script ends."""
        facts = {
            "SLURM_JOB_ID": self._number,
            "SLURM_JOB_NODELIST": "node1",
            "SLURM_NNODES": "1",
            "SLURM_NTASKS": str(self._tasks),
            "SLURM_RESTART_COUNT": str(self.restarts),
            "SLURM_JOB_START_TIME": str(int(time.time() if began is None else began)),
        }
        (self.folder / "tasks").write_text("")
        (self.folder / "requeued").unlink(missing_ok=True)
        done = len(batches(self.folder))
        with open(self.folder / "output", "ab" if "--open-mode=append" in self._options else "wb") as output:
            job = subprocess.Popen(
                ["/bin/bash", str(self._script)],
                cwd=self.folder,
                env={**environment(self.folder, **plan), **facts},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        with ended(job, self.pids):
            if warn_after is not None:
                until_trained(self.folder, done + warn_after, job)
                self._warn(job.pid)
            return job.wait(LIMIT)

    def pids(self) -> list[int]:
        """Return the tasks of this start."""
        return [int(line) for line in (self.folder / "tasks").read_text().split()]

    def _warn(self, shell: int) -> None:
        (option,) = [option for option in self._options if option.startswith("--signal=")]
        found = re.fullmatch(r"--signal=(B:)?(\w+)@\d+", option)
        assert found
        number = signal.Signals[f"SIG{found[2]}"]
        if found[1]:
            os.kill(shell, number)
            return
        for task in self.pids():
            (os.kill if self._spares_children else os.killpg)(task, number)

    def was_requeued(self) -> bool:
        """Whether the job has put itself back into the queue; it is started again then."""
        if found := (self.folder / "requeued").exists():
            assert "--requeue" in self._options
            assert (self.folder / "requeued").read_text() == f"{self._number}\n"
            self.restarts += 1
        return found


@contextlib.contextmanager
def ended(job: subprocess.Popen[Any], groups: Callable[[], list[int]]) -> Iterator[None]:
    """Let nothing of a job live on after the block."""
    try:
        yield
    finally:
        job.kill()
        for group in groups():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        job.wait()


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The folder of a training that nothing has happened to, of as many processes."""
    found: dict[int, Path] = {}

    def of(size: int) -> Path:
        if size not in found:
            job = Slurm(tmp_path_factory.mktemp("straight") / str(size), blocks("slurm.md", "bash")[0], size)
            assert job.run() == 0, (job.folder / "output").read_text()
            assert not job.was_requeued()
            found[size] = job.folder
        return found[size]

    return of


@pytest.mark.heavy
@pytest.mark.parametrize("spares_children", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_slurm_job_requeues_itself_until_the_training_is_done(
    tmp_path: Path, straight: Callable[[int], Path], spares_children: bool
) -> None:
    job = Slurm(tmp_path / "job", blocks("slurm.md", "bash")[0], 2, spares_children=spares_children)

    for warn_after in (2, 5):
        job.run(warn_after, pause=0.2)
        assert job.was_requeued(), (job.folder / "output").read_text()
    assert job.run() == 0
    assert not job.was_requeued()

    check_same_end(job.folder, straight(2), 2)
    assert (job.folder / "output").read_text().count("the same command continues from there") == 2


@pytest.mark.heavy
def test_a_slurm_job_that_only_knows_its_limit_leaves_before_it(
    tmp_path: Path, straight: Callable[[int], Path]
) -> None:
    script = blocks("slurm.md", "bash")[0].replace("--signal=TERM@180 ", "")
    assert "--signal" not in script
    job = Slurm(tmp_path / "job", script, 2)

    for _ in range(2):
        job.run(began=time.time() - 3600, max_time="1 h", pause=0.2)
        assert job.was_requeued(), (job.folder / "output").read_text()
    assert job.run(max_time="1 h") == 0

    check_same_end(job.folder, straight(2), 2)
    assert (job.folder / "output").read_text().count("max_time: ") == 2


@pytest.mark.heavy
@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_slurm_job_whose_training_fails_does_not_come_back(tmp_path: Path, number: int) -> None:
    job = Slurm(tmp_path / "job", blocks("slurm.md", "bash")[number], 1)

    assert job.run(fails_at=3) == 1
    assert not job.was_requeued()


@pytest.mark.nightly
def test_a_slurm_job_that_was_started_a_hundred_times_does_not_come_back(tmp_path: Path) -> None:
    job = Slurm(tmp_path / "job", blocks("slurm.md", "bash")[0], 1)
    job.restarts = 100

    assert job.run(1, pause=0.2) == 128 + signal.SIGTERM
    assert not job.was_requeued()


@pytest.mark.heavy
@pytest.mark.parametrize("spares_children", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_slurm_job_of_torchrun_requeues_itself_too(
    tmp_path: Path, straight: Callable[[int], Path], spares_children: bool
) -> None:
    job = Slurm(tmp_path / "job", blocks("slurm.md", "bash")[1], 1, spares_children=spares_children)

    for _ in range(2):
        job.run(3, pause=0.2)
        assert job.was_requeued(), (job.folder / "output").read_text()
    assert job.run() == 0

    check_same_end(job.folder, straight(2), 2)


def make_parts() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    loader = DataLoader(TensorDataset(torch.randn(24, 4), torch.randn(24, 1)), 4, shuffle=True)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01), loader


class Notebook:
    """The names that the cells of a notebook share; the stop button is pressed in the batches told."""

    def __init__(self, run_dir: Path) -> None:
        self.cells = blocks("colab.md", "py")
        self._pressed: dict[int, int] = {}
        self._trained = 0
        self._kept: list[Any] = []
        self.names: dict[str, Any] = {"run_dir": run_dir, "make": make_parts, "train": self._train}

    def run(self, pressed: dict[int, int] | None = None) -> None:
        """Run the cell that trains; the stop button is pressed so often in each of these batches."""
        self._pressed, self._trained = pressed or {}, 0
        exec(compile(self.cells[1], "cell", "exec"), self.names)

    def stopped(self, pressed: dict[int, int]) -> Any:
        """Run the cell, and stop it; return its exit code, None if it was left at once."""
        with pytest.raises((SystemExit, KeyboardInterrupt)) as left:
            self.run(pressed)
        # A notebook keeps the last traceback, and with it the loops that were left
        self._kept.append(left)
        return getattr(left.value, "code", None)

    def weights(self) -> list[torch.Tensor]:
        return [*self.names["model"].state_dict().values()]

    def _train(self, model: nn.Module, optimizer: torch.optim.Optimizer, x: Any, y: Any) -> None:
        self._trained += 1
        for _ in range(self._pressed.get(self._trained, 0)):
            signal.raise_signal(signal.SIGINT)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> list[torch.Tensor]:
    """The weights that a notebook ends with which nobody stops."""
    notebook = Notebook(tmp_path_factory.mktemp("notebook") / "exp")
    notebook.run()
    return notebook.weights()


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """Give the signals back to whoever had them: a test that fails may not."""
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def check_notebook(notebook: Notebook, untouched: list[torch.Tensor]) -> None:
    assert all(torch.equal(*pair) for pair in zip(notebook.weights(), untouched, strict=True))
    for checkpoint in Run(notebook.names["run_dir"]).checkpoints():
        checkpoint.verify()


def test_a_cell_that_was_stopped_twice_continues_when_it_is_run_again(
    run_dir: Path, untouched: list[torch.Tensor], capfd: pytest.CaptureFixture[str]
) -> None:
    notebook = Notebook(run_dir)
    for batch in (4, 9):
        assert notebook.stopped({batch: 1}) == 128 + signal.SIGINT
    notebook.run()

    check_notebook(notebook, untouched)
    printed = capfd.readouterr().out
    assert [int(step) for step in re.findall(r"resumed .* step (\d+)", printed)] == [4, 13]


def test_a_cell_that_was_left_at_once_is_trained_again_from_its_last_save(
    run_dir: Path, untouched: list[torch.Tensor]
) -> None:
    notebook = Notebook(run_dir)
    assert notebook.stopped({4: 1}) == 128 + signal.SIGINT
    assert notebook.stopped({5: 2}) == 128 + signal.SIGINT
    notebook.run()

    check_notebook(notebook, untouched)


def test_a_copy_of_the_newest_checkpoint_is_enough_to_continue(
    tmp_path: Path, untouched: list[torch.Tensor]
) -> None:
    notebook = Notebook(tmp_path / "local")
    exec(notebook.cells[2], notebook.names)
    (tmp_path / "kept" / "unfinished").mkdir(parents=True)
    assert notebook.stopped({4: 1}) == 128 + signal.SIGINT
    kept = [notebook.names["copy_newest"](tmp_path / "local", tmp_path / "kept") for _ in range(2)]
    assert [path.name for path in kept] == ["000001-step-00000004"] * 2

    elsewhere = Notebook(tmp_path / "new")
    elsewhere.cells[1] = elsewhere.cells[1].replace("loader=loader, ", "loader=loader, resume=kept, ")
    elsewhere.names["kept"] = kept[0]
    elsewhere.run()

    check_notebook(elsewhere, untouched)


def can_make_a_pid_namespace() -> bool:
    if not (tool := shutil.which("unshare")):
        return False
    return subprocess.run([tool, *NAMESPACE, "true"], capture_output=True).returncode == 0


NAMESPACE = ["--pid", "--fork", "--kill-child", "--mount-proc"]


def start(folder: Path, command: list[str], **plan: Any) -> subprocess.Popen[bytes]:
    """Start a command as a recipe says it, in the folder of a job."""
    with open(folder / "output", "ab") as output:
        return subprocess.Popen(
            command, cwd=folder, env=environment(folder, **plan), stdout=output, stderr=output
        )


def pod(folder: Path, command: list[str], **plan: Any) -> tuple[subprocess.Popen[bytes], int]:
    """Start a command as the first process of a container; return what awaits it, and its process id."""
    job = start(folder, ["unshare", *NAMESPACE, *command], **plan)
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children")
    while not (first := children.read_text().split()):
        assert job.poll() is None
    return job, int(first[0])


def one(page: str, pattern: str) -> str:
    """Return the one place on a page that fits."""
    (found,) = re.findall(pattern, (PAGES / page).read_text(), re.MULTILINE)
    return str(found)


@pytest.mark.heavy
@pytest.mark.skipif(not can_make_a_pid_namespace(), reason="no PID namespace can be made here")
def test_the_first_process_of_a_pod_saves_within_the_grace_period(
    tmp_path: Path, straight: Callable[[int], Path]
) -> None:
    folder = make(tmp_path / "pod")
    command = json.loads(one("kubernetes.md", r"^ +command: (\[.*\])$"))
    grace = float(one("kubernetes.md", r"^ +terminationGracePeriodSeconds: (\d+)$"))
    for count in (3, 9):
        job, first = pod(folder, command, pause=0.2)
        with ended(job, list):
            # Before its loops the kernel drops it
            os.kill(first, signal.SIGTERM)
            until_trained(folder, count, job)
            os.kill(first, signal.SIGTERM)
            assert job.wait(grace) == 128 + signal.SIGTERM
    assert pod(folder, command)[0].wait(LIMIT) == 0

    check_same_end(folder, straight(1), 1)


def test_the_manifest_lets_a_pod_that_left_in_good_order_be_replaced() -> None:
    yaml = pytest.importorskip("yaml")
    (text,) = blocks("kubernetes.md", "yaml")
    claim, job = yaml.safe_load_all(text)
    spec, template = job["spec"], job["spec"]["template"]["spec"]
    (container,) = template["containers"]

    assert (claim["kind"], job["kind"], template["restartPolicy"]) == (
        "PersistentVolumeClaim",
        "Job",
        "Never",
    )
    ignored = [rule for rule in spec["podFailurePolicy"]["rules"] if rule["action"] == "Ignore"]
    assert ignored[0]["onPodConditions"] == [{"type": "DisruptionTarget"}]
    assert ignored[1]["onExitCodes"] == {
        "containerName": container["name"],
        "operator": "In",
        "values": [128 + signal.SIGUSR1, 128 + signal.SIGTERM],
    }
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    (volume,) = template["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert f"{container['workingDir']}/{container['command'][-1]}".startswith(mounts[volume["name"]] + "/")


def unit() -> configparser.ConfigParser:
    """Return the unit on the page."""
    found = configparser.ConfigParser(interpolation=None)
    found.optionxform = str  # type: ignore[assignment,method-assign]
    found.read_string(blocks("spot.md", "ini")[0])
    return found


@pytest.mark.heavy
def test_a_unit_that_is_stopped_continues_at_the_next_boot(
    tmp_path: Path, straight: Callable[[int], Path]
) -> None:
    folder, service = make(tmp_path / "exp"), unit()["Service"]
    command = service["ExecStart"].replace("/srv/exp/.venv/bin/", "").split()
    for count in (3, 9):
        job = start(folder, command, pause=0.2)
        with ended(job, list):
            until_trained(folder, count, job)
            # KillMode=mixed: to the main process only
            job.send_signal(signal.Signals[service["KillSignal"]])
            assert job.wait(float(service["TimeoutStopSec"])) == int(service["SuccessExitStatus"])
    assert start(folder, command).wait(LIMIT) == 0

    check_same_end(folder, straight(1), 1)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    path = tmp_path / "exp.service"
    path.write_text(blocks("spot.md", "ini")[0].replace("/srv/exp/.venv/bin/python", sys.executable))
    found = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True
    )

    assert [line for line in found.stderr.splitlines() if "exp.service" in line] == []


class Metadata(http.server.BaseHTTPRequestHandler):
    """The part of the metadata service of AWS that tells of an interruption."""

    is_taken = False

    def do_PUT(self) -> None:
        self._answer(200 if self.path == "/latest/api/token" else 404, b"token-17")

    def do_GET(self) -> None:
        is_known = self.headers["X-aws-ec2-metadata-token"] == "token-17"
        is_there = self.is_taken and self.path == "/latest/meta-data/spot/instance-action"
        self._answer(401 if not is_known else 200 if is_there else 404, b'{"action": "terminate"}')

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Metadata]]:
    """A metadata service that the training's machine asks."""
    monkeypatch.setattr(Metadata, "is_taken", False)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", address)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield Metadata
        server.shutdown()
        thread.join()


@pytest.mark.heavy
def test_a_notice_of_aws_ends_the_training_in_good_order(
    tmp_path: Path, straight: Callable[[int], Path], metadata: type[Metadata], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path / "exp")
    (folder / "watch.py").write_text(blocks("spot.md", "py")[0])
    watch = one("spot.md", r"^`ExecStart=(\S+ watch.py .*)`\.$")
    command = watch.replace("/srv/exp/.venv/bin/", "").replace(".venv/bin/", "").split()
    job = start(folder, command, pause=0.3)
    with ended(job, list):
        until_trained(folder, 3, job)
        metadata.is_taken = True
        assert job.wait(LIMIT) == 128 + signal.SIGTERM
    monkeypatch.setattr(metadata, "is_taken", False)
    assert start(folder, command).wait(LIMIT) == 0

    check_same_end(folder, straight(1), 1)


def stored(folder: Path, page_block: str, puts: dict[str, str]) -> list[str]:
    """Return the command that runs a script of the page, with what is meant in place of its examples."""
    make(folder)
    for example, meant in puts.items():
        assert example in page_block
        page_block = page_block.replace(example, meant)
    # A shell that waited for the training would end before it
    return ["bash", "-euc", page_block.replace("\npython", "\nexec python")]


def check_it_goes_on_elsewhere(folder: Path, command: list[str], straight: Path) -> None:
    """Stop a training twice and take its run directory away each time: it ends as one left alone."""
    for count in (3, 9):
        job = start(folder, command, pause=0.1)
        with ended(job, list):
            until_trained(folder, count, job)
            job.send_signal(signal.SIGTERM)
            assert job.wait(LIMIT) == 128 + signal.SIGTERM, (folder / "output").read_text()
        shutil.rmtree(folder / "runs")
    assert start(folder, command).wait(LIMIT) == 0, (folder / "output").read_text()

    check_same_end(folder, straight, 1)
    printed = (folder / "output").read_text()
    assert len(re.findall(r"^pulled checkpoint \d+ from ", printed, re.MULTILINE)) == 2
    assert "Warning" not in printed


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory of the test's own, and no credentials but those that it has."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "RESUMABLE_", "SSH_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.mark.heavy
def test_a_profile_is_all_that_a_training_needs_for_s3(
    tmp_path: Path, at_home: Path, s3: S3, straight: Callable[[int], Path]
) -> None:
    script, _, _ = blocks("remotes.md", "bash")
    (at_home / ".aws").mkdir()
    keys = f"aws_access_key_id = {s3.key}\naws_secret_access_key = {s3.secret}\n"
    (at_home / ".aws/credentials").write_text(f"[training]\n{keys}")
    (at_home / ".aws/config").write_text(f"[profile training]\nendpoint_url = {s3.endpoint}\n")
    command = stored(tmp_path / "exp", script, {"s3://bucket/": f"s3://{s3.bucket()}/"})

    check_it_goes_on_elsewhere(tmp_path / "exp", command, straight(1))


@pytest.mark.nightly
def test_an_endpoint_and_a_key_are_enough_for_another_s3_server(
    tmp_path: Path, at_home: Path, s3: S3, straight: Callable[[int], Path]
) -> None:
    _, script, _ = blocks("remotes.md", "bash")
    (at_home / ".minio-secret").write_text(s3.secret)
    examples = {"https://minio.example.com:9000": s3.endpoint, "ID=training": f"ID={s3.key}"}
    command = stored(tmp_path / "exp", script, {**examples, "s3://bucket/": f"s3://{s3.bucket()}/"})

    check_it_goes_on_elsewhere(tmp_path / "exp", command, straight(1))


def add_host(home: Path, server: Sftp) -> None:
    """Write the host of the page to ~/.ssh/config."""
    (text,) = blocks("remotes.md", "text")
    meant = {
        "backup.example.com": "127.0.0.1",
        "Port 22": f"Port {server.port}",
        "User ann": f"User {server.user}",
        "~/.ssh/id_ed25519": str(server.private_key),
    }
    for example, real in meant.items():
        assert example in text
        text = text.replace(example, real)
    (home / ".ssh").mkdir()
    (home / ".ssh/config").write_text(text)


@pytest.mark.heavy
def test_a_host_of_the_ssh_config_is_all_that_a_training_needs_for_sftp(
    tmp_path: Path, at_home: Path, sftp: Sftp, straight: Callable[[int], Path]
) -> None:
    pytest.importorskip("sshfs")
    add_host(at_home, sftp)
    script = blocks("remotes.md", "bash")[2]
    command = stored(tmp_path / "exp", script, {"/srv/runs/exp": f"{sftp.folder}/{tmp_path.name}"})

    check_it_goes_on_elsewhere(tmp_path / "exp", command, straight(1))


@pytest.mark.parametrize("is_known", [True, False])
def test_a_server_that_is_not_among_the_known_ones_is_refused(
    tmp_path: Path, at_home: Path, sftp: Sftp, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    pytest.importorskip("sshfs")
    add_host(at_home, sftp)
    kind, key, *_ = (sftp.private_key.parent / ("host.pub" if is_known else "user.pub")).read_text().split()
    (at_home / ".ssh/known_hosts").write_text(f"[127.0.0.1]:{sftp.port} {kind} {key}\n")
    (block,) = blocks("remotes.md", "py")
    block = block.replace("/srv/runs/exp", f"{sftp.folder}/{tmp_path.name}")
    monkeypatch.chdir(tmp_path)
    model, optimizer, _ = make_parts()
    names: dict[str, Any] = {"RunState": RunState, "model": model, "optimizer": optimizer}

    with contextlib.nullcontext() if is_known else pytest.raises(RemoteError, match=r"(?i)host key"):
        exec(compile(block, "block", "exec"), names)
        names["state"].save()
        names["state"].close()

    assert (sftp.folder / tmp_path.name).exists() == is_known


def action(request: Request) -> str:
    """Return what S3 calls the permission that a request needs."""
    path, _, query = request.path.partition("?")
    is_of_bucket = "/" not in path.strip("/")
    if is_of_bucket:
        return "s3:ListBucketMultipartUploads" if "uploads" in query.split("&") else "s3:ListBucket"
    if request.method == "DELETE":
        return "s3:AbortMultipartUpload" if "uploadId" in query else "s3:DeleteObject"
    return {"GET": "s3:GetObject", "HEAD": "s3:GetObject"}.get(request.method, "s3:PutObject")


@pytest.mark.heavy
def test_a_training_asks_for_nothing_that_the_policy_does_not_allow(
    run_dir: Path, at_home: Path, proxied_s3: ProxiedS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = proxied_s3.bucket()
    # What a killed upload leaves
    proxied_s3.admin.create_multipart_upload(Bucket=bucket, Key="exp/checkpoints/000001-step-00000001/a")
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxied_s3.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", proxied_s3.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", proxied_s3.secret)
    frozen = nn.Linear(600, 600).requires_grad_(False)
    # More than two parts of it are trained, so that it is sent in parts
    model = nn.Sequential(frozen, nn.Linear(600, 8000))
    for number in (1, 2, 3):
        with RunState.load(run_dir, model=model, remote=Remote(f"s3://{bucket}/exp", keep=1)) as state:
            assert state.resumed == (number > 1)
            state.save()
        shutil.rmtree(run_dir)
    used = {action(request) for request in proxied_s3.proxy.seen.requests}

    policy = json.loads(blocks("remotes.md", "json")[0])
    on_files, on_bucket = policy["Statement"]
    assert used == {*on_files["Action"], *on_bucket["Action"]}
    assert {name for name in used if "List" in name} == {*on_bucket["Action"]}
    assert all(
        request.path.strip("/").partition("?")[0] == bucket or request.path.startswith(f"/{bucket}/exp/")
        for request in proxied_s3.proxy.seen.requests
    )


@pytest.mark.heavy
def test_a_wrong_secret_is_reported_as_on_the_page(
    run_dir: Path, at_home: Path, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = s3.bucket()
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    line = one("remotes.md", r"^ResumableWarning: (s3://bucket/exp/.*)$")
    pattern = re.escape(line.replace("bucket", bucket)).replace(re.escape("Access Denied"), ".*")
    with RunState.load(run_dir, model=nn.Linear(2, 2)) as state:
        state.save()

    with pytest.warns(ResumableWarning) as told, pytest.raises(RemoteError, match="checkpoint 1 of"):
        RunState.load(run_dir, model=nn.Linear(2, 2), remote=f"s3://{bucket}/exp").close()

    texts = [str(one.message) for one in told]
    assert [text for text in texts if re.fullmatch(pattern, text)]
    assert "not-the-secret" not in "".join(texts)


@pytest.mark.heavy
def test_the_rule_for_killed_uploads_is_one_that_s3_takes(s3: S3) -> None:
    rule = json.loads(blocks("remotes.md", "json")[1])

    s3.admin.put_bucket_lifecycle_configuration(Bucket=s3.bucket(), LifecycleConfiguration=rule)


def test_each_extra_of_the_page_is_one_of_the_project() -> None:
    toml = (ROOT / "pyproject.toml").read_text()
    named = set(re.findall(r"/path/to/clone\[(\w+)\]", (PAGES / "remotes.md").read_text()))

    assert named == {"s3", "gcs", "azure", "sftp", "hf"}
    assert all(re.search(rf"^{name} = \[", toml, re.MULTILINE) for name in named)
