"""Runs a script repeatedly in temporary run directories, and reads what each start has recorded."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import dropwhile, takewhile
from pathlib import Path

from ..errors import UsageError
from ..files.strict_json import Json
from ..trace import trace_file
from ..trace.trace_file import At, Record

Start = Callable[[Sequence[str], Mapping[str, str], Path], int]
"""Starts a command with an environment and a log for its output, waits, and returns its exit code."""

STILLED = Path(__file__).parent / "stilled"
"""The folder that Python imports first if the clock or the system's random bytes are held still."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of the command, which may start several processes, until it ended."""

    code: int
    seconds: float
    log: str
    """Its last lines of output."""
    error: str = ""
    """The error that ended it, as Python prints it after a traceback, or its last line."""
    has_hung: bool = False
    """Whether it had to be killed."""
    has_left: bool = False
    """Whether it reached the place where it was to leave."""
    began: str = ""
    """How its training began, "start" or "resumed"; empty if it did not get that far."""

    @property
    def end(self) -> str:
        """How it ended, in words."""
        if self.has_hung:
            hung = "did not leave when it was told to" if self.has_left else "hung"
            return f"it {hung}, and was ended after {self.seconds:.0f} s"
        return f"it ended with exit code {self.code}"

    @property
    def has_failed(self) -> bool:
        """Whether it neither finished nor left when it was told to."""
        return self.has_hung or not (self.has_left or self.code == 0)


@dataclass(slots=True)
class Trial:
    """One training up to its last boundary: one attempt, or several if it is stopped and resumed."""

    name: str
    folder: Path
    attempts: list[Attempt] = field(default_factory=list)
    ranks: list[list[Record]] = field(default_factory=list)
    """The records of each rank."""

    @property
    def records(self) -> list[Record]:
        """The records of rank 0."""
        return self.ranks[0] if self.ranks else []

    def boundaries(self, rank: int = 0) -> dict[At, Record]:
        """Return the boundaries that a rank has reached, in order."""
        found: dict[At, Record] = {}
        for record in self.ranks[rank] if rank < len(self.ranks) else ():
            if record.why == "boundary":
                # A script may save twice at one step; one that is stopped there has reached the first.
                found.setdefault(record.at, record)
        return found

    def sample(self, rank: int, begin: int, end: int) -> bytes:
        """Return the bytes of a tensor's sample."""
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
    ) -> Trial:
        """Run a training without a stop."""
        trial = self._new(name)
        self._attempt(trial, name, {"stop": None, **(plan or {})}, environment or {})
        return trial

    def stopped(self, name: str, stops: Sequence[At], last: At) -> Trial:
        """Run a training that is stopped at each of these boundaries and started again."""
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
        left = trial.folder / f"left-{len(trial.attempts)}"
        whole = {
            "trace": str(trial.folder / _TRACE),
            "left": str(left),
            "leaves": LEAVES,
            "steps": self._steps,
            "deterministic": self._deterministic,
            "limit": self._limit(),
            **plan,
        }
        log = trial.folder / f"log-{len(trial.attempts)}"
        before = len(_begins(trial.folder))
        started = time.perf_counter()
        try:
            code = self._start(self._command, {**os.environ, **_orders(trial, whole), **environment}, log)
        except BaseException:
            self._told("\n")
            raise
        seconds = time.perf_counter() - started
        lines = _last_lines(log)
        has_hung = code == 1 and any(map(_HUNG.match, lines))
        began = [*_begins(trial.folder)[before:], ""][0]
        end = "\n".join(lines[-_LINES:])
        attempt = Attempt(code, seconds, end, "", has_hung, left.exists(), began)
        error = error_in(lines) or (_last_words(lines) if attempt.has_failed else "")
        trial.attempts.append(replace(attempt, error=error))
        trial.ranks = [*_read(trial.folder)]
        self._told(f"{seconds:.1f} s\n")

    def _limit(self) -> float | None:
        """Return the seconds after which a start counts as hung: far longer than all before it."""
        known = [one.seconds for trial in self.made for one in trial.attempts]
        return max(_LIMIT, 10 * max(known)) if known else None


