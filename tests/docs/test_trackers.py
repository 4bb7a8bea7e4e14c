"""Curves of trainings that were killed or went back: each step is there once, with its value.

The scripts are the blocks on the page; those marked `py` run here, in processes of their own.
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
from places import ROOT

from resumable import Run

Curves = dict[str, list[tuple[int, float]]]

BEFORE = """
import os
import signal
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

when, at, shift = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
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


class Training:
    """The three blocks under a heading of the page, as a script in a folder."""

    def __init__(self, heading: str, folder: Path) -> None:
        page = (ROOT / "docs/recipes/trackers.md").read_text()
        (text,) = (part for part in re.split(r"^## ", page, flags=re.M) if part.startswith(heading))
        self._begins, self._loops, self._goes_back = re.findall(r"^```py\n(.*?)^```", text, re.S | re.M)
        self.heading = heading
        self._folder = folder

    def start(
        self, when: str = "never", at: int = 0, *, back_to: int | None = None, shift: float = 0
    ) -> None:
        """Run to the end, or until the process kills itself, in a batch or a save after `at` steps.

        `back_to`: go back to the checkpoint after that many steps first; `shift` is added to what is logged.
        """
        goes_back = self._goes_back.replace('"best"', str(self._number(back_to))) if back_to else ""
        (self._folder / "train.py").write_text("\n".join([BEFORE, self._begins, goes_back, self._loops]))
        env = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_SILENT": "true", "OMP_NUM_THREADS": "1"}
        # A kill comes before the checkpoint that was the best is pruned, or after it
        told = ["-W", "error", "-W", "ignore:checkpoint 3, the best, is not there any more"]
        told += ["-W", "ignore:save() has waited"]
        command = [sys.executable, *told, "train.py", when, str(at), str(shift)]
        child = subprocess.run(command, cwd=self._folder, env=env, capture_output=True, text=True)
        expected = 0 if when == "never" else -signal.SIGKILL
        assert child.returncode == expected, child.stdout + child.stderr

    def checkpoints(self) -> list[tuple[int, int]]:
        """Return the numbers and the steps of the checkpoints, all of which are intact."""
        found = Run(self._folder / "runs/exp").checkpoints()
        for checkpoint in found:
            checkpoint.verify()
        return [(checkpoint.about.number, checkpoint.about.step) for checkpoint in found]

    def _number(self, at: int) -> int:
        (number,) = (number for number, step in self.checkpoints() if step == at)
        return number

    def curves(self) -> Curves:
        """Return what a reader of the tracker's files finds."""
        return READERS[self.heading](self._folder)


def tensorboard(folder: Path) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves: Curves = {}
    for name in ("steps", "epochs"):
        found = EventAccumulator(str(folder / "runs/exp/tensorboard" / name)).Reload()
        for tag in found.Tags()["scalars"]:
            curves[tag] = [(point.step, point.value) for point in found.Scalars(tag)]
    return curves


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
    """Return the curves of the oldest run, each followed by the next one's from where that begins."""
    whole: Curves = {}
    for curves in mlflow_runs(folder):
        for name, points in curves.items():
            before = [point for point in whole.get(name, []) if point[0] < points[0][0]]
            whole[name] = before + points
    return whole


def mlflow_runs(folder: Path) -> list[Curves]:
    """Return the curves of all runs, the oldest first."""
    from mlflow import MlflowClient

    client = MlflowClient(f"file:{folder / 'mlruns'}")
    (experiment,) = client.search_experiments(filter_string="name = 'exp'")
    return [
        {
            name: [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]
            for name in run.data.metrics
        }
        for run in client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])
    ]


@pytest.fixture(autouse=True)
def _files_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


READERS = {"TensorBoard": tensorboard, "Weights & Biases": wandb, "MLflow": mlflow}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("TensorBoard", marks=pytest.mark.heavy),
        pytest.param("Weights & Biases", marks=pytest.mark.nightly),
        pytest.param("MLflow", marks=pytest.mark.nightly),
    ],
)
def straight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """A training that nothing has happened to."""
    training = Training(request.param, tmp_path_factory.mktemp("straight"))
    training.start()
    return training


def killed(straight: Training, folder: Path, *kills: tuple[str, int]) -> Training:
    training = Training(straight.heading, folder)
    for when, at in kills:
        training.start(when, at)
    return training


def test_a_curve_has_each_step_once_however_often_the_training_was_killed(
    straight: Training, tmp_path: Path
) -> None:
    training = killed(straight, tmp_path, ("batch", 2), ("batch", 5), ("save", 12), ("batch", 14))

    training.start()

    assert [step for step, _ in training.curves()["loss"]] == [*range(1, 19)]
    assert len(training.curves()["accuracy"]) == 3
    assert training.curves() == straight.curves()
    assert training.checkpoints() == straight.checkpoints()


def test_a_curve_that_went_back_continues_with_the_new_values(straight: Training, tmp_path: Path) -> None:
    training = killed(straight, tmp_path, ("batch", 14))
    training.start("batch", 14, back_to=9, shift=1)
    training.start(shift=1)

    for name, at in (("loss", 9), ("accuracy", 1)):
        old, new = straight.curves()[name], training.curves()[name]
        assert new[:at] == old[:at]
        assert new[at:] == [(step, pytest.approx(value + 1)) for step, value in old[at:]]


def test_a_kill_before_the_first_save_on_the_new_way_leaves_no_trace_of_it(
    straight: Training, tmp_path: Path
) -> None:
    training = killed(straight, tmp_path, ("batch", 14))
    training.start("batch", 11, back_to=9, shift=1)
    training.start()

    left = mlflow_runs(tmp_path)[0] if straight.heading == "MLflow" else training.curves()
    assert left == straight.curves()


@pytest.mark.heavy
def test_a_training_that_is_killed_again_and_again_is_one_run_of_mlflow(tmp_path: Path) -> None:
    training = Training("MLflow", tmp_path)
    for when, at in [("batch", 2), ("batch", 4)]:
        training.start(when, at)

    (run,) = mlflow_runs(tmp_path)
    assert [step for step, _ in run["loss"]] == [1, 2, 3, 4]
