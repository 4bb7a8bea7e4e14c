"""Warns where no save is given the metric that says which checkpoint is the best."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import Once, did_you_mean
from ..run.manifest import Goal


class GoalMetric:
    """Knows whether a save was given the metric of the goal."""

    def __init__(self, goal: Goal | None, once: Once) -> None:
        self._goal, self._once = goal, once
        self._is_settled = goal is None
        """Whether a save was given the metric, or a warning has said that none was."""
        self.is_late = False
        """Whether a framework evaluates, so that the first epoch may end without the metric."""

    def note(self, metrics: Mapping[str, float], *, has_best: bool) -> None:
        """Note the metrics of a save, and warn if they lack the one of the goal."""
        if self._goal is None or self._is_settled:
            return
        self._is_settled = self._goal.metric in metrics
        if metrics and not (self._is_settled or has_best):
            self._is_settled = True
            likely = [meant for one in metrics if (meant := did_you_mean(one, [self._goal.metric], str))]
            self._once.warn(
                f"save() was given {', '.join(metrics)}, but {self._goal} says which checkpoint is the best."
                + "".join(likely[:1])
            )

    def warn_of_none(self, *, is_end: bool, has_best: bool) -> None:
        """Warn, at the end of an epoch or of the training, if no save was given the metric."""
        if self._goal is None or self._is_settled or has_best or (self.is_late and not is_end):
            return
        self._is_settled = True
        name = self._goal.metric
        self._once.warn(
            f"{self._goal} says which checkpoint is the best, and no save has given {name} so far: no "
            f"checkpoint is the best one. Give it with save({name}=...)."
        )
