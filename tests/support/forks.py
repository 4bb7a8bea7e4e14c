"""Processes of a test, each forked from one interpreter that has imported torch and the library already.

A fork begins in milliseconds where `python script.py` takes seconds, and is otherwise as good as a process of
its own: it has its folder, environment, arguments, `__main__`, output, signals, exit handlers and exit code.
What differs: Python and torch have read some settings as the server began (the order of sets, the number of
threads), and the server's modules are there, and are not taken apart at the end. Tests of these start Python.
The workers that torchrun starts are forks too, and children of torchrun as its own would be.

Output is written line by line, as to a terminal: a process that is killed loses no line.
"""

from __future__ import annotations

import atexit
import inspect
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest

LATE = 124
"""The code of what was ended by its deadline, as timeout(1) has it."""

_SERVER = Path(__file__).with_name("fork_server.py")
_READ_AT_START = ("RESUMABLE_STILL", "PYTHONHASHSEED", "OMP_NUM_THREADS")

Command = Sequence[object]
Function = Callable[..., Any]
Env = Mapping[str, str] | None

# Of a moment at which no test has changed it
_ENVIRONMENT = dict(os.environ)


def leave_variables_alone() -> None:
    """Leave variables alone in this process: those of a test are no script's, and would be put back."""
    from resumable import RunState

    load: Any = RunState.load
    inspect.unwrap(load.__func__).__kwdefaults__["variables"] = False


class Life(NamedTuple):
    """How a process has ended."""

    code: int
    """Its exit code; of a signal, minus its number."""
    out: str
    err: str

    def checked(self) -> Life:
        """Return it if it ended well; else fail, and show its errors."""
        assert self.code == 0, f"it ended with {self.code}:\n{self.err}"
        return self


class Stop(NamedTuple):
    """A signal that a process sends to itself, so many seconds after so many steps of optimizers."""

    steps: int
    seconds: float = 0
    signal: int = signal.SIGKILL


