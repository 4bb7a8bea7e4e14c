"""Processes of a test, each forked from one interpreter that has imported torch and the library already.

A fork begins in milliseconds where `python script.py` takes seconds, and is otherwise as good as a process of
its own: it has its folder, environment, arguments, `__main__`, output, signals, exit handlers and exit code.
Two things are those of the server: what Python and torch read as they begin (the order of sets, the number of
threads), and that what it imports is there. Tests of these start Python itself.

Output is written line by line, as to a terminal: a process that is killed loses no line.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest

LATE = 124
"""The code of what was ended by its deadline, as timeout(1) has it."""

_READ_AT_START = ("RESUMABLE_STILL", "PYTHONHASHSEED", "OMP_NUM_THREADS")

Command = Sequence[object]
Function = Callable[..., Any]
Env = Mapping[str, str] | None

# Of a moment at which no test has changed it
_ENVIRONMENT = dict(os.environ)


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
        mine, theirs = socket.socketpair()
        with tempfile.TemporaryFile() as file, theirs:
            pickle.dump(order, file)
            file.flush()
            fds = [one.fileno() for one in (theirs, file, out, err)]
            socket.send_fds(server, [str(self._deadline).encode()], fds)
        self._answers = mine.makefile("r")
        self._socket = mine
        self.pid = int(self._answers.readline())

    @property
    def out(self) -> str:
        """What it has printed so far."""
        return _text(self._out)

    @property
    def err(self) -> str:
        """What it has written to stderr so far."""
        return _text(self._err)

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        with selectors.DefaultSelector() as poll:
            poll.register(self._socket, selectors.EVENT_READ)
            return self._life is None and not poll.select(0)

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
            code = int(self._answers.readline())
            said = f"\nended after {self._deadline} s, its deadline\n" if code == LATE else ""
            self._life = Life(code, self.out, self.err + said)
        return self._life


class Forks:
    """Begins processes as forks of one that has also imported some modules."""

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket
        self._others: dict[tuple[str, ...], Forks] = {}

    def preload(self, *modules: str) -> Forks:
        """Return what begins forks of another process, which has imported these modules too."""
        return self._others.setdefault(modules, Forks(*modules))

    def run(self, command: Command, folder: Path, *, environment: Env = None, deadline: float = 60) -> Life:
        """Run `python COMMAND` in a folder to its end; COMMAND may name Python too.

        The environment is added to that of this process.
        """
        return self.begin(command, folder, environment=environment, deadline=deadline).ended()

    def call(
        self, function: Function, *arguments: Any, folder: Path, environment: Env = None, deadline: float = 60
    ) -> Life:
        """Call a function of a module, with one thread, in a process of its own, to its end."""
        how: Any = {"folder": folder, "environment": environment, "deadline": deadline}
        return self.begin_call(function, *arguments, **how).ended()

    def begin(
        self,
        command: Command,
        folder: Path,
        *,
        environment: Env = None,
        deadline: float = 60,
        stop: Stop | None = None,
    ) -> Child:
        """Begin what `run` does, and return while it runs."""
        what = {"command": _arguments(command), "stop": stop, "deadline": deadline}
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
        """Begin what `call` does, and return while it runs."""
        called = {"call": pickle.dumps((function, arguments)), "path": sys.path}
        what = {"command": None, **called, "stop": stop, "deadline": deadline}
        return self._begin(what, folder, {**os.environ, **(environment or {})})

    def kill_and_resume(
        self,
        script: Path | str | Function,
        *arguments: Any,
        folder: Path,
        at: Sequence[int | Stop],
        environment: Env = None,
        deadline: float = 60,
    ) -> Life:
        """Run a script or function, killed after so many steps of each life; return the last life.

        A step is one of an optimizer, counted in that life. After `at` comes a life that runs to its end.
        """
        how: Any = {"folder": folder, "environment": environment, "deadline": deadline}
        begin: Any = partial(self.begin_call, script) if callable(script) else self.begin
        what = arguments if callable(script) else ([script, *arguments],)
        for number, each in enumerate(at):
            stop = each if isinstance(each, Stop) else Stop(each)
            life = begin(*what, **how, stop=stop).ended()
            assert life.code == -stop.signal, f"life {number} ended with {life.code}, {stop}:\n{life.err}"
        return begin(*what, **how).ended().checked()

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
        if self._server is None:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                command = [sys.executable, __file__, str(theirs.fileno()), *self._modules]
                how: Any = {"pass_fds": [theirs.fileno()], "stdin": subprocess.DEVNULL}
                # Not of the group that Ctrl-C ends: the server ends when its socket is closed.
                self._server = subprocess.Popen(command, **how, env=_ENVIRONMENT, start_new_session=True)
        return self._socket

    def close(self) -> None:
        """End the servers, and what they have forked."""
        for other in self._others.values():
            other.close()
        if self._server:
            self._socket.close()
            self._server.wait()


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """What begins processes as forks of an interpreter that has imported torch."""
    begun = Forks()
    yield begun
    begun.close()


def _arguments(command: Command) -> list[str]:
    arguments = [*map(str, command)]
    return arguments[1:] if arguments[0] == sys.executable else arguments


def _text(file: IO[bytes]) -> str:
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


# ------------------------------------------------------------------------------------------------ the server


class _Served:
    """A fork, for the server."""

    def __init__(self, pid: int, answers: socket.socket, deadline: float) -> None:
        self.pid, self.answers, self.fd = pid, answers, os.pidfd_open(pid)
        self.end = time.monotonic() + deadline
        self.is_late = False
        answers.send(f"{pid}\n".encode())

    def end_if_late(self) -> None:
        """Let it tell where it hangs, and a second later kill it."""
        if time.monotonic() >= self.end:
            if self.is_late:
                self.kill()
            else:
                os.kill(self.pid, _WHERE)
            self.is_late, self.end = True, time.monotonic() + 1

    def kill(self) -> None:
        """Kill it, and all that is in its session's group."""
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)

    def bury(self) -> None:
        """Kill what it has left behind, and answer how it ended."""
        # Workers of a script that was killed would write to its files until they notice.
        self.kill()
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        with contextlib.suppress(BrokenPipeError):
            self.answers.send(f"{LATE if self.is_late else code}\n".encode())
        os.close(self.fd)
        self.answers.close()


