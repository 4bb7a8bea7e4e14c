"""What watches a training at its boundaries, a trace or an audit, and what an audit says in the process."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..boundary import Due
from ..errors import printable
from ..parts.parts import Parts
from ..position.position import Position

AUDIT = "RESUMABLE_AUDIT"
"""The environment variable that has the plan of an audited process, as JSON."""


def audit(module: str) -> Any:
    """Import a module of the audit, which only an audited process and `state.check()` need."""
    return import_module(f"..audit.{module}", __package__)


class Observer(Protocol):
    """Watches a training, and may end it at a boundary."""

    def begin(self, *, is_resumed: bool) -> None:
        """Note that the training begins."""

    def went_back(self) -> None:
        """Note that `restore` took the training to an earlier place."""

    def note(self, values: Mapping[str, Any]) -> None:
        """Take the values that the script notes."""

    def saved(self, metrics: Mapping[str, float]) -> None:
        """Take the metrics that a save was given."""

    def boundary(self) -> Due | None:
        """Note a boundary; return what is due there."""

    def close(self, *, is_at_end: bool = False) -> None:
        """Note that the training ends."""


def observer(
    parts: Parts,
    position: Position,
    rank: int | None,
    trace: str | os.PathLike[str] | None,
    every: int,
    *,
    run: Path,
    given: str | os.PathLike[str],
) -> Observer | None:
    """Return what watches this process's training: an audit if there is a plan for one, else its trace.

    `run` is the run directory, `given` the one in the script's arguments.
    """
    if plan := os.environ.get(AUDIT):
        watching: Observer = audit("recorder").Audit.follow(plan, parts, position, rank or 0, given)
        return watching
    trace = os.path.expanduser(os.environ.get("RESUMABLE_TRACE", trace) or "")
    if not trace:
        return None
    # Not above: most trainings have no trace.
    from ..trace import tracer

    return tracer.Trace(tracer.path_of(trace, rank, run), parts, position, every)


class Unregistered(NamedTuple):
    """Something that changes during the training and is in no part, as `state.check()` returns it.

    >>> lost = Unregistered("best", "number", 'state.vars["best"]')
    >>> print(lost)
    best (number) changes, and no part holds it: a resume would lose it. Fix: keep it in state.vars["best"]
    """

    name: str
    """The name of the variable or attribute."""
    kind: str
    """What it is, such as "number", or why no checkpoint can have it."""
    fix: str
    """Where to keep it."""

    def __str__(self) -> str:
        text = f"{self.name} ({self.kind}) changes, and no part holds it: a resume would lose it."
        return printable(f"{text} Fix: {sentence(self.fix)}")


def sentence(fix: str) -> str:
    """Return a fix as an instruction.

    >>> sentence("scheduler=scheduler"), sentence('state.vars["seen"]')
    ('RunState.load(..., scheduler=scheduler)', 'keep it in state.vars["seen"]')
    """
    if re.match(r"\w+=", fix):
        return f"RunState.load(..., {fix})"
    return f"keep it in {fix}" if fix.startswith("state.vars") else fix
