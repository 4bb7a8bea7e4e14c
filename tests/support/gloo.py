"""Real processes of one training: a gloo group, in which a test runs a function of its own."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pickle
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

from forks import WARM, Child, leave_variables_alone


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
    end = time.monotonic() + limit
    ranks = [
        WARM.begin_call(
            *(_call, rank, size, port, body, args),
            folder=Path.cwd(),
            environment=env[rank] if env else None,
            deadline=limit + 20,
        )
        for rank in range(size)
    ]
    # Rank 0 has the store: it stays until the others have ended.
    for child in [*ranks[1:], ranks[0]]:
        if child is ranks[0]:
            port.with_suffix(".said").touch()
        # A process that is stopped never ends
        while time.monotonic() < end and not child.has_ended(0.2) and not _is_stopped(child.pid):
            pass
    for child in ranks:
        child.kill()
    return [_ended(child, _answer(port, rank)) for rank, child in enumerate(ranks)]


def _answer(port: Path, rank: int) -> Path:
    return port.with_suffix(f".{rank}")


def _ended(child: Child, answer: Path) -> Ended:
    life = child.ended()
    sys.stderr.write(life.err)
    found = pickle.loads(answer.read_bytes()) if answer.exists() else Ended()
    found.exitcode, found.printed = life.code, life.out
    return found


def _is_stopped(pid: int) -> bool:
    # A process that ends between the opening and the reading of its file is not found in another way
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def _call(rank: int, size: int, port: Path, body: Callable[..., Any], args: Any) -> None:
    join(rank, size, port)
    found, began = Ended(), time.monotonic()
    leave_variables_alone()
    try:
        found.value = body(rank, *args)
    except BaseException as exc:
        traceback.print_exc()
        found.error = exc
    found.seconds = time.monotonic() - began
    fresh = port.with_suffix(f".{rank}-new")
    fresh.write_bytes(pickle.dumps(found))
    fresh.rename(_answer(port, rank))
    # Not for ever: one of the others may be waiting for this one to leave.
    end = time.monotonic() + 2
    while rank == 0 and time.monotonic() < end and not port.with_suffix(".said").exists():
        time.sleep(0.01)


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
