"""Starting a script again and again in throw-away run directories, and what each start has written down."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile, takewhile
from pathlib import Path

from . import traces
from .errors import UsageError
from .sealed import Json
from .traces import At, Record

Start = Callable[[Sequence[str], Mapping[str, str], Path], int]
"""Starts a command with an environment, its output in a log, waits for its end, and returns how it ended."""

STILLED = Path(__file__).parent / "stilled"
"""Holds what Python imports first where the clock, or what the system draws, is to be the same always."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One process, or one command that starts several, from its start to its end."""

    code: int
    seconds: float
    log: str
    """The end of what it printed."""
    has_hung: bool = False
    """Whether it had to be ended."""

    @property
    def end(self) -> str:
        """How it ended, in words."""
        if self.has_hung:
            return f"it hung, and was ended after {self.seconds:.0f} s"
        return f"it ended with exit code {self.code}"

    @property
    def error(self) -> str:
        """The error that ended it, as Python prints it after the last frame; nothing where it prints none."""
        after = self.log.rpartition('\n  File "')[2].splitlines()[1:]
        told = [*dropwhile(lambda line: line[:1] in ("", " "), after)]
        return " ".join([*told[:1], *map(str.strip, takewhile(lambda line: line[:1] == " ", told[1:]))])


@dataclass(slots=True)
class Trial:
    """One training from its beginning to the last boundary, in one process or, stopped, in several."""

    name: str
    folder: Path
    attempts: list[Attempt] = field(default_factory=list)
    ranks: list[list[Record]] = field(default_factory=list)
    """What each rank has written down."""

    @property
    def records(self) -> list[Record]:
        """What rank 0 has written down."""
        return self.ranks[0] if self.ranks else []

    def boundaries(self, rank: int = 0) -> dict[At, Record]:
        """Return the boundaries that a rank has come to, in order."""
        records = self.ranks[rank] if rank < len(self.ranks) else []
        return {record.at: record for record in records if record.why == "boundary"}

    def sample(self, rank: int, begin: int, end: int) -> bytes:
        """Return the sample of a tensor that lies there."""
        with open(_of_rank(self.folder, rank).with_suffix(".samples"), "rb") as file:
            file.seek(begin)
            return file.read(end - begin)


class Trials:
    """Makes trials of one command."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        steps: int,
        *,
        start: Start,
        told: Callable[[str], None],
        deterministic: bool,
    ) -> None:
        self._command = command
        self._folder = folder
        self._steps = steps
        self._start = start
        self._told = told
        self._deterministic = deterministic
        self.made: list[Trial] = []

    def straight(
        self,
        name: str,
        environment: Mapping[str, str] | None = None,
        plan: Mapping[str, Json] | None = None,
        until: At | None = None,
    ) -> Trial:
        """Return a training that is not stopped, as far as to a boundary."""
        trial = self._new(name)
        self._attempt(trial, name, {"stop": until and [*until], **(plan or {})}, environment or {})
        return trial

    def stopped(self, name: str, stops: Sequence[At], last: At) -> Trial:
        """Return a training that is stopped at each of these boundaries and started again."""
        trial = self._new(name)
        for at in (*stops, last):
            begun = "resumed, " if trial.attempts else ""
            said = f"{begun}trained to the end" if at == last else f"{begun}stopped at {at}"
            self._attempt(trial, said, {"stop": [*at]}, {})
            if at not in trial.boundaries():
                break
        return trial

    def _new(self, name: str) -> Trial:
        trial = Trial(name, self._folder / f"{len(self.made):02}")
        trial.folder.mkdir(parents=True)
        self.made.append(trial)
        return trial

    def _attempt(
        self, trial: Trial, said: str, plan: Mapping[str, Json], environment: Mapping[str, str]
    ) -> None:
        self._told(f"{said} ... ")
        whole = {
            "trace": str(trial.folder / _TRACE),
            "steps": self._steps,
            "deterministic": self._deterministic,
            "limit": self._limit(),
            **plan,
        }
        log = trial.folder / f"log-{len(trial.attempts)}"
        started = time.perf_counter()
        try:
            code = self._start(self._command, {**os.environ, **_orders(trial, whole), **environment}, log)
        except BaseException:
            self._told("\n")
            raise
        seconds = time.perf_counter() - started
        limit = whole["limit"]
        has_hung = code == 1 and isinstance(limit, (int, float)) and seconds > limit
        trial.attempts.append(Attempt(code, seconds, _end_of(log), has_hung))
        trial.ranks = [*_read(trial.folder)]
        self._told(f"{seconds:.1f} s\n")

    def _limit(self) -> float | None:
        """Return after how many seconds a start hangs: what takes far longer than all before."""
        known = [one.seconds for trial in self.made for one in trial.attempts]
        return max(_LIMIT, 10 * max(known)) if known else None


def _orders(trial: Trial, plan: Mapping[str, Json]) -> dict[str, str]:
    # (which cuBLAS reads as it begins, before the script has made a RunState)
    workspace = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if plan["deterministic"] else {}
    return {
        **workspace,
        "RESUMABLE_AUDIT": json.dumps(plan),
        "RESUMABLE_RUN_DIR": str(trial.folder / "run"),
        "RESUMABLE_RESUME": "auto",
        "RESUMABLE_REMOTE": "",
        "RESUMABLE_TRACE": "",
    }


STILLED_BY = ("clock", "python", "numpy", "torch", "system")
"""What can be the same in every process."""


def stilled(*what: str) -> dict[str, str]:
    """Return the environment in which these are the same in every process: clock, python, numpy, system."""
    before = os.environ.get("PYTHONPATH")
    return {
        "RESUMABLE_STILL": " ".join(what),
        "PYTHONPATH": os.pathsep.join([str(STILLED), *([before] if before else [])]),
    }


def _read(folder: Path) -> Iterator[list[Record]]:
    rank = 0
    while (path := _of_rank(folder, rank)).exists():
        yield traces.read(path)
        rank += 1


def _of_rank(folder: Path, rank: int) -> Path:
    return traces.path_of(folder / _TRACE, rank)


def _end_of(log: Path) -> str:
    if not log.exists():
        return ""
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(lines[-_LINES:])


def start(command: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
    """Start the command as a shell would, and wait for its end; Ctrl-C ends it too."""
    with open(log, "wb") as file:
        try:
            # A group of its own: what is left of it when this is interrupted can be ended together.
            child = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        except OSError as exc:
            raise UsageError(
                f"{command[0]} cannot be started: {exc.strerror or exc}.",
                fix="give the command that starts the training, as in: resumable audit -- python train.py",
            ) from exc
        try:
            return child.wait()
        except BaseException:
            _end(child)
            raise


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        # (torchrun ends the processes that it has started)
        child.wait(_PATIENCE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


_TRACE = "boundaries.jsonl"
_LINES = 20
_PATIENCE = 10.0
_LIMIT = 120.0
