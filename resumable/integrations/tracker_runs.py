"""The runs of TensorBoard, W&B, MLflow and Trackio, and what each lacks after a resume."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from ..errors import UsageError, warn
from .curves import Curves, Row


class Place(ABC):
    """Where the rows go: a run of one tracker."""

    run: Any = None
    ours: AbstractSet[str] = frozenset()
    """The arguments of the tracker's function that it is given here."""

    def __init__(self, curves: Curves, run_id: str, folder: Path, init: Mapping[str, Any]) -> None:
        self._curves, self._run_id, self._folder, self._init = curves, run_id, folder, dict(init)
        self._known: dict[tuple[str, int], deque[float]] = {}
        """The values that the tracker's run has and cannot forget, and that were not logged again yet."""

    @abstractmethod
    def begin(self, step: int) -> None:
        """Open the tracker's run, which may have other values from this step on; log what it lacks."""

    def begin_branch(self, step: int) -> None:
        """Open another run for rows that are not those of the last one, and log all of them there."""
        raise NotImplementedError

    def log(self, step: int, values: Mapping[str, float]) -> bool:
        """Log what the tracker's run lacks of a row; return False if it has other values there."""
        lacking, is_same = self._compare(step, values)
        if lacking:
            self._send([(step, lacking)])
        return is_same

    def _compare(self, step: int, values: Mapping[str, float]) -> tuple[dict[str, float], bool]:
        """Return what the tracker's run lacks of a row, and whether it has the same of the rest."""
        lacking, is_same = {}, True
        for name, value in values.items():
            if known := self._known.get((name, step)):
                is_same &= _is_same(known.popleft(), value)
                if not known:
                    del self._known[name, step]
            else:
                lacking[name] = value
        return lacking, is_same

    def _log_again(self) -> None:
        """Log the rows that lead here, where the tracker's run lacks them."""
        found = ((step, self._compare(step, values)[0]) for step, values in self._curves.rows())
        self._send([(step, lacking) for step, lacking in found if lacking])

    def _know(self, values: Iterable[tuple[str, int, float]]) -> None:
        self._known.clear()
        for name, step, value in values:
            self._known.setdefault((name, step), deque()).append(value)

    @abstractmethod
    def _send(self, rows: list[Row]) -> None:
        """Log rows."""

    def flush(self) -> None:  # noqa: B027
        """Hand what was logged to the operating system, where the tracker cannot be given it again."""

    @abstractmethod
    def end(self) -> None:
        """Close the tracker's run."""


def _is_same(known: float, value: float) -> bool:
    return known == value or (math.isnan(known) and math.isnan(value))


