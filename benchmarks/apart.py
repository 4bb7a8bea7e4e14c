"""A process of its own for a contender: what it leaks, breaks or never ends is not the others'."""

from __future__ import annotations

import logging
import multiprocessing
import os
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import measures
from .contenders import CONTENDERS
from .rounds import Failed, Figures, reason_of
from .training import small_parameters, small_tensors

if TYPE_CHECKING:
    from typing_extensions import Self

# The server imports once what all need, and forks: no thread of another library is there yet.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch.distributed.checkpoint", "torch._dynamo"])
TURN_SECONDS = 120.0


class Apart:
    """A process that does a job, which gets one end of a connection."""

    def __init__(self, job: Callable[..., None], *arguments: Any) -> None:
        self.connection, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_run, args=(theirs, job, arguments))
        self._process.start()
        theirs.close()
        self.pid = self._process.pid or 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def receive(self) -> Any:
        """Return what the process sends; raise what it died of."""
        try:
            message = self.connection.recv()
        except (EOFError, ConnectionError):
            raise Failed("its process died") from None
        if isinstance(message, Failed):
            raise message
        return message

    def close(self) -> None:
        """End the process."""
        self.connection.close()
        # By itself, if it can: it may have started a process that it ends.
        self._process.join(10)
        self._process.kill()
        self._process.join()


def _run(connection: Connection, job: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore")
    logging.disable()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        job(connection, *arguments)
    except EOFError:
        return
    except Exception as exc:
        connection.send(Failed(reason_of(exc)))


class SmallApart(Apart):
    """A contender with many small tensors: a job for `in_turns`."""

    def __init__(self, kind: str, name: str, count: int, device: str, folder: Path) -> None:
        super().__init__(_serve, kind, name, count, device, folder)

    def __call__(self, number: int) -> Figures:
        """Save and load once."""
        self.connection.send(number)
        if not self.connection.poll(TURN_SECONDS):
            self._process.kill()
            raise Failed(f"it took longer than {TURN_SECONDS:.0f} s")
        return dict(self.receive())


SMALL = {"tensors": small_tensors, "parameters": small_parameters}


def _serve(connection: Connection, kind: str, name: str, count: int, device: str, folder: Path) -> None:
    training = SMALL[kind](count, device)
    contender = CONTENDERS[name](training.parts, folder, device)
    while True:
        connection.recv()
        connection.send(measures.save_and_load(training, contender))