_WHERE = signal.SIGRTMAX


def _serve(orders: socket.socket) -> list[int]:
    """Return, in each fork, the files of its order; the server itself ends with the process that began it."""
    import warnings

    poll = selectors.DefaultSelector()
    poll.register(orders, selectors.EVENT_READ)
    served: list[_Served] = []
    while True:
        late = min((one.end for one in served), default=None)
        for key, _ in poll.select(late and max(0, late - time.monotonic())):
            one = key.data
            if one is None:
                deadline, files, *_ = socket.recv_fds(orders, 64, 4)
                if not deadline:
                    for one in served:
                        one.kill()
                    os._exit(0)
                answers = socket.socket(fileno=files[0])
                with warnings.catch_warnings():
                    # Newer Pythons warn of the threads of numpy, which it prepares for a fork
                    warnings.simplefilter("ignore", DeprecationWarning)
                    pid = os.fork()
                if pid == 0:
                    poll.close()
                    for sock in (orders, answers, *(other.answers for other in served)):
                        sock.close()
                    for other in served:
                        os.close(other.fd)
                    return files[1:]
                for fd in files[1:]:
                    os.close(fd)
                served.append(one := _Served(pid, answers, float(deadline)))
                poll.register(one.fd, selectors.EVENT_READ, one)
                poll.register(answers, selectors.EVENT_READ, one)
            elif key.fd == one.fd:
                served.remove(one)
                poll.unregister(one.fd)
                with contextlib.suppress(KeyError):
                    poll.unregister(one.answers)
                one.bury()
            else:
                # The other end was closed: nobody waits for it any more.
                poll.unregister(one.answers)
                one.kill()
        for one in served:
            one.end_if_late()


