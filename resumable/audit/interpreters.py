"""Starts a script in forks of interpreters that have imported torch already."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from . import trials

_COUNT = 3
"""As many as trainings without a stop, so that no two of those have the same hash seed or addresses."""
_SERVER = Path(__file__).parent / "fork_server.py"


class Interpreters:
    """What starts a command: in a fork where it can be forked, else in a process of its own.

    The forks of one interpreter have its hash seed, so each start takes the next interpreter.
    """

    def __init__(self, command: Sequence[str], folder: Path, told: Callable[[str], None]) -> None:
        self._command = command
        self._folder = folder
        self._told = told
        self._open: list[_Interpreter] = []
        self._starts = 0

    def close(self) -> None:
        """End them."""
        for one in self._open:
            one.close()

    def __call__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        """Start the command and return its exit code."""
        self._starts += 1
        one = self._next(environment) if _can_be_forked(command) else None
        if one and one.is_ready() and one.serves(environment):
            code = one.run(command, environment, log)
            if code is not None:
                return code
        if self._starts == 1:
            self._told("(each start imports torch again) ")
        return trials.start(command, environment, log)

    def _next(self, environment: Mapping[str, str]) -> _Interpreter:
        place = (self._starts - 1) % _COUNT
        # The next one imports torch while the script runs.
        while len(self._open) < min(place + 2, _COUNT):
            log = self._folder / f"interpreter-{len(self._open)}"
            self._open.append(_Interpreter(self._command, environment, log))
        return self._open[place]


def _can_be_forked(command: Sequence[str]) -> bool:
    program, *rest = command
    rest = rest[rest[:1] == ["-u"] :]
    is_python = re.fullmatch(r"python[\d.]*", os.path.basename(program))
    is_script = rest and rest[0].endswith(".py") and os.path.isfile(rest[0])
    is_module = rest[:1] == ["-m"] and len(rest) > 1
    # What a fork of macOS's own libraries does is undefined.
    is_possible = sys.platform == "linux" and "PYTHONSAFEPATH" not in os.environ
    return bool(is_possible and is_python and (is_script or is_module))


class _Interpreter:
    """A process that has imported torch, and runs the script in forks of itself."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._environment = _shared(environment)
        self._plan = str(log)
        before = 2 if command[1] == "-u" else 1
        ours, theirs = socket.socketpair()
        with theirs, open(log, "wb") as file:
            self._process = subprocess.Popen(
                [*command[:before], str(_SERVER), str(theirs.fileno()), *command[before:]],
                # A fork that is left behind is found by it: its own environment is the interpreter's.
                env={**environment, "RESUMABLE_AUDIT": self._plan},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        self._socket, self._said = ours, ours.makefile()
        self._is_ready: bool | None = None

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Whether a fork could not tell this environment from the one that the interpreter began with."""
        return _shared(environment) == self._environment

    def is_ready(self) -> bool:
        """Wait until it has imported torch; return whether it could, and can be forked."""
        if self._is_ready is None:
            self._is_ready = self._said.readline() == "ready\n"
        return self._is_ready

    def run(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> int | None:
        """Run the script in a fork, and return its exit code; Ctrl-C ends it too.

        None: the interpreter has been killed before the script began.
        """
        order = {"command": [*command], "environment": dict(environment), "log": str(log)}
        child = code = ""
        try:
            with contextlib.suppress(ConnectionError):
                self._socket.sendall(json.dumps(order).encode() + b"\n")
                child, code = self._said.readline(), self._said.readline()
        finally:
            if not code:
                self._is_ready = False
                trials.kill_all_with(self._plan, *filter(None, [environment.get("RESUMABLE_AUDIT")]))
        # The exit code of a script that had begun is lost: it counts as killed too.
        return int(code) if code else -signal.SIGKILL if child else None

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        self._said.close()
        self._socket.close()


_OF_A_START = ("AUDIT", "RUN_DIR", "RESUME", "REMOTE", "TRACE")


def _shared(environment: Mapping[str, str]) -> dict[str, str]:
    own = {f"RESUMABLE_{name}" for name in _OF_A_START}
    return {name: value for name, value in environment.items() if name not in own}