class _TensorBoard(Place):
    """Event files in one folder; a newer one hides what older ones have from a step on."""

    ours = frozenset({"purge_step"})

    def begin(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(self._init.get("log_dir") or self._folder / "tensorboard")
        files = [*folder.glob("events.out.tfevents.*")]
        _wait_to_follow(files)
        start = step if files else 0
        self.run = SummaryWriter(**{**self._init, "log_dir": folder, "purge_step": start})
        self._send([row for row in self._curves.rows() if row[0] >= start])

    def _send(self, rows: list[Row]) -> None:
        for step, values in rows:
            for name, value in values.items():
                self.run.add_scalar(name, value, step)

    def flush(self) -> None:
        self.run.flush()

    def end(self) -> None:
        self.run.close()


def _wait_to_follow(files: Iterable[Path], patience: int = 5) -> None:
    # Readers take the files in the order of their names, which begin with the second.
    newest = max((int(events.name.split(".")[3]) for events in files), default=0)
    if (ahead := newest - int(time.time())) > patience:
        warn(
            f"an event file of TensorBoard was begun {ahead} s in the future, by the clock of this machine: "
            "readers take it for the newest, and hide the steps that are logged now. Set the clocks of the "
            "machines to the same time."
        )
        return
    while int(time.time()) <= newest:
        time.sleep(0.01)


class _Named(Place):
    """A run whose name is chosen here."""

    def begin(self, step: int) -> None:
        self._begin(self._curves.run or self._run_id)

    def begin_branch(self, step: int) -> None:
        name = f"{self._run_id}-{self._curves.next_number()}"
        self._curves.branch(step, name)
        self._begin(name)

    @abstractmethod
    def _begin(self, name: str) -> None:
        """Open the run of this name, and log what it lacks."""

    def _send(self, rows: list[Row]) -> None:
        for step, values in rows:
            self.run.log(values, step=step)

    def end(self) -> None:
        self.run.finish()


class _Wandb(_Named):
    """A run of W&B: offline, each start makes a folder of its own, which gets the whole curve."""

    ours = frozenset({"id", "resume"})

    def _begin(self, name: str) -> None:
        import wandb

        self.run = wandb.init(**{"dir": self._folder, **self._init, "id": name, "resume": "allow"})
        # Online, it ignores steps before its own.
        first = self.run.step
        sent = self._curves.all_of(name, unnamed=self._run_id)
        self._know((key, at, value) for at, row in sent if at < first for key, value in row.items())
        self._log_again()


class _Mlflow(Place):
    """A run of MLflow, which can forget nothing: it gets what it lacks."""

    ours = frozenset({"run_id"})

    def begin(self, step: int) -> None:
        self._begin(self._curves.run, step)

    def begin_branch(self, step: int) -> None:
        self._begin(None, step)

    def _begin(self, name: str | None, step: int) -> None:
        import mlflow

        given = {**self._init, "tags": {"resumable.run_id": self._run_id, **(self._init.get("tags") or {})}}
        self.run = mlflow.start_run(**{**given, "run_id": name})
        self._client, self._id = mlflow.MlflowClient(), self.run.info.run_id
        if name is None:
            # At once: a kill before the first save must not lose it.
            self._curves.branch(step, self._id)
        self._know(
            (key, point.step, point.value)
            for key in self.run.data.metrics
            for point in self._client.get_metric_history(self._id, key)
        )
        self._log_again()

    def _send(self, rows: list[Row]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        found = [Metric(name, value, now, step) for step, values in rows for name, value in values.items()]
        # No request may have more.
        for begin in range(0, len(found), 1000):
            self._client.log_batch(self._id, metrics=found[begin : begin + 1000])

    def end(self) -> None:
        import mlflow

        if (active := mlflow.active_run()) and active.info.run_id == self._id:
            mlflow.end_run()
        else:
            self._client.set_terminated(self._id)


class _Trackio(_Named):
    """A run in Trackio's local database, which can forget nothing: it gets what it lacks."""

    ours = frozenset({"name", "resume"})

    def _begin(self, name: str) -> None:
        import trackio

        given = {"project": self._folder.name, **self._init, "name": name, "resume": "allow"}
        self.run = trackio.init(**given)
        self._know(_logged_in_trackio(self.run))
        self._log_again()


def _logged_in_trackio(run: Any) -> list[tuple[str, int, float]]:
    """Return the values of a run. Trackio has no public function for it."""
    from trackio.sqlite_storage import SQLiteStorage

    if not run._is_local:
        run.finish()
        raise UsageError(
            "track() cannot ask a Space or a server of Trackio which steps it has.",
            fix="log to the local database, without space_id= and server_url=, and upload it afterwards with "
            "trackio.sync().",
        )
    logs = SQLiteStorage.get_logs(run.project, run.name, run_id=run.id)
    found = [(key, row["step"], value) for row in logs for key, value in row.items()]
    # A script logs texts, tables and images there too, by `tracker.run`.
    return [one for one in found if one[0] not in ("step", "timestamp") and isinstance(one[2], (int, float))]


PLACES: dict[str, type[Place]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "mlflow": _Mlflow,
    "trackio": _Trackio,
}
