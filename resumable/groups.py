"""Groups of arguments of `RunState.load`: `Preempt`, `Remote`, `Ranks`, `Trace`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, TypedDict

from .run.policy import Push

SignalName = Literal[
    "SIGTERM",
    "SIGUSR1",
    "SIGINT",
    "SIGUSR2",
    "SIGHUP",
    "SIGQUIT",
    "SIGALRM",
    "SIGXCPU",
    "SIGBREAK",
]
ON_SIGNALS: tuple[SignalName, ...] = ("SIGTERM", "SIGUSR1", "SIGINT")
"""Signals with which queues, clusters and people end a training; not every system has all."""
TRACE_EVERY = 100


class KeepRules(TypedDict, total=False):
    """Which checkpoints stay: how many of the newest and of the best, and those at each multiple."""

    newest: int
    best: int
    every: int | str | Sequence[int | str]


Keep = int | KeepRules | None
Every = int | str | Sequence[int | str] | None
ResumeWord = Literal["auto", "must", "never", "best", "newest", "latest", "last"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempt:
    """When and how the loops end early: each time they save first.

    Args:
        max_time: Save and exit after this time, such as "3h50m" or 3600 (seconds), counted from the start of
            the SLURM job, or else of the process.
        on_preempt: "exit" with 128 + the signal's number, or "raise" Preempted.
        signals: The names of the signals at which the loops save and end; () for none.

    >>> Preempt(max_time="23h50m", on_preempt="raise").signals
    ('SIGTERM', 'SIGUSR1', 'SIGINT')
    """

    max_time: float | str | None = None
    on_preempt: Literal["exit", "raise"] = "exit"
    signals: Sequence[SignalName] = ON_SIGNALS


@dataclass(frozen=True, slots=True)
class Remote:
    """Copies of the checkpoints elsewhere, made in the background.

    Args:
        url: An address such as "s3://bucket/exp"; RESUMABLE_REMOTE overrides it.
        push: Which checkpoints to copy: "best", "newest" (and the best) or "all".
        keep: How many of the newest to keep there (None: all), or a dict, as in `RunState.load`.
        timeout: How long `close()` waits for the copies, in seconds or as "5 min".
        options: Arguments of fsspec's filesystem, such as {"endpoint_url": "..."}.

    >>> Remote("s3://bucket/exp", push="best").keep
    3
    """

    url: str | None = None
    _: KW_ONLY
    push: Push = "newest"
    keep: Keep = 3
    timeout: float | str = "5 min"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """How the processes of a distributed training save together.

    Args:
        per_rank: The names in `extra` that differ by process.
        timeout: How many seconds a process waits for another.
        elastic: Whether the number of processes may change.
        shared: Whether all processes see the same disk; if not, each node keeps a copy, or its shards.
        write: Whether "one" process or "all" write what all processes have.
        check_replicas: Whether each save compares the replicas.

    >>> Ranks(per_rank=["sampler"], timeout=300).elastic
    True
    """

    per_rank: Sequence[str] = ()
    timeout: float | str = 60
    elastic: bool = True
    shared: bool = True
    write: Literal["one", "all"] = "one"
    check_replicas: bool = False


@dataclass(frozen=True, slots=True)
class Trace:
    """A file that gets a line at each boundary, for `resumable diff --trace`.

    Args:
        file: The file; RESUMABLE_TRACE overrides it.
        every: After how many steps a line has a digest of each part; 0: only at the start.

    >>> Trace("trace.jsonl", every=10).every
    10
    """

    file: str | os.PathLike[str] | None = None
    _: KW_ONLY
    every: int = TRACE_EVERY
