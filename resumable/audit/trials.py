"""Starting a script again and again in throw-away run directories, and what each start has written down."""

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
    error: str = ""
    """The error that has ended it, as Python prints it after the last frame; else its last line."""
    has_hung: bool = False
    """Whether it had to be ended."""
    has_left: bool = False
    """Whether it came to where it was to leave."""
    began: str = ""
    """How its training began, "start" or "resumed"; nothing where it did not come so far."""

    @property
    def end(self) -> str:
        """How it ended, in words."""
        if self.has_hung:
            hung = "did not leave when it was told to" if self.has_left else "hung"
            return f"it {hung}, and was ended after {self.seconds:.0f} s"
        return f"it ended with exit code {self.code}"

    @property
    def has_failed(self) -> bool:
        """Whether it ended in another way than a training does that is over, or was told to leave."""
        return self.has_hung or not (self.has_left or self.code == 0)


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
        found: dict[At, Record] = {}
        for record in self.ranks[rank] if rank < len(self.ranks) else ():
            if record.why == "boundary":
                # A script may save twice at one step: where it is stopped there, it has come to the first.
                found.setdefault(record.at, record)
        return found

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

    def resumed(self, name: str, base: Trial, until: At, plan: Mapping[str, Json] | None = None) -> Trial:
        """Return a training that goes on from where another one was stopped, which is left as it is."""
        trial = self._new(name)
        # A script that came to no save has none.
        if (base.folder / "run").exists():
            shutil.copytree(base.folder / "run", trial.folder / "run")
        self._attempt(trial, name, {"stop": [*until], **(plan or {})}, {})
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
        """Return after how many seconds a start hangs: what takes far longer than all before."""
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


STILLED_BY = ("clock", "python", "numpy", "torch", "system", "benchmark")
"""What can be the same in every process."""


def stilled(*what: str) -> dict[str, str]:
    """Return the environment in which these are the same in every process, such as "clock"."""
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
    """Return the last error that Python has printed after its frames, of any rank; nothing if there is none.

    >>> error_in(["epoch 1", "Traceback (most recent call last):", '  File "x.py", line 3', "KeyError: 'lr'"])
    "KeyError: 'lr'"
    """
    bare = [_RANK.sub("", line) for line in lines]
    frames = [number for number, line in enumerate(bare) if _FRAME.fullmatch(line)]
    for number in reversed(frames):
        told = [*dropwhile(lambda line: line[:1] in ("", " "), bare[number + 1 :])]
        # torchrun's own says only that a process has failed.
        if told and "ChildFailedError" not in told[0]:
            return " ".join([told[0], *map(str.strip, takewhile(lambda line: line[:1] == " ", told[1:]))])
    return ""


def _last_words(lines: Sequence[str]) -> str:
    # Such as those of argparse; at the end of what torchrun prints is a table.
    said = [line.strip() for line in lines if line.strip()]
    return said[-1] if said and not any("ChildFailedError" in line for line in said) else ""


def check(command: Sequence[str]) -> None:
    """Check that there is such a program."""
    if shutil.which(command[0]) is None:
        is_script = command[0].endswith(".py") and Path(command[0]).exists()
        raise UsageError(
            f"{command[0]} cannot be started: it is no program.",
            fix=f"give the command that starts the training, as in: resumable audit -- python "
            f"{command[0] if is_script else 'train.py'}",
        )


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
            _end(child, environment.get("RESUMABLE_AUDIT"))
            raise


def _end(child: subprocess.Popen[bytes], plan: str | None) -> None:
    told = f"interrupted: what was started is told to end, and is killed after {_PATIENCE:.0f} s"
    print(f"\n{told}", file=sys.stderr, flush=True)
    try:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            # torchrun ends the processes that it has started.
            child.wait(_PATIENCE)
    finally:
        # Also where somebody could not wait, and has pressed Ctrl-C again.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        if plan:
            _kill_all_with(plan)
        child.wait()


def _kill_all_with(plan: str) -> None:
    """Kill what follows a plan: torchrun's processes are in no group of ours. (Only Linux tells.)"""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if plan.encode() in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)


_TRACE = "boundaries.jsonl"
LEAVES = 300.0
"""How long a process may take to save and to leave."""
_LINES = 20
_READ = 1 << 20
_RANK = re.compile(r"^\[rank\d+\]: ?")
_FRAME = re.compile(r'\s+File ".*", line \d+(, in .*)?')
_HUNG = re.compile(r"Timeout \([\d:.]+\)!")
_PATIENCE = 10.0
_LIMIT = 120.0
