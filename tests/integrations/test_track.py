"""What was logged, as TensorBoard's own reader finds it; the other trackers are in tests/docs."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from inspect import getsource, signature
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gloo
import pytest
import torch
from forks import Forks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import Run, RunState, UsageError
from resumable.files import jsonl
from resumable.integrations.curves import Curves
from resumable.integrations.trackers import track

pytest.importorskip("tensorboard")

Points = list[tuple[int, float]]


class Stop(Exception):
    pass


def train(
    run: Path,
    stop: int | None = None,
    *,
    to: str = "tensorboard",
    shift: float = 0,
    first: Callable[[RunState], None] | None = None,
    is_killed: bool = False,
) -> None:
    """Log each batch and the metric of each epoch, and stop after so many steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(TensorDataset(torch.randn(8, 4)), 2, shuffle=True)
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    with RunState.load(run, **parts, every=2, keep=None, minimize="error") as state:
        tracker = track(state, to)
        if first:
            first(state)
        for _ in state.epochs(3):
            for (x,) in state.batches():
                if state.step == stop:
                    state.wait()
                    if is_killed:
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise Stop
                loss = model(x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                tracker.log({"train/loss": loss.detach() + shift})
            state.save(error=model(x).sum().detach() + shift)


def killed(run: Path, stop: int) -> None:
    """Train in a fork, which is killed with SIGKILL after so many steps."""
    if (child := os.fork()) == 0:
        try:
            train(run, stop, is_killed=True)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def curves(run: Path) -> dict[str, Points]:
    """Return what TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run / "tensorboard")).Reload()
    tags = found.Tags()["scalars"]
    return {tag: [(point.step, point.value) for point in found.Scalars(tag)] for tag in tags}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Points]:
    run = tmp_path_factory.mktemp("straight") / "runs/exp"
    train(run)
    return curves(run)


# Before the first save, in mid-epoch, at the last batch of an epoch, at its end
@pytest.mark.quick(4)
@pytest.mark.parametrize("stops", [(1, 3), (3, 4), (4, 8), (7, 7)], ids=str)
def test_each_step_is_there_once_after_two_resumes(
    stops: tuple[int, ...], straight: dict[str, Points], run_dir: Path
) -> None:
    for stop in stops:
        with pytest.raises(Stop):
            train(run_dir, stop)

    train(run_dir)

    assert [step for step, _ in straight["train/loss"]] == [*range(1, 13)]
    assert [step for step, _ in straight["error"]] == [4, 8, 12]
    assert curves(run_dir) == straight


def test_going_back_continues_the_curve_from_there(straight: dict[str, Points], run_dir: Path) -> None:
    with pytest.raises(Stop):
        train(run_dir, 9)
    back = Run(run_dir).checkpoints()[1].about

    train(run_dir, shift=1, first=lambda state: state.restore(back.number))

    for name, points in curves(run_dir).items():
        known = [point for point in straight[name] if point[0] <= back.step]
        new = [point for point in straight[name] if point[0] > back.step]
        assert points == [*known, *((step, pytest.approx(value + 1)) for step, value in new)]


@pytest.mark.heavy
def test_a_branch_that_was_never_saved_is_not_in_the_curve(
    straight: dict[str, Points], run_dir: Path
) -> None:
    with pytest.raises(Stop):
        train(run_dir, 9)
    with pytest.raises(Stop):
        train(run_dir, 3, shift=1, first=lambda state: state.restore(1))

    train(run_dir)

    assert curves(run_dir) == straight


def test_a_resume_from_an_older_checkpoint_drops_what_was_logged_since(
    straight: dict[str, Points], run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Stop):
        train(run_dir, 9)

    monkeypatch.setenv("RESUMABLE_RESUME", "1")
    with pytest.raises(Stop):
        train(run_dir, 3)

    assert [step for step, _ in curves(run_dir)["train/loss"]] == [1, 2, 3]
    monkeypatch.setenv("RESUMABLE_RESUME", "auto")
    train(run_dir)
    assert curves(run_dir) == straight


def test_a_lost_folder_of_tensorboard_is_written_again(straight: dict[str, Points], run_dir: Path) -> None:
    with pytest.raises(Stop):
        train(run_dir, 7)
    (run_dir / "tensorboard").rename(run_dir / "elsewhere")

    train(run_dir)

    assert curves(run_dir) == straight


def test_a_lost_log_is_warned_of_and_the_curve_continues(run_dir: Path) -> None:
    with pytest.raises(Stop):
        train(run_dir, 7)
    (run_dir / "tensorboard.jsonl").unlink()

    with pytest.warns(UserWarning, match=r"no tensorboard.jsonl, or not all of it.* before step 6 is not"):
        train(run_dir)

    assert [step for step, _ in curves(run_dir)["train/loss"]] == [*range(1, 13)]


def test_several_values_of_one_step_stay_in_order(run_dir: Path) -> None:
    for stop in (3, None):
        with suppress(Stop), RunState.load(run_dir, every=1) as state:
            tracker = track(state, "tensorboard")
            for step in state.steps(4):
                if step == stop:
                    raise Stop
                for part in range(3):
                    tracker.log(loss=step + part / 4)

    assert curves(run_dir)["loss"] == [(step + 1, step + part / 4) for step in range(4) for part in range(3)]


def test_a_metric_that_the_script_logs_itself_is_there_once(run_dir: Path) -> None:
    with RunState.load(run_dir) as state:
        tracker = track(state, "tensorboard")
        for step in state.steps(2):
            tracker.log(loss=step)
            state.save(loss=step, accuracy=step / 2)

    assert curves(run_dir) == {"loss": [(1, 0.0), (2, 1.0)], "accuracy": [(1, 0.0), (2, 0.5)]}


def test_a_row_is_durable_before_the_checkpoint_that_has_it(run_dir: Path) -> None:
    with RunState.load(run_dir) as state:
        tracker = track(state, "tensorboard")
        for step in state.steps(2):
            tracker.log(loss=step)
            seen = Curves(run_dir / "tensorboard.jsonl", step).rows()
            state.save()
            assert Curves(run_dir / "tensorboard.jsonl", step + 1).rows() == [
                *seen,
                (step + 1, {"loss": step}),
            ]


def test_nan_and_infinity_come_back(tmp_path: Path) -> None:
    log = Curves(tmp_path / "log.jsonl", 0)
    log.add(1, {"a": float("inf"), "b": float("-inf"), "c": 0.1})
    end = log.write()

    assert Curves(tmp_path / "log.jsonl", end).rows() == log.rows()


def test_what_is_no_number_is_refused(run_dir: Path) -> None:
    with RunState.load(run_dir) as state:
        tracker = track(state, "tensorboard")
        with pytest.raises(UsageError, match=r"loss is not a number: 'low'[\s\S]*tracker\.run"):
            tracker.log(loss="low")


def test_another_tracker_and_a_second_one_are_refused(run_dir: Path) -> None:
    with RunState.load(run_dir) as state:
        with pytest.raises(UsageError, match="say one of tensorboard, wandb, mlflow, trackio"):
            track(state, "comet")
        track(state, "tensorboard")
        with pytest.raises(UsageError, match="tracked already"):
            track(state, "tensorboard")


def test_an_error_of_the_tracker_is_raised_as_it_is(run_dir: Path) -> None:
    with RunState.load(run_dir) as state, pytest.raises(TypeError, match="unexpected keyword"):
        track(state, "tensorboard", nonsense=1)


def test_no_tracker_is_imported_unless_asked_for(forks: Forks, tmp_path: Path) -> None:
    program = "import sys, resumable.integrations.trackers; print(*sys.modules)"
    found = forks.run(["-c", program], tmp_path).checked().out

    assert {"wandb", "mlflow", "trackio", "tensorboard"}.isdisjoint(found.split())


def test_a_kill_leaves_what_a_stop_leaves(straight: dict[str, Points], run_dir: Path) -> None:
    for stop in (3, 5):
        killed(run_dir, stop)

    train(run_dir)

    assert curves(run_dir) == straight


def _log_on_all(rank: int, run: Path) -> bool:
    for stop in (3, None):
        with suppress(Stop), RunState.load(run, every=2) as state:
            tracker = track(state, "tensorboard")
            for step in state.steps(4):
                if step == stop:
                    raise Stop
                tracker.log(loss=step + 10 * rank)
                state.save(metric=step) if step == 1 else None
    return tracker.run is None


@pytest.mark.heavy
def test_of_several_processes_the_first_one_logs(run_dir: Path) -> None:
    ended = gloo.run(2, _log_on_all, run_dir, folder=run_dir.parent)

    assert [one.value for one in ended] == [False, True]
    assert curves(run_dir)["loss"] == [(1, 0.0), (2, 1.0), (3, 2.0), (4, 3.0)]


@pytest.fixture
def mlruns(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of MLflow's local files."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file:{run_dir.parent / 'mlruns'}")
    return mlflow.MlflowClient()


@pytest.mark.usefixtures("mlruns")
def test_a_tracker_moves_no_random_generator(run_dir: Path) -> None:
    with RunState.load(run_dir) as state:
        then = random.getstate()
        track(state, "mlflow")
        assert random.getstate() == then


class Online:
    """Stands in for W&B online: it ignores steps before its own, and knows its runs again by their id."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs: dict[str, dict[int, dict[str, float]]] = {}
        module = ModuleType("wandb")
        module.init = self.init  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "wandb", module)

    def init(self, *, id: str, resume: str, dir: Path) -> Any:
        rows = self.runs.setdefault(id, {})
        first = max(rows, default=-1) + 1

        def log(values: dict[str, float], step: int) -> None:
            if step >= max(rows, default=0):
                rows.setdefault(step, {}).update(values)

        return SimpleNamespace(step=first, log=log, finish=lambda: None)

    def curve(self, name: str) -> list[Points]:
        """Return the values of each run."""
        return [[(at, row[name]) for at, row in rows.items() if name in row] for rows in self.runs.values()]


