"""Continues the curves of TensorBoard, W&B, MLflow or Trackio over resumes, each step once.

>>> from resumable import RunState
>>> from resumable.integrations.trackers import track
>>> with RunState.load("runs/tracked") as state:
...     tracker = track(state, "tensorboard")
...     for step in state.steps(3):
...         tracker.log(loss=1 / (step + 1))
runs/tracked is empty: starting fresh
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .. import options
from ..errors import UsageError, warn
from ..loaders.generators import rng
from ..state import RunState
from .curves import Curves, Row


def track(state: RunState, to: str, **init: Any) -> Tracker:
    """Log to a tracker; `init` goes to its own function that starts a run.

    `to` is "tensorboard" (`SummaryWriter`), "wandb" (`wandb.init`), "mlflow" (`mlflow.start_run`) or
    "trackio" (`trackio.init`). What `state.save` is given is logged too.
    With several processes all of them call it, and rank 0 logs.
    """
    if to not in _PLACES:
        raise UsageError(f"track() knows no {to!r}.", fix=f"say one of {', '.join(_PLACES)}.")
    if state._training.position.logged.has(to):
        raise UsageError(f"{to} is tracked already.", fix="call track() once, and keep what it returns.")
    return Tracker(state, to, init)


class Tracker:
    """Logs values under the step of the training, to rank 0's tracker."""

    def __init__(self, state: RunState, to: str, init: Mapping[str, Any]) -> None:
        training = state._training
        self._name, self._position = to, training.position
        self._place: _Place | None = None
        if not training.crew.is_first:
            return
        logged = self._position.logged
        self._curves = Curves(training.run.path / f"{to}.jsonl", logged.end(to))
        self._restores = logged.restores
        self._newest: dict[str, tuple[int, float]] = {}
        if self._curves.is_lost:
            warn(
                f"{training.run} has no {to}.jsonl, or not all of it, as after a resume from a remote: what "
                f"was logged before step {self._position.step} is not logged again."
            )
        self._place = _PLACES[to](self._curves, str(state.run_id), training.run.path, init)
        self._begin()
        logged.add(to, self)

    @property
    def run(self) -> Any:
        """The tracker's own object, for images, tables and texts: a resume does not log these once only.

        It is a `SummaryWriter`, or a run of W&B, MLflow or Trackio, and another one after the training has
        gone back; None on other ranks than 0.
        """
        return self._place and self._place.run

    def log(self, values: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """Log numbers under the step that the training has done: call it after `optimizer.step()`.

        >>> with RunState.load("runs/logged") as state:
        ...     tracker = track(state, "tensorboard")
        ...     for step in state.steps(2):
        ...         tracker.log({"train/loss": 0.5}, rate=0.1)
        runs/logged is empty: starting fresh
        """
        if self._place is not None:
            self._log(_numbers({**(values or {}), **more}))

    def _log(self, values: dict[str, float]) -> None:
        assert self._place is not None
        self._follow()
        step = self._position.steps_done()
        self._newest.update({name: (step, value) for name, value in values.items()})
        self._curves.add(step, values)
        if not self._place.log(step, values):
            with _without_draws():
                self._place.end()
                self._place.begin_branch(step)

    def _follow(self) -> None:
        """Go back with the training, if it has gone back."""
        logged = self._position.logged
        if self._restores == logged.restores or self._place is None:
            return
        self._restores = logged.restores
        self._place.end()
        self._curves.go_to(logged.end(self._name))
        self._newest.clear()
        self._begin()

    def _begin(self) -> None:
        assert self._place is not None
        with _without_draws():
            self._place.begin(self._curves.begin(self._position.step))

    # As a log of the training.

    def take(self, metrics: Mapping[str, float]) -> None:
        """Log the metrics that a save was given, without those that the script has logged itself."""
        self._follow()
        step = self._position.steps_done()
        news = {name: value for name, value in metrics.items() if self._newest.get(name) != (step, value)}
        if news:
            self._log(news)

    def write(self) -> int:
        """Make what was logged durable, and return the number of the last block."""
        assert self._place is not None
        self._follow()
        self._place.flush()
        return self._curves.write()

    def close(self) -> None:
        """End the tracker's run, as the training closes."""
        if self._place is not None:
            self._place.end()


@contextmanager
def _without_draws() -> Iterator[None]:
    # MLflow draws the name of a run from Python's generator, which the training may use.
    kept = rng.collect(devices=False)
    try:
        yield
    finally:
        rng.restore(kept)


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    try:
        return options.numbers(values)
    except UsageError as exc:
        fix = "log numbers; give all else to the tracker's own object, tracker.run."
        raise UsageError(exc.problem, fix=fix) from exc


class _Place(ABC):
    """Where the rows go: a run of one tracker."""

    run: Any = None

    def __init__(self, curves: Curves, run_id: str, folder: Path, init: Mapping[str, Any]) -> None:
        self._curves, self._run_id, self._folder, self._init = curves, run_id, folder, dict(init)
        self._known: defaultdict[tuple[str, int], deque[float]] = defaultdict(deque)
        """The values that the tracker's run has and cannot forget, and that were not logged again yet."""

    @abstractmethod
    def begin(self, step: int) -> None:
        """Open the tracker's run, which may have other values from this step on; log what it lacks."""

    def begin_branch(self, step: int) -> None:
        """Open another run for rows that are not those of the last one, and log all of them there."""
        raise NotImplementedError

    def log(self, step: int, values: Mapping[str, float]) -> bool:
        """Log what the tracker's run lacks of a row; return False if it has other values there."""
        if (lacking := self._lacking(step, values)) is None:
            return False
        if lacking:
            self._send([(step, lacking)])
        return True

    def _lacking(self, step: int, values: Mapping[str, float]) -> dict[str, float] | None:
        lacking = {}
        for name, value in values.items():
            if not (known := self._known[name, step]):
                lacking[name] = value
            elif not _is_same(known.popleft(), value):
                return None
        return lacking

    def _log_again(self) -> None:
        """Log the rows that lead here, where the tracker's run lacks them."""
        found = ((step, self._lacking(step, values)) for step, values in self._curves.rows())
        self._send([(step, lacking) for step, lacking in found if lacking])

    def _know(self, values: Iterable[tuple[str, int, float]]) -> None:
        self._known.clear()
        for name, step, value in values:
            self._known[name, step].append(value)

    @abstractmethod
    def _send(self, rows: list[Row]) -> None:
        """Log rows."""

    def flush(self) -> None:  # noqa: B027
        """Hand what was logged to the operating system, where the tracker cannot be given it again."""

    @abstractmethod
    def end(self) -> None:
        """Close the tracker's run."""

    def _name(self) -> str:
        return self._curves.run or self._run_id

    def _new_name(self, step: int) -> str:
        name = f"{self._run_id}-{self._curves.next_number()}"
        self._curves.branch(step, name)
        return name


def _is_same(known: float, value: float) -> bool:
    return known == value or (math.isnan(known) and math.isnan(value))


class _TensorBoard(_Place):
    """Event files in one folder; a newer one hides what older ones have from a step on."""

    def begin(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(self._init.get("log_dir") or self._folder / "tensorboard")
        times = [_time_of(path) for path in folder.glob("events.out.tfevents.*")]
        # Readers take the files in the order of their names, which begin with the second.
        while times and int(time.time()) == max(times):
            time.sleep(0.01)
        start = step if times else 0
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


def _time_of(events: Path) -> int:
    return int(events.name.split(".")[3])


class _Wandb(_Place):
    """A run of W&B: offline, each start makes a folder of its own, which gets the whole curve."""

    def begin(self, step: int) -> None:
        self._begin(self._name())

    def begin_branch(self, step: int) -> None:
        self._begin(self._new_name(step))

    def _begin(self, name: str) -> None:
        import wandb

        self.run = wandb.init(**{"dir": self._folder, **self._init, "id": name, "resume": "allow"})
        # Online, it ignores steps before its own.
        first = self.run.step
        sent = self._curves.all_of(name, self._run_id)
        self._know((key, at, value) for at, row in sent if at < first for key, value in row.items())
        self._log_again()

    def _send(self, rows: list[Row]) -> None:
        for step, values in rows:
            self.run.log(values, step=step)

    def end(self) -> None:
        self.run.finish()


class _Mlflow(_Place):
    """A run of MLflow, which can forget nothing: it gets what it lacks."""

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


class _Trackio(_Place):
    """A run in Trackio's local database, which can forget nothing: it gets what it lacks."""

    def begin(self, step: int) -> None:
        self._begin(self._name())

    def begin_branch(self, step: int) -> None:
        self._begin(self._new_name(step))

    def _begin(self, name: str) -> None:
        import trackio

        given = {"project": self._folder.name, **self._init, "name": name, "resume": "allow"}
        self.run = trackio.init(**given)
        self._know(_logged_in_trackio(self.run))
        self._log_again()

    def _send(self, rows: list[Row]) -> None:
        for step, values in rows:
            self.run.log(values, step=step)

    def end(self) -> None:
        self.run.finish()


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
    return [(key, step, float(value)) for key, step, value in found if key not in ("step", "timestamp")]


_PLACES: dict[str, type[_Place]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "mlflow": _Mlflow,
    "trackio": _Trackio,
}
