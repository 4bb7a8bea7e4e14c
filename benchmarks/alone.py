"""One contender in a process of its own: its memory, its first save, and whether the state comes back.

The process that measures watches the memory from outside: a library that holds the interpreter's lock
while it saves would stop a thread that looks.
"""

from __future__ import annotations

import contextlib
import re
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from . import measures
from .apart import Apart
from .contenders import CONTENDERS
from .rounds import Failed, Figures
from .training import bytes_of, digest, gpt

LOOK_SECONDS = 0.005
_MEMORY = re.compile(r"^Rss(Anon|Shmem):\s+(\d+) kB", re.MULTILINE)


def measure(name: str, megabytes: float, device: str, folder: Path, limit: float) -> Figures:
    """Let a contender save and load in a process of its own; return its figures."""
    with Apart(_figures, name, megabytes, device, folder) as apart:
        return _watch(apart, limit)


def _watch(apart: Apart, limit: float) -> Figures:
    peaks: dict[str, int] = {}
    phase = ""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if phase:
            peaks[phase] = max(peaks.get(phase, 0), memory(apart.pid))
        if not apart.connection.poll(LOOK_SECONDS):
            continue
        message = apart.receive()
        if isinstance(message, dict):
            return _with_peaks(message, peaks)
        phase = message
        apart.connection.send("go on")
    raise Failed(f"it took longer than {limit:.0f} s")


def _with_peaks(figures: Figures, peaks: dict[str, int]) -> Figures:
    size = figures["bytes"]
    for phase in ("save", "load"):
        grown: float = max(0, peaks[phase] - peaks["before"])
        # Memory that the driver pinned may be in nobody's page tables.
        grown = max(grown, figures.pop(f"pinned_{phase}", 0))
        figures["memory" if phase == "save" else "memory_load"] = grown / size
    return figures


def memory(pid: int) -> int:
    """Return the bytes that no file backs, of a process and of those that it started.

    Memory that they share counts where the first of them has it. Not smaps_rollup, which knows better but
    takes milliseconds and keeps the process from its own memory meanwhile.
    """
    return sum(
        int(found[2]) * 1024
        for one in _tree(pid)
        for found in _MEMORY.finditer(_status(one))
        if one == pid or found[1] == "Anon"
    )


def _status(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/status").read_text()
    return ""


def _tree(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text().split():
                found += _tree(int(child))
    return found


def _figures(connection: Connection, name: str, megabytes: float, device: str, folder: Path) -> None:
    training = gpt(megabytes, device)
    figures: Figures = {"bytes": bytes_of(training.parts)}
    _enter(connection, "before")
    training.steps(2)
    on_device = _peak_on_device(device)
    contender = CONTENDERS[name](training.parts, folder, device)
    training.steps(1)

    _enter(connection, "save")
    first = measures.save(training, contender)
    steady = []
    for _ in range(3):
        contender.tidy()
        steady.append(measures.save(training, contender))
    # Without a step since the last save, a copy of the whole state would be made on the device.
    training.steps(1)
    saved = digest(training.parts)
    wait = contender.save()
    training.steps(2)
    wait()
    figures["pinned_save"] = _pinned(device)

    _enter(connection, "load")
    contender.load()
    training.synchronize()
    _enter(connection, "")
    figures["exact"] = float(digest(training.parts) == saved)
    figures["first_call"] = first["call"] / statistics.median(one["call"] for one in steady)
    figures["first_durable"] = first["durable"]
    figures["first"] = first["durable"] / statistics.median(one["durable"] for one in steady)
    figures["memory_device"] = (_peak_on_device(device) - on_device) / figures["bytes"]
    connection.send(figures)
    contender.close()


def _enter(connection: Connection, phase: str) -> None:
    connection.send(phase)
    connection.recv()


def _peak_on_device(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def _pinned(device: str) -> int:
    if device != "cuda" or not hasattr(torch.cuda, "host_memory_stats"):
        return 0
    statistics_of_host: dict[str, Any] = torch.cuda.host_memory_stats()
    return int(statistics_of_host.get("allocated_bytes.peak", 0))