def _warm(modules: Sequence[str]) -> None:
    import faulthandler
    import gc
    import importlib

    import numpy  # noqa: F401
    import torch
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.testing
    import torch.utils.data

    import resumable.audit.audit
    import resumable.state  # noqa: F401

    for module in modules:
        importlib.import_module(module)
    threads = torch.get_num_threads()
    # A pool of threads would be gone in the forks, and waited for
    torch.set_num_threads(1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    for rows in torch.utils.data.DataLoader(torch.ones(2, 2)):
        model(rows).sum().backward()
        optimizer.step()
    torch.set_num_threads(threads)
    faulthandler.register(_WHERE)
    del model, optimizer, rows
    gc.collect()
    # What was imported is neither copied nor looked through again in every fork
    gc.freeze()


def _become(order: dict[str, Any], out: int, err: int) -> None:
    """Be what an order says, apart from its code."""
    import ctypes
    import random

    import numpy as np
    import torch

    server = os.getppid()
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: killed when the server is
    if os.getppid() != server:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    # Else all forks would draw the same where a script seeds nothing
    random.seed()
    np.random.seed()
    torch.seed()
    if order["stop"]:
        _stop_after(*order["stop"])


def _stop_after(steps: int, seconds: float, number: int) -> None:
    import threading

    from torch.optim.optimizer import register_optimizer_step_post_hook

    done = 0

    def count(*_: Any) -> None:
        nonlocal done
        done += 1
        if done == steps and seconds:
            threading.Timer(seconds, os.kill, (os.getpid(), number)).start()
        elif done == steps:
            os.kill(os.getpid(), number)

    register_optimizer_step_post_hook(count)


def _code(command: list[str]) -> Callable[[], object]:
    """Return what runs a command line of Python, as its `__main__`."""
    import runpy
    import warnings
    from importlib.machinery import SourceFileLoader

    if asked := os.environ.get("PYTHONWARNINGS"):
        warnings._processoptions(asked.split(","))  # type: ignore[attr-defined]
    while command[0] == "-W":
        warnings._processoptions([command[1]])  # type: ignore[attr-defined]
        command = command[2:]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [one for one in paths if one and one not in sys.path]
    sys.argv = command
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path[0] = os.getcwd()
        return lambda: runpy._run_module_as_main(command[1])  # type: ignore[attr-defined]
    if command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        sys.path[0] = ""
        code = compile(command[1], "<string>", "exec")
    else:
        assert not command[0].startswith("-"), f"a fork knows no {command[0]}"
        file = os.path.abspath(command[0])
        sys.path[0] = os.path.dirname(os.path.realpath(file))
        main.__file__, main.__loader__ = file, SourceFileLoader("__main__", file)
        code = compile(Path(file).read_bytes(), file, "exec")
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    return lambda: exec(code, main.__dict__)


def _called(call: bytes, path: list[str]) -> Callable[[], object]:
    import torch

    torch.set_num_threads(1)
    sys.path[:] = path
    sys.modules["__main__"] = types.ModuleType("__main__")
    function, arguments = pickle.loads(call)
    return lambda: function(*arguments)


def _main(orders: int, *modules: str) -> None:
    _warm(modules)
    order, out, err = _serve(socket.socket(fileno=orders))
    with os.fdopen(order, "rb") as file:
        file.seek(0)
        told = pickle.load(file)
    _become(told, out, err)
    # Not in a loop of this file: the functions of a script would count as begun again in each pass.
    code = 0
    try:
        (_code(told["command"]) if told["command"] else _called(told["call"], told["path"]))()
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
        if code and code is not exc.code:
            print(exc.code, file=sys.stderr)
    except BaseException as exc:
        # Show no frames of this file
        trace = exc.__traceback__
        while trace and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            trace = trace.tb_next
        sys.excepthook(type(exc), exc.with_traceback(trace), trace)
        code = -signal.SIGINT if isinstance(exc, KeyboardInterrupt) else 1
    _end(code)


def _end(code: int) -> None:
    """End as Python does, but for what is the server's: to take its modules apart takes 0.3 s."""
    import atexit
    import gc
    import threading

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    vars(sys.modules["__main__"]).clear()
    gc.collect()
    sys.stdout.flush()
    sys.stderr.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 255)


if __name__ == "__main__":
    _main(int(sys.argv[1]), *sys.argv[2:])
