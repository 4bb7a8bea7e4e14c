"""Starts scripts as an audit does, each in a fork of a process that has imported torch already."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from resumable.audit import trials

_LONGEST = 60
"""What runs for more seconds in a session of its own is ended."""


class Forks:
    """What `audit(start=...)` takes: it starts `python SCRIPT ARGUMENTS` in the folder of this process.

    What Python or torch read as they begin (the order of sets, the number of threads, `sitecustomize`) is in
    a fork what it was in its parent: where such a variable is set, Python itself is started.
    """

    def __init__(self) -> None:
        self._parent: subprocess.Popen[str] | None = None

    def __call__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        if not {"RESUMABLE_STILL", "PYTHONHASHSEED", "OMP_NUM_THREADS"}.isdisjoint(environment):
            return trials.start(command, environment, log)
        return self._ended(command, environment, os.getcwd(), log)

    def in_session(
        self, command: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path, errors: Path
    ) -> int:
        """Start it in a folder and in a session of its own; what it leaves behind is killed."""
        return self._ended(command, environment, str(folder), log, str(errors))

    def _ended(
        self, command: Sequence[str], environment: Mapping[str, str], folder: str, log: Path, errors: str = ""
    ) -> int:
        order = {"arguments": [*map(str, command[1:])], "environment": dict(environment), "folder": folder}
        parent = self._begun()
        assert parent.stdin
        assert parent.stdout
        print(json.dumps({**order, "log": str(log), "errors": errors}), file=parent.stdin, flush=True)
        return int(parent.stdout.readline())

    def _begun(self) -> subprocess.Popen[str]:
        if self._parent is None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self._parent = subprocess.Popen([sys.executable, __file__], **pipes)  # type: ignore[call-overload]
        return self._parent

    def close(self) -> None:
        """End the parent."""
        if self._parent:
            self._parent.communicate()


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """What starts scripts in forks."""
    begun = Forks()
    yield begun
    begun.close()


def main() -> None:
    import gc
    import random

    import numpy as np
    import torch
    import torch.utils.data

    import resumable.audit.audit
    import resumable.state  # noqa: F401 (imported once, for all forks)

    # The first optimizer imports torch's compiler.
    torch.optim.SGD([torch.zeros(1)])
    # What was imported is neither copied nor looked through again in every fork
    gc.freeze()
    if order := next(_forked(), None):
        _become(order)
        # Else all forks would draw the same where a script seeds nothing
        random.seed()
        np.random.seed()
        torch.seed()
        # What is raised ends this process as it ends any other: with a traceback, and exit handlers.
        # Called in a loop of this file, the script's functions would count as begun again in each pass.
        runpy.run_path(sys.argv[0], run_name="__main__")


def _forked() -> Iterator[dict[str, Any]]:
    """Yield, in each fork, its order, and nothing in the process that all are forks of."""
    for line in sys.stdin:
        order = json.loads(line)
        if (child := os.fork()) == 0:
            yield order
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if order["errors"]:
            # Workers of a script that was killed would write to its log until they notice.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        print(code, flush=True)


def _become(order: dict[str, Any]) -> None:
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(log, 1)
    if order["errors"]:
        os.setsid()
        signal.alarm(_LONGEST)
        log = os.open(order["errors"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(log, 2)
    # A process that is killed loses what it has printed and not written.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = order["arguments"]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)


if __name__ == "__main__":
    main()