class Child:
    """A process that has begun. It is killed when the last reference to it goes."""

    def __init__(self, order: Mapping[str, Any], server: socket.socket, out: IO[bytes], err: IO[bytes]):
        self._life: Life | None = None
        self._out, self._err, self._deadline = out, err, order["deadline"]
        self._answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with tempfile.TemporaryFile() as file, theirs:
            pickle.dump(order, file)
            file.flush()
            fds = [one.fileno() for one in (theirs, file, out, err)]
            socket.send_fds(server, [str(self._deadline).encode()], fds)
        self.pid = int(self._answer())

    @property
    def out(self) -> str:
        """What it has printed so far."""
        return self._life.out if self._life else _text(self._out)

    @property
    def err(self) -> str:
        """What it has written to stderr so far."""
        return self._life.err if self._life else _text(self._err)

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return not self.has_ended(0)

    def has_ended(self, within: float) -> bool:
        """Return whether it ends within so many seconds."""
        return self._life is not None or bool(select.select([self._answers], [], [], within)[0])

    def send(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.is_alive:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send(signal.SIGKILL)

    def wait_for(self, text: str) -> None:
        """Return once it has printed this; fail if it ends without."""
        while text not in self.out:
            is_over = not self.is_alive
            assert text in self.out or not is_over, f"{text!r} is not in:\n{self.out}\n{self.err}"
            time.sleep(0.005)

    def ended(self) -> Life:
        """Wait until it has ended."""
        if self._life is None:
            code = self._answer()
            said = f"\nended after {self._deadline} s, its deadline\n" if code == "late" else ""
            self._life = Life(LATE if code == "late" else int(code), self.out, self.err + said)
            self._close()
        return self._life

    def _answer(self) -> str:
        answer = self._answers.recv(32).decode()
        assert answer, "the process that forks has ended; stderr says why"
        return answer

    def _close(self) -> None:
        for one in (self._answers, self._out, self._err):
            one.close()

    __del__ = _close


class Forks:
    """Begins processes as forks of one that has also imported some modules."""

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._server: subprocess.Popen[bytes] | None = None
        self._owner: socket.socket
        self._address = ""
        self._socket: socket.socket | None = None
        self._other: Forks | None = None

    def share(self) -> str:
        """Return an address where other processes `join` this one: one interpreter forks for all of them."""
        if self._server and self._server.poll() is not None:
            self.close()
        if self._server is None:
            self._start()
        return self._address

    def join(self, address: str) -> None:
        """Begin processes as forks of the interpreter that another process shares, as long as that lives."""
        self._address = address

    def preload(self, *modules: str) -> Forks:
        """Return what begins forks of another process, which has imported these modules too.

        A script stands for what it imports. There is one such process at a time.
        """
        if self._other is None or self._other._modules != modules:
            if self._other:
                self._other.close()
            self._other = Forks(*modules)
        return self._other

    def run(self, command: Command, folder: Path, **how: Any) -> Life:
        """Run `python COMMAND` in a folder to its end, as `begin` begins it."""
        return self.begin(command, folder, **how).ended()

    def call(self, function: Function, *arguments: Any, folder: Path, **how: Any) -> Life:
        """Call a function in a process of its own to its end, as `begin_call` begins it."""
        return self.begin_call(function, *arguments, folder=folder, **how).ended()

    def begin(
        self,
        command: Command,
        folder: Path,
        *,
        environment: Env = None,
        deadline: float = 60,
        stop: Stop | None = None,
    ) -> Child:
        """Begin `python COMMAND`, which may name Python too, with more environment than this process has.

        It ends at its deadline, so many seconds later, or by itself at a stop.
        """
        what = {"command": _arguments(command), "stop": stop and tuple(stop), "deadline": deadline}
        return self._begin(what, folder, {**os.environ, **(environment or {})})

    def begin_call(
        self,
        function: Function,
        *arguments: Any,
        folder: Path,
        environment: Env = None,
        deadline: float = 60,
        stop: Stop | None = None,
    ) -> Child:
        """Begin a call of a module's function, with one thread, as `begin` begins a command."""
        called = {"call": pickle.dumps((function, arguments)), "path": sys.path}
        what = {"command": None, **called, "stop": stop and tuple(stop), "deadline": deadline}
        return self._begin(what, folder, {**os.environ, **(environment or {})})

    def kill_and_resume(
        self,
        script: Path | str | Function,
        *arguments: Any,
        folder: Path,
        at: Sequence[int | Stop],
        **how: Any,
    ) -> Life:
        """Run a script or function, killed after so many steps of each life; return the last life.

        A step is one of an optimizer, counted in that life. After `at` comes a life that runs to its end.
        """
        begin: Any = partial(self.begin_call, script) if callable(script) else self.begin
        what = arguments if callable(script) else ([script, *arguments],)
        for number, each in enumerate(at):
            stop = each if isinstance(each, Stop) else Stop(each)
            life = begin(*what, folder=folder, stop=stop, **how).ended()
            assert life.code == -stop.signal, f"life {number} ended with {life.code}, {stop}:\n{life.err}"
        return begin(*what, folder=folder, **how).ended().checked()

    def __call__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        """Start a command as `audit(start=...)` wants it: in this folder, with this environment and log."""
        if any(environment.get(name) != _ENVIRONMENT.get(name) for name in _READ_AT_START):
            from resumable.audit import trials

            return trials.start(command, environment, log)
        order = {"command": _arguments(command), "stop": None, "deadline": 300}
        with log.open("w+b") as file:
            return self._begin(order, Path.cwd(), environment, file, file).ended().code

    def _begin(
        self,
        order: dict[str, Any],
        folder: Path,
        environment: Mapping[str, str],
        out: IO[bytes] | None = None,
        err: IO[bytes] | None = None,
    ) -> Child:
        order |= {"folder": str(folder), "environment": {**environment}}
        return Child(order, self._begun(), out or tempfile.TemporaryFile(), err or tempfile.TemporaryFile())

    def _begun(self) -> socket.socket:
        if self._server and self._server.poll() is not None:
            self.close()
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._socket.connect(self._address or self.share())
        return self._socket

    def _start(self) -> None:
        self._owner, theirs = socket.socketpair()
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            # In no folder: the kernel finds a name, and forgets it with the socket
            listener.bind("")
            listener.listen()
            self._address = listener.getsockname().decode()
            files = (listener.fileno(), theirs.fileno())
            command = [sys.executable, str(_SERVER), *map(str, files), *self._modules]
            # Of two threads on two busy cores one waits for the other most of the time.
            environment = {"OMP_NUM_THREADS": "1", **_ENVIRONMENT}
            # Not of the group that Ctrl-C ends: the server ends when its owner's socket is closed.
            how: Any = {"pass_fds": files, "stdin": subprocess.DEVNULL, "start_new_session": True}
            self._server = subprocess.Popen(command, env=environment, **how)

    def close(self) -> None:
        """End its processes; another call begins new ones."""
        if self._other:
            self._other.close()
        if self._socket:
            self._socket.close()
            self._socket = None
        if self._server:
            self._owner.close()
            self._server.wait()
            self._server, self._address = None, ""


WARM = Forks()
atexit.register(WARM.close)


@pytest.fixture(scope="session")
def forks() -> Forks:
    """What begins processes as forks of an interpreter that has imported torch."""
    return WARM


def _arguments(command: Command) -> list[str]:
    arguments = [*map(str, command)]
    return arguments[1:] if arguments[0] == sys.executable else arguments


def _text(file: IO[bytes]) -> str:
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")
