"""Load every run of a folder, as a script and as the command line would, and write down what happened."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tiny

from resumable import ResumableError, RunState
from resumable.cli import app

FORBIDDEN = ("pickle.", "marshal.", "exec", "compile", "os.system", "os.exec", "os.fork", "os.spawn")
FORBIDDEN += (
    "os.posix_spawn",
    "subprocess.",
    "ctypes.dlopen",
    "socket.connect",
    "socket.bind",
    "socket.sendto",
    "import",
)
LONGEST = 120
"""So long may a case take on a machine that has other things to do; what hangs ends with SIGALRM."""


def status(key: str) -> int:
    """Return a figure of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


class Watch:
    """What one case did: the code that ran, the memory and the time that it took."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.is_on = False
        sys.addaudithook(self._heard)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_on and event.startswith(FORBIDDEN):
            self.events.append(f"{event} {arguments!r:.100}")

    @contextlib.contextmanager
    def over(self, into: dict[str, Any]) -> Iterator[None]:
        """Watch what the body does."""
        self.events = []
        Path("/proc/self/clear_refs").write_text("5")
        before, started = status("VmRSS"), time.process_time()
        signal.alarm(LONGEST)
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False
            signal.alarm(0)
            into["seconds"] = round(time.process_time() - started, 3)
            into["memory"] = max(0, status("VmHWM") - before)
            into["ran"] = self.events


def told(error: BaseException) -> list[str]:
    """Return what an error is, and whether it is one of ours."""
    return [type(error).__name__, str(error), "ours" if isinstance(error, ResumableError) else "not ours"]


def started(run: Path, which: Any, saves: bool = False) -> dict[str, Any]:
    """Return how a training starts in that run, and whether its objects are as they were if it does not."""
    training = tiny.fresh()
    before = training.digest()
    found: dict[str, Any] = {"error": None}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                state = RunState.load(
                    run,
                    model=training.model,
                    optimizer=training.optimizer,
                    extra={"seen": training.seen},
                    keep=9,
                    resume=which,
                )
                state._position.streams.put_back()
        except BaseException as exc:
            found["error"] = told(exc)
            found["is_as_it_was"] = training.digest() == before
        else:
            found["step"], found["is_right"] = state.step, is_right(training, state)
            found["out"] = out.getvalue()
            found |= closed(training, state, saves)
    return found | {"warnings": [str(one.message) for one in warned]}


def is_right(training: tiny.Training, state: RunState) -> bool:
    """Whether a training stands where an uninterrupted one does."""
    return state.step in (1, 2) and training.digest() == tiny.uninterrupted()[state.step]


def closed(training: tiny.Training, state: RunState, saves: bool) -> dict[str, Any]:
    """Save, if that is asked for, and end."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), state:
            if saves:
                tiny.save_next(training, state, 1.0)
    except BaseException as exc:
        return {"end": told(exc)}
    return {"end": None}


def commanded(*words: str) -> dict[str, Any]:
    """Return what a command prints, and its exit code."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code: Any = app.main(words)
        except BaseException as exc:
            code = told(exc)
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def attacked(watch: Watch, run: Path, saves: bool, skips: str = "") -> dict[str, Any]:
    """Return all that happened with one run."""
    found: dict[str, Any] = {}
    with watch.over(found):
        found["newer"] = started(run, 2)
        found["ls"] = commanded("ls", str(run))
        found["json"] = commanded("ls", str(run), "--json")
        if skips != "verify":
            found["verify"] = commanded("verify", str(run), "--all")
            found["show"] = commanded("show", f"{run}@2", "--all")
            found["diff"] = commanded("diff", f"{run}@1", f"{run}@2", "--json")
        found["auto"] = started(run, "auto", saves)
    return found


def main(folder: str, results: str, limit: str) -> None:
    """Attack with every run of the folder; more memory than there is now and `limit` bytes there is not."""
    cases = json.loads((Path(folder) / "cases.json").read_text())
    tiny.uninterrupted()
    watch, warm = Watch(), Path(folder) / "warm" / "exp"
    attacked(watch, warm, True)  # what is imported once is imported now
    most = status("VmSize") + int(limit)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    with contextlib.suppress(OSError):
        os.open("/BEGIN", os.O_RDONLY)
    with open(results, "w") as file:
        for number, (name, saves, skips) in enumerate(cases):
            print(json.dumps(["begin", name]), file=file, flush=True)
            found = attacked(watch, Path(folder) / f"{number}" / "exp", saves, skips)
            print(json.dumps(["end", name, found]), file=file, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
