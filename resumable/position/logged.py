"""How much of what a training has logged belongs to it where it stands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Log(Protocol):
    """A log that a training writes, which goes back with it."""

    def note_metrics(self, metrics: Mapping[str, float]) -> None:
        """Log the metrics that a save was given."""

    def write(self) -> int:
        """Make what was logged durable; return the number of its end, for the checkpoint."""

    def close(self) -> None:
        """Note that the training has closed."""


class Logged:
    """The ends of the logs of a training, as its checkpoints have them."""

    def __init__(self) -> None:
        self._logs: dict[str, Log] = {}
        self._ends: dict[str, int] = {}
        self.restores = 0
        """Counts how often the training was put elsewhere."""

    def has(self, name: str) -> bool:
        """Whether there is a log of this name."""
        return name in self._logs

    def add(self, name: str, log: Log) -> None:
        """Write this log from now on."""
        self._logs[name] = log

    def end(self, name: str) -> int:
        """Return where a log ended at the checkpoint that was restored last; 0 if it had not begun."""
        return self._ends.get(name, 0)

    def note_metrics(self, metrics: Mapping[str, float]) -> None:
        """Pass on the metrics that a save was given."""
        for log in self._logs.values():
            log.note_metrics(metrics)

    def collect(self) -> dict[str, int]:
        """Return the ends of all logs, for a checkpoint; those that are not written now keep theirs."""
        return {**self._ends, **{name: log.write() for name, log in self._logs.items()}}

    def restore(self, saved: Mapping[str, int]) -> None:
        """Go back to the ends that `collect` returned."""
        self._ends = dict(saved)
        self.restores += 1

    def close(self) -> None:
        """Close all logs."""
        logs, self._logs = self._logs, {}
        for log in logs.values():
            log.close()
