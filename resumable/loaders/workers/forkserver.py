"""A fork server for the workers of loaders, in which the signals that the training answers are blocked.

Python's own fork server serves the whole program: a SIGTERM to the process group ends it, and blocking
signals in it would block them in every process that other code starts with it.
"""

from __future__ import annotations

import io
import os
import signal
from multiprocessing import context, forkserver, popen_forkserver, reduction, spawn, util
from multiprocessing.context import set_spawning_popen
from typing import Any

_servers: dict[tuple[int, frozenset[int]], forkserver.ForkServer] = {}


def _server() -> forkserver.ForkServer:
    """Return the server for the signals that are blocked in this thread: it starts with them blocked."""
    key = os.getpid(), frozenset(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))
    if key not in _servers:
        _servers[key] = forkserver.ForkServer()
        shared: Any = forkserver._forkserver
        _servers[key].set_forkserver_preload(shared._preload_modules)
    return _servers[key]


class _Popen(popen_forkserver.Popen):
    _fds: list[int]

    def _launch(self, process_obj: Any) -> None:
        # As Python's own, but for the server.
        prepared, text = spawn.get_preparation_data(process_obj._name), io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(prepared, text)
            reduction.dump(process_obj, text)
        finally:
            set_spawning_popen(None)
        self.sentinel, theirs = _server().connect_to_new_process(self._fds)
        # The worker watches the other end, to see when this process ends.
        self.finalizer = util.Finalize(self, _close, (os.dup(theirs), self.sentinel))
        with open(theirs, "wb") as file:
            file.write(text.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


class _Process(context.ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 (the name that Python calls)
        return _Popen(process_obj)


class Context(context.ForkServerContext):
    """Starts processes as the "forkserver" of Python does, from a server of their own."""

    Process = _Process


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)
