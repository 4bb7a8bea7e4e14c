"""The interpreter that `forks.py` forks processes from: fork_server.py LISTENER OWNER MODULES.

Or torchrun itself, which forks its workers: fork_server.py torchrun ARGUMENTS.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import select
import selectors
import signal
import socket
import struct
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

_WHERE = signal.SIGRTMAX
"""Lets a process write where each of its threads is."""

_code = 0
"""What this process ends with."""


class _Served:
    """A fork, for the server."""

    def __init__(self, pid: int, answers: socket.socket, deadline: float) -> None:
        self.pid, self.answers, self.fd = pid, answers, os.pidfd_open(pid)
        self.end = time.monotonic() + deadline
        self.is_late = False
        self.answer(pid)

    def answer(self, what: object) -> None:
        """Tell it to who ordered this fork, unless that has ended."""
        with contextlib.suppress(OSError):
            self.answers.send(str(what).encode())

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
        self.answer("late" if self.is_late else code)
        os.close(self.fd)
        self.answers.close()


def _serve(listener: socket.socket, owner: socket.socket) -> list[int]:
    """Fork for each order, and return its files in the fork; exit when the owner closes its socket."""
    poll = selectors.DefaultSelector()
    clients = [listener, owner]
    for one in clients:
        poll.register(one, selectors.EVENT_READ)
    served: list[_Served] = []
    while True:
        late = min((one.end for one in served), default=None)
        for key, _ in poll.select(late and max(0, late - time.monotonic())):
            one = key.data
            if key.fileobj is owner:
                for each in served:
                    each.kill()
                os._exit(0)
            elif key.fileobj is listener:
                clients.append(_accept(listener))
                poll.register(clients[-1], selectors.EVENT_READ)
            elif one is None:
                deadline, files, *_ = socket.recv_fds(key.fileobj, 64, 4)
                if not deadline:
                    # The client has ended; its closed answers end its forks
                    poll.unregister(key.fileobj)
                    clients.remove(key.fileobj)
                    key.fileobj.close()
                    continue
                answers = socket.socket(fileno=files[0])
                if (pid := _fork()) == 0:
                    poll.close()
                    for sock in (*clients, answers, *(other.answers for other in served)):
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
            elif one in served:
                # The other end was closed: nobody waits for it any more.
                poll.unregister(one.answers)
                one.kill()
        for one in served:
            one.end_if_late()


def _accept(listener: socket.socket) -> socket.socket:
    """Return the connection of a client; the name of the listener has no owner, so any user could be one."""
    client = listener.accept()[0]
    _, user, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.getuid():
        client.shutdown(socket.SHUT_RDWR)
    return client


def _fork() -> int:
    import warnings

    with warnings.catch_warnings():
        # Newer Pythons warn of the threads of numpy, which it prepares for a fork
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


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
        for name, attribute in _imports(module) if module.endswith(".py") else [(module, "")]:
            # Some packages import what is behind a name when it is asked for
            getattr(importlib.import_module(name), attribute, None)
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


def _imports(script: str) -> Iterator[tuple[str, str]]:
    import ast

    for node in ast.walk(ast.parse(Path(script).read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


def _become(order: dict[str, Any], out: int, err: int) -> None:
    """Be what an order says, apart from its code."""
    import random

    import numpy as np
    import torch

    os.setsid()
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


def _end_with(server: int) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: killed when the server is
    if os.getppid() != server:
        os._exit(1)


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


def _forking_workers(command: list[str]) -> list[str]:
    """Return the command to run: torchrun's own here, a worker's in each worker.

    Workers are forks of a process that is as torchrun was before it had threads, but torchrun's own children:
    it adopts them. So signals, codes and kills are as of processes that it starts.
    """
    import ctypes
    import subprocess

    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: adopts what its descendants leave behind
    orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if _fork() == 0:
        orders.close()
        return _worker(theirs)
    theirs.close()
    start = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def fork(popen: Any, args: Sequence[str], *how: Any) -> None:
        if args[0] != sys.executable:
            start(popen, args, *how)
            return
        environment, out, err = how[5], how[12], how[14]
        order = {"command": [*args[1:]], "folder": os.getcwd(), "environment": environment, "stop": None}
        fds = [1 if out == -1 else out, 2 if err == -1 else err]
        socket.send_fds(orders, [pickle.dumps(order)], fds)
        popen.pid, popen._child_created = int(orders.recv(32)), True

    subprocess.Popen._execute_child = fork  # type: ignore[attr-defined]
    return command


def _worker(orders: socket.socket) -> list[str]:
    """Fork a worker for each order, and return its command there; exit with torchrun."""
    # Tests signal torchrun's group, and look for its workers by their folder
    os.setsid()
    os.chdir("/")
    while True:
        order, files, *_ = socket.recv_fds(orders, 1 << 20, 2)
        if not order:
            os._exit(0)
        if between := _fork():
            os.waitpid(between, 0)
            for fd in files:
                os.close(fd)
            continue
        between = os.getpid()
        if _fork():
            os._exit(0)
        while os.getppid() == between:
            time.sleep(0.001)
        orders.send(str(os.getpid()).encode())
        orders.close()
        _become(pickle.loads(order), *files)
        return pickle.loads(order)["command"]


def _command(command: list[str]) -> Callable[[], object]:
    """Return what runs a command line of Python, as its `__main__`."""
    import runpy
    import warnings
    from importlib.machinery import SourceFileLoader

    if asked := os.environ.get("PYTHONWARNINGS"):
        warnings._processoptions(asked.split(","))  # type: ignore[attr-defined]
    if command[0] == "-u":
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        command = command[1:]
    while command[0] == "-W":
        warnings._processoptions([command[1]])  # type: ignore[attr-defined]
        command = command[2:]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [one for one in paths if one and one not in sys.path[1:]]
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


def _order(listener: str, owner: str, *modules: str) -> dict[str, Any]:
    """Return what is ordered, in the process that is to be it."""
    sockets, server = [socket.socket(fileno=int(fd)) for fd in (listener, owner)], os.getpid()
    # Import nothing until a fork is asked for
    if sockets[1] in select.select(sockets, [], [])[0]:
        os._exit(0)
    _warm(modules)
    file, out, err = _serve(*sockets)
    with os.fdopen(file, "rb") as opened:
        opened.seek(0)
        order = pickle.load(opened)
    _end_with(server)
    _become(order, out, err)
    return order


def _main(*arguments: str) -> None:
    global _code
    atexit.register(_leave)
    torchrun = ["-m", "torch.distributed.run"]
    if arguments[0] == "torchrun":
        _warm([])
        order = {"command": [*torchrun, *arguments[1:]]}
    else:
        order = _order(*arguments)
    if order["command"] and order["command"][:2] == torchrun:
        order["command"] = _forking_workers(order["command"])
    # Not in a loop of this file: the functions of a script would count as begun again in each pass.
    try:
        (_command(order["command"]) if order["command"] else _called(order["call"], order["path"]))()
    except SystemExit as exc:
        _code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
        if _code and exc.code is not _code:
            print(exc.code, file=sys.stderr)
    except BaseException as exc:
        # As where nothing has called the script
        trace = exc.__traceback__
        while trace and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            trace = trace.tb_next
        sys.last_type, sys.last_value, sys.last_traceback = type(exc), exc.with_traceback(trace), trace
        sys.last_exc = exc
        sys.excepthook(type(exc), exc, trace)
        _code = -signal.SIGINT if isinstance(exc, KeyboardInterrupt) else 1


def _leave() -> NoReturn:
    """Leave after all other exit handlers: to take apart the modules of the server would take 0.3 s."""
    import gc

    vars(sys.modules["__main__"]).clear()
    gc.collect()
    if (module := sys.modules.get("coverage")) and (measured := module.Coverage.current()):
        # Its exit handler is older
        measured.stop()
        measured.save()
    sys.stdout.flush()
    sys.stderr.flush()
    if _code < 0:
        signal.signal(-_code, signal.SIG_DFL)
        os.kill(os.getpid(), -_code)
    os._exit(_code & 255)


if __name__ == "__main__":
    _main(*sys.argv[1:])
