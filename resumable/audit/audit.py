"""Runs a script several times, and proves that it resumes exactly or names what does not."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..trace.trace_file import At
from . import causes, diagnosis, losses, naming, trials
from .diagnosis import Finding, Lost
from .trials import Attempt, Start, Trial, Trials


@dataclass(slots=True)
class Verdict:
    """The result of an audit."""

    command: Sequence[str]
    findings: list[Finding] = field(default_factory=list)
    """What is wrong, in the order in which it shows; empty if nothing was found."""
    notes: list[str] = field(default_factory=list)
    """Facts that are no error."""
    lost: list[Lost] = field(default_factory=list)
    """What changes, is in no part, and is not restored by a resume."""
    stops: list[At] = field(default_factory=list)
    """The boundaries at which the training was stopped and started again."""
    boundaries: int = 0
    """How many boundaries the first training reached."""
    attempts: list[dict[str, Any]] = field(default_factory=list)
    """Each start of the script: its trial, exit code, duration in seconds and last lines of output."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The settings that decide whether a training is repeatable, as the script has set them."""

    @property
    def is_exact(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as plain values."""
        return {
            "exact": self.is_exact,
            "command": [*self.command],
            "findings": [{**one._asdict(), "at": one.at and one.at._asdict()} for one in self.findings],
            "lost": [{**one._asdict(), "at": one.at._asdict()} for one in self.lost],
            "notes": self.notes,
            "stops": [at._asdict() for at in self.stops],
            "boundaries": self.boundaries,
            "attempts": self.attempts,
            "settings": self.settings,
        }


def audit(
    command: Sequence[str],
    *,
    steps: int = 20,
    at: Sequence[int] = (),
    deterministic: bool = False,
    start: Start = trials.start,
    told: Callable[[str], None] = lambda _: None,
) -> Verdict:
    """Run a training command up to `steps` boundaries, with and without stops, and compare the runs.

    `at` are the boundaries to stop at, counted from 1; by default one in mid-epoch, the last batch of an
    epoch, and an epoch's end. `deterministic` turns on deterministic operations wherever torch has them.
    `start` is what starts the command.
    """
    if any(not 0 < number < steps for number in at):
        raise UsageError(
            f"--at {max(at)} is not between two of {steps} boundaries.",
            fix="stop at one from 1 to the last but one, or go further with --steps.",
        )
    verdict = Verdict(command)
    with tempfile.TemporaryDirectory(prefix="resumable-audit-") as folder:
        made = Trials(command, Path(folder), steps, start=start, told=told, deterministic=deterministic)
        try:
            _examine(made, verdict, at)
        finally:
            verdict.attempts = [
                {"trial": trial.name, **asdict(one)} for trial in made.made for one in trial.attempts
            ]
    return verdict


def _examine(made: Trials, verdict: Verdict, at: Sequence[int]) -> None:
    straight = made.straight("straight")
    verdict.boundaries = len(straight.boundaries())
    verdict.settings = next((one.more["settings"] for one in straight.records if "settings" in one.more), {})
    if failed := _failed(straight) or _broke_off(straight):
        verdict.findings.append(causes.of_refused(made, straight) or failed)
        return
    again: list[Trial] = []
    for name in ("again", "once more"):
        again.append(made.straight(name))
        if found := _of_other(made, straight, again[-1]):
            verdict.findings.append(found)
            return
    ignored = diagnosis.unsteady([straight, *again])
    verdict.notes += [*_of_unseen(straight), *_of_unsteady(ignored)]
    verdict.stops = _stops(straight, at, verdict.notes)
    if not verdict.stops:
        verdict.findings.append(_of_no_stop(straight))
        return
    stopped = made.stopped("stopped and resumed", verdict.stops, [*straight.boundaries()][-1])
    if fresh := _started_fresh(stopped, verdict.stops):
        verdict.findings.append(fresh)
        return
    unlike = diagnosis.after_resume(straight, stopped, verdict.stops, ignored)
    unsteady = losses.unsteady_names([straight, *again])
    verdict.lost = losses.lost(straight, stopped, verdict.stops, unsteady, unlike)
    failed = _failed(stopped) or _fell_short(straight, stopped)
    if unlike:
        alone = diagnosis.of_resume(straight, stopped, unlike, [])
        if alone.kind == diagnosis.NUMBERS and alone.names:
            verdict.findings.append(alone)
            return
        parted = diagnosis.of_resume(straight, stopped, unlike, verdict.lost)
        verdict.findings.append(_of_chance(made, straight, alone) or parted)
    elif failed:
        verdict.findings.append(failed)


def _of_other(made: Trials, straight: Trial, other: Trial) -> Finding | None:
    """Return what is wrong if another run of the script differed or failed."""
    if failed := _failed(other):
        return failed
    unlike = diagnosis.first_unlike(straight, other)
    if (unlike is None or unlike.first.name == diagnosis.LENGTH) and (failed := _broke_off(other)):
        return failed
    return causes.why(made, straight, unlike) if unlike else None


def _of_chance(made: Trials, straight: Trial, found: Finding) -> Finding | None:
    """Return why the script is not repeatable, if the first runs were equal only by chance."""
    if found.kind != diagnosis.NUMBERS:
        return None
    for _ in range(_MORE):
        if unlike := diagnosis.first_unlike(straight, made.straight("once more")):
            return causes.why(made, straight, unlike)
    return None


_MORE = 2
"""How many more runs are made before the cause is called unknown."""


def _failed(trial: Trial) -> Finding | None:
    """Return a finding if the script reached no boundary."""
    if trial.boundaries():
        return None
    last = trial.attempts[-1]
    text = f"the script came to no boundary: {_end_of(last)}"
    if not trial.records:
        text += ", and made no RunState" if last.code == 0 else ""
    fix = _fix_of(last)
    if last.code == 0:
        fix = "let it train with RunState.load and its loops, or call state.save() where it has its own."
    return Finding(diagnosis.SCRIPT, "the script", None, text, fix=fix)


def _broke_off(trial: Trial) -> Finding | None:
    """Return a finding if a run ended early without being stopped."""
    last = trial.attempts[-1]
    if not last.has_failed:
        return None
    at = [*trial.boundaries()][-1]
    begun = "after a resume" if len(trial.attempts) > 1 else "without any stop"
    return Finding(
        diagnosis.SCRIPT,
        "the script",
        at,
        f"{begun} the script failed after {at}: {_end_of(last)}",
        fix=_fix_of(last),
    )


def _fix_of(attempt: Attempt) -> str:
    """Return what to do about a failure; errors of this library include it."""
    if attempt.has_left and attempt.has_hung:
        return _FIX_OF_A_HANG
    own = re.findall(r"^(?:\[rank\d+\]: ?)?Fix: (.*)", attempt.log, re.MULTILINE)
    return str(own[-1]) if own and attempt.error.startswith("resumable.") else "look at what it printed last."


def _end_of(attempt: Attempt) -> str:
    return ": ".join(filter(None, (attempt.end, attempt.error)))


_FIX_OF_A_HANG = (
    "let it end when SystemExit is raised, as by SIGTERM: with daemon threads, or with try and finally "
    "around what starts threads and processes."
)


def _started_fresh(stopped: Trial, stops: Sequence[At]) -> Finding | None:
    # It would equal a run that was never stopped, and be called exact.
    place = next((n for n, one in enumerate(stopped.attempts[1:]) if one.began == "start"), None)
    if place is None:
        return None
    return Finding(
        diagnosis.STATE,
        "the script",
        stops[place],
        f"the script, started again after the stop at {stops[place]}, did not resume: it started fresh",
        fix="create the state with RunState.load(...), which resumes from the newest checkpoint of the run.",
    )


def _of_no_stop(straight: Trial) -> Finding:
    # It must not be called exact: nothing was tried.
    return Finding(
        diagnosis.SCRIPT,
        "the script",
        None,
        f"nothing could be stopped: the training has ended after {[*straight.boundaries()][-1]}",
        fix="let it train longer, or stop it earlier with --at.",
    )


def _fell_short(straight: Trial, stopped: Trial) -> Finding | None:
    """Return a finding if the stopped run missed a boundary that the straight one reached."""
    there = stopped.boundaries()
    expected = (one.at for one in diagnosis.unasked(straight.records, there) if one.why == "boundary")
    missing = [at for at in expected if at not in there]
    last = stopped.attempts[-1]
    if not missing:
        return _broke_off(stopped) if last.has_hung else None
    begun = "after a resume" if len(stopped.attempts) > 1 else "told to leave"
    return Finding(
        diagnosis.SCRIPT,
        "the script",
        missing[0],
        f"{begun} the script did not come to {missing[0]}: {_end_of(last)}",
        fix=_fix_of(last),
    )


def _stops(straight: Trial, at: Sequence[int], notes: list[str]) -> list[At]:
    boundaries = [*straight.boundaries()]
    # --steps and --at count an epoch's end only if no batch or step of that epoch was counted.
    counted = [
        one
        for place, one in enumerate(boundaries)
        if one.kind != "epoch" or not place or boundaries[place - 1].kind == "epoch"
    ]
    if at:
        return _chosen(counted, at, notes)
    ends = [place for place, one in enumerate(boundaries) if one.kind == "epoch" and place]
    if not ends:
        if counted[0].kind == "batch":
            notes.append(
                f"no epoch came to its end within {len(counted)} batches, so the last batch and the epoch's "
                "end were not stopped at: --steps goes further"
            )
        found = {_near(counted, len(counted) // 3), _near(counted, 2 * len(counted) // 3)}
    else:
        # What is created at one epoch's end exists at the next one's. The first end cuts off an accumulation
        # window, unless the window divides the epoch.
        end = ends[1] if len(ends) > 1 and ends[1] < len(boundaries) - 1 else ends[0]
        following = next((one for one in ends if one > end), len(boundaries) - 1)
        after = boundaries[end + 1 : following]
        first = boundaries[: max(1, ends[0] - 1)]
        middle = _near(first, ends[0] // 2 - (ends[0] > 1))
        found = {middle, boundaries[ends[0] - 1], boundaries[ends[0]], boundaries[end]}
        found |= {_near(after, len(after) // 2)} if after else set()
    return sorted(found - {boundaries[-1]}, key=boundaries.index)


def _near(boundaries: Sequence[At], place: int) -> At:
    """Return this boundary, or a near one at which no window of 2, 3, 4 or 6 batches ends."""
    near = sorted(range(len(boundaries)), key=lambda other: abs(other - place))[:_NEARBY]
    counts = [boundaries[one].batch or boundaries[one].step for one in near]
    fits = (one for one, count in zip(near, counts, strict=True) if count > 4 and count % 2 and count % 3)
    return boundaries[next(fits, place)]


_NEARBY = 3


def _chosen(counted: Sequence[At], at: Sequence[int], notes: list[str]) -> list[At]:
    chosen = [counted[number - 1] for number in sorted({*at}) if number < len(counted)]
    if missed := sorted({number for number in at if number >= len(counted)}):
        notes.append(
            f"--at {', '.join(map(str, missed))}: not stopped there, since the training has ended after "
            f"{len(counted)}"
        )
    return chosen


def _of_unseen(straight: Trial) -> list[str]:
    unseen = next((one.more["unseen"] for one in straight.records if "unseen" in one.more), "")
    return (
        [f"the batches were not compared whole, since they cannot be told apart ({unseen})"] if unseen else []
    )


def _of_unsteady(ignored: set[diagnosis.Leaf]) -> list[str]:
    names = sorted({naming.generator(name) for part, name in ignored if part == "random"})
    told = [naming.unseeded(names)] if names else []
    rest = sorted({f"{part} {name}" for part, name in ignored if part != "random"})
    return told + ([f"{', '.join(rest)}: something else each time, but only told"] if rest else [])
