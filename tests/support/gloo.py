"""Real processes of one training: a gloo group, in which a test runs a function of its own."""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

_context: Any = multiprocessing.get_context("forkserver")
# Imported once, in the process that the others are forked from: to import torch takes seconds.
_context.set_forkserver_preload(
    ["torch.utils.data", "torch.distributed.fsdp", "torch._dynamo", "resumable.state", "torch.testing"]
)


@dataclass
class Ended:
    """How a process has ended."""

    value: Any = None
    error: BaseException | None = None
    printed: str = ""
    seconds: float = 0.0
    exitcode: int | None = None


def run(
    size: int,
    body: Callable[..., Any],
    *args: Any,
    folder: Path,
    limit: float = 60,
    env: Sequence[dict[str, str]] = (),
) -> list[Ended]:
    """Call `body(rank, *args)` in each process of a group; what still runs at the limit is killed."""
    folder.mkdir(parents=True, exist_ok=True)
    port = folder / f"port-{time.monotonic_ns()}"
    answers = [_context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        _context.Process(
            target=_call,
            args=(rank, size, port, answers[rank][1], body, args, dict(env[rank]) if env else {}),
        )
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for _, theirs in answers:
        theirs.close()
    end = time.monotonic() + limit
    ended = [_awaited(process, answer, end) for process, (answer, _) in zip(processes, answers, strict=True)]
    for process in processes:
        process.kill()
        process.join()
    return ended


def _awaited(process: Any, answer: Any, end: float) -> Ended:
    found = Ended()
    # A process that was killed leaves an empty pipe, and one that was stopped nothing
    with contextlib.suppress(EOFError):
        while time.monotonic() < end and not _is_stopped(process.pid):
            if answer.poll(0.2):
                found = answer.recv()
                process.join(max(0.0, min(10.0, end - time.monotonic())))
                break
    found.exitcode = process.exitcode
    return found


def _is_stopped(pid: int) -> bool:
    # A process that ends between the opening and the reading of its file is not found in another way
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def _call(
    rank: int, size: int, port: Path, answer: Any, body: Callable[..., Any], args: Any, env: dict[str, str]
) -> None:
    import io

    import torch

    os.environ.update(env)
    # Else workers of loaders would be started as these processes are
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    join(rank, size, port)
    found, printed, began = Ended(), io.StringIO(), time.monotonic()
    with contextlib.redirect_stdout(printed):
        try:
            found.value = body(rank, *args)
        except BaseException as exc:
            traceback.print_exc()
            found.error = exc
    found.printed, found.seconds = printed.getvalue(), time.monotonic() - began
    _save_coverage()
    answer.send(found)
    answer.close()
    sys.stderr.flush()
    # The store is in rank 0: it stays until the others have had their say.
    if rank == 0:
        time.sleep(0.2)


def _save_coverage() -> None:
    # A process that was forked ends without it
    if (module := sys.modules.get("coverage")) and (measured := module.Coverage.current()):
        measured.stop()
        measured.save()


def join(rank: int, size: int, port: Path) -> None:
    """Make this process the one of that rank; the others find it by what rank 0 writes to the file `port`."""
    import torch.distributed as dist

    wait = timedelta(seconds=30)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, timeout=wait, wait_for_workers=False)
        fresh = port.with_suffix(".new")
        fresh.write_text(str(store.port))
        fresh.rename(port)
    else:
        while not port.exists():
            time.sleep(0.01)
        number = int(port.read_text())
        store = dist.TCPStore("127.0.0.1", number, size, is_master=False, timeout=wait)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=wait)


def alone(test: Callable[..., None]) -> Callable[..., None]:
    """Let a test run in a process of its own, which is a group of one.

    What torch keeps of a group (DTensor does, in each thread) hangs whatever is forked from another thread.
    """

    @functools.wraps(test)
    def in_its_own(**arguments: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (ended,) = run(1, _wrapped, test.__module__, test.__name__, arguments, folder=Path(folder))
        if ended.error:
            raise ended.error
        assert ended.exitcode == 0

    return in_its_own


def _wrapped(_: int, module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**arguments)


def stop_myself() -> None:
    """Stop this process as a debugger or a machine that hangs would."""
    os.kill(os.getpid(), signal.SIGSTOP)


def kill_myself() -> None:
    """End this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)