def _orders(trial: Trial, plan: Mapping[str, Json]) -> dict[str, str]:
    # cuBLAS reads it when it starts, before the script has made a RunState.
    workspace = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if plan["deterministic"] else {}
    return {
        **workspace,
        "RESUMABLE_AUDIT": json.dumps(plan),
        "RESUMABLE_RUN_DIR": str(trial.folder / "run"),
        "RESUMABLE_RESUME": "auto",
        "RESUMABLE_REMOTE": "",
        "RESUMABLE_TRACE": "",
    }


def stilled(*what: str) -> dict[str, str]:
    """Return the environment in which these, such as "clock", are equal in every process."""
    before = os.environ.get("PYTHONPATH")
    return {
        "RESUMABLE_STILL": " ".join(what),
        "PYTHONPATH": os.pathsep.join([str(STILLED), *([before] if before else [])]),
    }


def _read(folder: Path) -> Iterator[list[Record]]:
    rank = 0
    while (path := _of_rank(folder, rank)).exists():
        yield trace_file.read(path)
        rank += 1


def _of_rank(folder: Path, rank: int) -> Path:
    return trace_file.path_of(folder / _TRACE, rank)


def _begins(folder: Path) -> list[str]:
    path = _of_rank(folder, 0)
    return trace_file.begins(path) if path.exists() else []


def _last_lines(log: Path) -> list[str]:
    if not log.exists():
        return []
    with open(log, "rb") as file:
        file.seek(max(0, os.path.getsize(log) - _READ))
        return file.read().decode(errors="replace").splitlines()


def error_in(lines: Sequence[str]) -> str:
    """Return the last error that Python printed after a traceback, of any rank; "" if there is none.

    >>> error_in(["epoch 1", "Traceback (most recent call last):", '  File "x.py", line 3', "KeyError: 'lr'"])
    "KeyError: 'lr'"
    """
    bare = [_RANK.sub("", line) for line in lines]
    frames = [number for number, line in enumerate(bare) if _FRAME.fullmatch(line)]
    for number in reversed(frames):
        told = [*dropwhile(lambda line: line[:1] in ("", " "), bare[number + 1 :])]
        # torchrun's own error says only that a process has failed.
        if told and "ChildFailedError" not in told[0]:
            return " ".join([told[0], *map(str.strip, takewhile(lambda line: line[:1] == " ", told[1:]))])
    return ""


def _last_words(lines: Sequence[str]) -> str:
    # Such as those of argparse. The output of torchrun ends with a table.
    said = [line.strip() for line in lines if line.strip()]
    return said[-1] if said and not any("ChildFailedError" in line for line in said) else ""


def check(command: Sequence[str]) -> None:
    """Raise UsageError if there is no such program."""
    if shutil.which(command[0]) is None:
        is_script = command[0].endswith(".py") and Path(command[0]).exists()
        raise UsageError(
            f"{command[0]} cannot be started: it is no program.",
            fix=f"give the command that starts the training, as in: resumable audit -- python "
            f"{command[0] if is_script else 'train.py'}",
        )


def start(command: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
    """Start the command as a shell would, and wait until it ends; Ctrl-C ends it too."""
    with open(log, "wb") as file:
        try:
            # In its own process group, all that is left of it can be killed at once.
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
            _end(child, environment.get("RESUMABLE_AUDIT"))
            raise


def _end(child: subprocess.Popen[bytes], plan: str | None) -> None:
    told = f"interrupted: the training is asked to end, and killed after {_PATIENCE:.0f} s"
    print(f"\n{told}", file=sys.stderr, flush=True)
    try:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            # torchrun ends the processes that it has started.
            child.wait(_PATIENCE)
    finally:
        # Also after a second Ctrl-C.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        if plan:
            _kill_all_with(plan)
        child.wait()


def _kill_all_with(plan: str) -> None:
    """Kill the processes that follow a plan: torchrun's are in other groups. Only Linux lists them."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if os.fsencode(plan) in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)


_TRACE = "boundaries.jsonl"
LEAVES = 300.0
"""The seconds that a process may take to save and leave."""
_LINES = 20
_READ = 1 << 20
_RANK = re.compile(r"^\[rank\d+\]: ?")
_FRAME = re.compile(r'\s+File ".*", line \d+(, in .*)?')
_HUNG = re.compile(r"Timeout \([\d:.]+\)!")
_PATIENCE = 10.0
"""The seconds that a training may take to end when it is interrupted."""
_LIMIT = 120.0
