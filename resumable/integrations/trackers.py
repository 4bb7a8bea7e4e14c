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

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .. import options
from ..errors import UsageError, warn
from ..loaders.generators import rng
from ..session.session import Session
from ..state import RunState
from .curves import Curves
from .tracker_runs import PLACES, Place


def track(state: RunState, to: str, **init: Any) -> Tracker:
    """Log to a tracker, and continue the same curves after a resume.

    What `state.save` is given is logged too. With several processes all of them call it, and rank 0 logs.

    Args:
        state: The training.
        to: "tensorboard" (`SummaryWriter`), "wandb" (`wandb.init`), "mlflow" (`mlflow.start_run`) or
            "trackio" (`trackio.init`).
        **init: Arguments of that function, which starts a run of the tracker.
    """
    if to not in PLACES:
        raise UsageError(f"track() knows no {to!r}.", fix=f"say one of {', '.join(PLACES)}.")
    session = state._session
    session.refuse_closed()
    if session.training.position.logged.has(to):
        raise UsageError(f"{to} is tracked already.", fix="call track() once, and keep what it returns.")
    if ours := sorted(PLACES[to].ours & init.keys()):
        raise UsageError(
            f"track() chooses {', '.join(ours)} of {to} by itself, to continue the same run after a resume.",
            fix=f"leave out {', '.join(f'{name}=' for name in ours)}.",
        )
    return Tracker(session, to, init)


class Tracker:
    """Logs values under the step of the training, to rank 0's tracker."""

    def __init__(self, session: Session, to: str, init: Mapping[str, Any]) -> None:
        training = session.training
        # The position keeps this: a strong reference would keep a session that the script has dropped.
        self._session = weakref.ref(session)
        self._name, self._position = to, training.position
        self._place: Place | None = None
        if not training.crew.is_first:
            return
        logged = self._position.logged
        self._curves = Curves(training.run.path / f"{to}.jsonl", logged.end(to))
        self._restores = logged.restores
        self._went_back = logged.restores > session.has_resumed or _is_behind(session)
        """Whether other values than those that the tracker's run has may be another branch's."""
        self._newest: dict[str, tuple[int, float]] = {}
        if self._curves.is_lost:
            warn(
                f"{training.run} has no {to}.jsonl, or not all of it, as after a resume from a remote: what "
                f"was logged before step {self._position.step} is not logged again."
            )
        self._place = PLACES[to](self._curves, str(training.crew.run_id), training.run.path, init)
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

        Args:
            values: A dict of numbers, for names that are no keywords, such as "train/loss".
            **more: Numbers by keyword.

        >>> with RunState.load("runs/logged") as state:
        ...     tracker = track(state, "tensorboard")
        ...     for step in state.steps(2):
        ...         tracker.log({"train/loss": 0.5}, rate=0.1)
        runs/logged is empty: starting fresh
        """
        if (session := self._session()) is None:
            raise UsageError(
                "the RunState of this tracker is gone.", fix="keep it for as long as the training logs."
            )
        session.refuse_closed()
        if self._place is not None:
            self._log(_numbers({**(values or {}), **more}))

    def _log(self, values: dict[str, float]) -> None:
        assert self._place is not None
        self._follow()
        step = self._position.steps_done()
        self._newest.update({name: (step, value) for name, value in values.items()})
        self._curves.add(step, values)
        if not self._place.log(step, values) and self._went_back:
            with _without_draws():
                self._place.end()
                self._place.begin_branch(step)

    def _follow(self) -> None:
        """Go back with the training, if it has gone back."""
        logged = self._position.logged
        if self._restores == logged.restores or self._place is None:
            return
        self._restores, self._went_back = logged.restores, True
        self._place.end()
        self._curves.go_to(logged.end(self._name))
        self._newest.clear()
        self._begin()

    def _begin(self) -> None:
        assert self._place is not None
        with _without_draws():
            self._place.begin(self._curves.begin(self._position.step))

    # As a log of the training.

    def note_metrics(self, metrics: Mapping[str, float]) -> None:
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


def _is_behind(session: Session) -> bool:
    """Whether the run has newer checkpoints than the one that the next save follows."""
    return (session.training.run.highest() or 0) > (session.saving.parent or 0)


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