def test_a_run_of_wandb_online_continues_where_its_server_is(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, online = Online(monkeypatch), Online(monkeypatch)
    for stop in (1, 5, 7):
        with pytest.raises(Stop):
            train(run_dir, stop, to="wandb")
    train(run_dir, to="wandb")
    monkeypatch.setattr(sys.modules["wandb"], "init", straight.init)
    train(tmp_path / "straight", to="wandb")

    assert [len(points) for points in online.curve("train/loss")] == [12]
    assert [*online.runs.values()] == [*straight.runs.values()]


def test_going_back_begins_another_run_of_wandb_online(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    online = Online(monkeypatch)
    with pytest.raises(Stop):
        train(run_dir, 9, to="wandb")
    with pytest.raises(Stop):
        train(run_dir, 7, to="wandb", shift=1, first=lambda state: state.restore(2))
    train(run_dir, to="wandb", shift=1)

    old, new = online.curve("train/loss")
    assert [step for step, _ in old] == [*range(1, 10)]
    assert [step for step, _ in new] == [*range(1, 13)]
    assert new[:4] == old[:4]
    assert [value for _, value in new[4:9]] == [pytest.approx(value + 1) for _, value in old[4:9]]


def test_trackio_has_the_private_names_that_are_used() -> None:
    trackio = pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    assert {"project", "run", "run_id"} <= signature(SQLiteStorage.get_logs).parameters.keys()
    assert "self._is_local = " in getsource(trackio.Run)


def test_a_timing_that_differs_is_logged_once_and_begins_no_other_run(run_dir: Path, mlruns: Any) -> None:
    for stop in (3, 5, None):
        with suppress(Stop), RunState.load(run_dir, every=2) as state:
            tracker = track(state, "mlflow")
            for step in state.steps(6):
                if step == stop:
                    state.wait()
                    raise Stop
                tracker.log(seconds=time.perf_counter(), loss=step)

    (only,) = mlruns.search_runs(["0"])
    for name in ("seconds", "loss"):
        points = mlruns.get_metric_history(only.info.run_id, name)
        assert [point.step for point in points] == [*range(1, 7)]


def test_a_resume_from_an_older_checkpoint_begins_another_run_for_other_values(
    run_dir: Path, mlruns: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for shift, resume in ((0, "auto"), (1, "1"), (1, "auto")):
        monkeypatch.setenv("RESUMABLE_RESUME", resume)
        with RunState.load(run_dir, every=2, keep=None) as state:
            tracker = track(state, "mlflow")
            for step in state.steps(8 if (shift, resume) == (1, "auto") else 6):
                tracker.log(loss=step + shift)

    new, old = mlruns.search_runs(["0"])
    found = [mlruns.get_metric_history(one.info.run_id, "loss") for one in (old, new)]
    assert [point.value for point in found[0]] == [*range(6)]
    assert [point.value for point in found[1]] == [0, 1, *range(3, 9)]


def test_what_trackio_has_of_texts_and_histograms_does_not_stop_a_resume(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trackio = pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    for name in [name for name in sys.modules if name.startswith("trackio.")]:
        # It reads TRACKIO_DIR as it is imported, which another test may have done.
        if hasattr(sys.modules[name], "TRACKIO_DIR"):
            monkeypatch.setattr(sys.modules[name], "TRACKIO_DIR", run_dir.parent / "trackio")
    for stop in (3, None):
        with suppress(Stop), RunState.load(run_dir, every=2) as state:
            tracker = track(state, "trackio", project="exp")
            for step in state.steps(4):
                if step == stop:
                    raise Stop
                tracker.log(loss=step, nan=float("nan"))
                tracker.run.log({"note": "text", "all": trackio.Histogram([1, 2, 3])}, step=state.step)

    run = tracker.run
    rows = SQLiteStorage.get_logs(run.project, run.name, run_id=run.id)
    assert [(row["step"], row["loss"]) for row in rows if "loss" in row] == [(n + 1, n) for n in range(4)]
    assert list(run_dir.parent.glob("trackio/*.db"))


def test_a_log_that_cannot_be_written_is_warned_of_once_and_written_later(run_dir: Path) -> None:
    blocker = run_dir / "tensorboard.jsonl"
    with RunState.load(run_dir) as state:
        tracker = track(state, "tensorboard")
        for step in state.steps(3):
            tracker.log(loss=step)
            if step == 0:
                blocker.mkdir(parents=True)
                with pytest.warns(UserWarning, match="cannot be written, and each save tries it again"):
                    state.save()
            elif step == 2:
                blocker.rmdir()
            state.save()

    assert Curves(blocker, 3).rows() == [(1, {"loss": 0}), (2, {"loss": 1}), (3, {"loss": 2})]


@pytest.mark.filterwarnings("ignore:.*(tensorboard.jsonl cannot be|has no tensorboard.jsonl)")
def test_a_log_that_was_never_written_does_not_stop_a_resume(run_dir: Path) -> None:
    for stop in (3, None):
        with suppress(Stop), RunState.load(run_dir, every=2) as state:
            (run_dir / "tensorboard.jsonl").mkdir(parents=True, exist_ok=True)
            tracker = track(state, "tensorboard")
            for step in state.steps(5):
                if step == stop:
                    raise Stop
                tracker.log(loss=step)

    assert curves(run_dir)["loss"] == [(step + 1, step) for step in range(5)]


def test_a_log_may_be_longer_than_other_files_of_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.jsonl"
    monkeypatch.setattr(jsonl, "_MOST", 100)
    for end in range(20):
        log = Curves(path, end)
        log.add(end, {"loss": end})
        log.write()
        with path.open("ab") as file:
            # What a kill tears off
            file.write(b'{"block": 9, "aft')

    assert path.stat().st_size > 1000
    assert Curves(path, 20).rows() == [(step, {"loss": step}) for step in range(20)]


def test_a_value_that_was_logged_takes_no_memory_after_its_save(run_dir: Path) -> None:
    with RunState.load(run_dir) as state:
        tracker = track(state, "tensorboard")
        for step in state.steps(3):
            tracker.log({f"{number}": number for number in range(1000)})
            if step == 1:
                gc.collect()
                tracemalloc.start()
            state.save()
        gc.collect()
        more, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()

    assert more < 200_000


@pytest.mark.parametrize(
    ("to", "argument"),
    [
        ("tensorboard", "purge_step"),
        ("wandb", "id"),
        ("wandb", "resume"),
        ("mlflow", "run_id"),
        ("trackio", "name"),
        ("trackio", "resume"),
    ],
)
def test_an_argument_that_track_chooses_is_refused(to: str, argument: str, run_dir: Path) -> None:
    with RunState.load(run_dir) as state, pytest.raises(UsageError, match=f"chooses {argument} of {to}"):
        track(state, to, **{argument: "mine"})


def test_nothing_is_logged_after_the_training_has_closed(run_dir: Path) -> None:
    with RunState.load(run_dir) as state:
        tracker = track(state, "tensorboard")

    with pytest.raises(UsageError, match="has been closed"):
        tracker.log(loss=1)
    with pytest.raises(UsageError, match="has been closed"):
        track(state, "wandb")
    del state
    with pytest.raises(UsageError, match="RunState of this tracker is gone"):
        tracker.log(loss=1)


def test_a_file_of_tensorboard_from_the_future_is_warned_of(run_dir: Path) -> None:
    folder = run_dir / "tensorboard"
    folder.mkdir(parents=True)
    (folder / f"events.out.tfevents.{int(time.time()) + 1000}.host.1.0").touch()

    with RunState.load(run_dir) as state, pytest.warns(UserWarning, match=r"begun \d+ s in the future"):
        track(state, "tensorboard")
