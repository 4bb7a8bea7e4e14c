"""Curves of trainings that were killed or went back: each step is there once, with its value.

The scripts are the blocks and the lines on the page, run in forks of a process that has the tracker.
"""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from forks import Forks
from places import DOCS

from resumable import Run

Curves = dict[str, list[tuple[int, float]]]

PAGE = DOCS / "integrations/trackers.md"
MODULES = {
    "TensorBoard": "torch.utils.tensorboard",
    "W&B": "wandb",
    "MLflow": "mlflow",
    "Trackio": "trackio",
}

BEFORE = """
import os
import signal
import sys

import torch
import MODULE
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

when, at, shift, back_to = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)
torch.manual_seed(0)
data = TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
loader = DataLoader(data, batch_size=4, shuffle=True)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def train(x, y):
    if (when, at) == ("batch", state.step):
        state.wait()
        die()
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach() + shift


@torch.no_grad()
def evaluate():
    if (when, at) == ("save", state.step):
        state.wait()
        os.fsync = die
    model.eval()
    error = nn.functional.mse_loss(model(data.tensors[0]), data.tensors[1])
    model.train()
    return shift - error.item()
"""
GO_BACK = "if back_to:\n    state.restore(back_to)"


class Training:
    """The blocks of the page with the line of one tracker, as a script in a folder."""

    def __init__(self, tracker: str, script: Path, folder: Path, forks: Forks) -> None:
        self.tracker, self.script, self.folder, self._forks = tracker, script, folder, forks

    def start(
        self, when: str = "never", at: int = 0, *, back_to: int | None = None, shift: float = 0
    ) -> None:
        """Run to the end, or until the process kills itself, in a batch or a save after `at` steps.

        `back_to`: go back to the checkpoint after that many steps first; `shift` is added to what is logged.
        """
        command = [self.script, when, at, shift, self._number(back_to) if back_to else 0]
        environment = {"WANDB_SILENT": "true", "TRACKIO_DIR": str(self.folder / "trackio")}
        environment["MLFLOW_TRACKING_URI"] = f"file:{self.folder / 'mlruns'}"
        environment["MLFLOW_ALLOW_FILE_STORE"] = "true"
        life = self._forks.preload(str(self.script)).run(command, self.folder, environment=environment)
        assert life.code == (0 if when == "never" else -signal.SIGKILL), life.err

    def checkpoints(self) -> list[tuple[int, int]]:
        """Return the numbers and the steps of the checkpoints, all of which are intact."""
        found = Run(self.folder / "runs/exp").checkpoints()
        for checkpoint in found:
            checkpoint.verify()
        return [(checkpoint.about.number, checkpoint.about.step) for checkpoint in found]

    def _number(self, at: int) -> int:
        return next(number for number, step in self.checkpoints() if step == at)

    def curves(self) -> Curves:
        """Return what a reader of the tracker's files finds in the run that was ended last."""
        return READERS[self.tracker](self.folder)


def script(tracker: str) -> str:
    """Return the script of the page for one tracker."""
    page = PAGE.read_text()
    begins, loops = re.findall(r"^```py\n(.*?)^```", page, re.S | re.M)
    (line,) = re.findall(rf"^\| {re.escape(tracker)} \| `(tracker = .*?)` \|", page, re.M)
    # Saves stay, for going back to any of them.
    begins = begins.replace("every=3", "every=3, keep=None")
    # Trackio reads its folder as it is imported, which a fork of a process that has imported it does not.
    module = "torch" if tracker == "Trackio" else MODULES[tracker]
    return "\n".join([BEFORE.replace("MODULE", module), begins, line, GO_BACK, loops])


def tensorboard(folder: Path) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "runs/exp/tensorboard")).Reload()
    return {
        tag: [(point.step, point.value) for point in found.Scalars(tag)] for tag in found.Tags()["scalars"]
    }


def wandb(folder: Path) -> Curves:
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = (folder / "runs/exp/wandb/latest-run").glob("*.wandb")
    curves: Curves = {}
    for data in records(path.read_bytes()):
        record = Record.FromString(data)
        row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for name in row.keys() & {"loss", "accuracy"}:
            curves.setdefault(name, []).append((row["_step"], row[name]))
    return curves


def records(data: bytes, block: int = 32768) -> list[bytes]:
    """Return what is in a log of LevelDB's form: blocks, records in one or more pieces."""
    found, at = [b""], 7
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        found[-1] += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            found.append(b"")
    return found[:-1]


def mlflow(folder: Path) -> Curves:
    from mlflow import MlflowClient

    client = MlflowClient(f"file:{folder / 'mlruns'}")
    run = max(client.search_runs(["0"]), key=lambda run: run.info.end_time or 0)
    return {
        name: [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }


def trackio(folder: Path) -> Curves:
    program = """
import json
from trackio.sqlite_storage import SQLiteStorage
runs = [SQLiteStorage.get_logs("exp", run["name"], run_id=run["id"]) for run in
        SQLiteStorage.get_run_records("exp")]
print(json.dumps(max(runs, key=lambda rows: max(row["timestamp"] for row in rows))))
"""
    env = {**os.environ, "TRACKIO_DIR": str(folder / "trackio")}
    found = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
    curves: Curves = {}
    for row in json.loads(found.stdout):
        for name in row.keys() & {"loss", "accuracy"}:
            curves.setdefault(name, []).append((row["step"], row[name]))
    return curves


READERS = {"TensorBoard": tensorboard, "W&B": wandb, "MLflow": mlflow, "Trackio": trackio}


@pytest.fixture(autouse=True)
def _files_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


@pytest.fixture(
    scope="module",
    params=[pytest.param(tracker, marks=pytest.mark.heavy) for tracker in READERS],
)
def straight(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, forks: Forks
) -> Training:
    """A training that nothing has happened to."""
    pytest.importorskip(MODULES[request.param])
    folder = tmp_path_factory.mktemp("straight")
    (folder / "train.py").write_text(script(request.param))
    training = Training(request.param, folder / "train.py", folder, forks)
    training.start()
    return training


def killed(straight: Training, folder: Path, *kills: tuple[str, int]) -> Training:
    training = Training(straight.tracker, straight.script, folder, straight._forks)
    for when, at in kills:
        training.start(when, at)
    return training


def test_a_curve_has_each_step_once_however_often_the_training_was_killed(
    straight: Training, tmp_path: Path
) -> None:
    training = killed(straight, tmp_path, ("batch", 2), ("batch", 5), ("save", 12), ("batch", 14))

    training.start()

    assert [step for step, _ in training.curves()["loss"]] == [*range(1, 19)]
    assert [step for step, _ in training.curves()["accuracy"]] == [6, 12, 18]
    assert training.curves() == straight.curves()
    assert {step for _, step in training.checkpoints()} == {step for _, step in straight.checkpoints()}


def test_a_curve_that_went_back_continues_with_the_new_values(straight: Training, tmp_path: Path) -> None:
    training = killed(straight, tmp_path, ("batch", 14))
    training.start("batch", 14, back_to=9, shift=1)
    training.start(shift=1)

    for name, at in (("loss", 9), ("accuracy", 1)):
        old, new = straight.curves()[name], training.curves()[name]
        assert new[:at] == old[:at]
        assert new[at:] == [(step, pytest.approx(value + 1)) for step, value in old[at:]]


def test_a_kill_before_the_first_save_of_a_branch_leaves_no_trace(straight: Training, tmp_path: Path) -> None:
    training = killed(straight, tmp_path, ("batch", 14))
    training.start("batch", 11, back_to=9, shift=1)
    training.start()

    assert training.curves() == straight.curves()
