"""A thread gives way to the training, and the garbage collector is on again whatever happens."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import threading
from collections.abc import Callable

import pytest

import resumable
from resumable.cli import listing
from resumable.files.threads import no_garbage_collection, yield_to_training


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def in_a_thread() -> int:
    """Return the priority that a thread has once it has given way."""
    seen: list[int] = []
    thread = threading.Thread(target=lambda: (yield_to_training(), seen.append(priority())))
    thread.start()
    thread.join(20)
    return seen[0]


def test_a_thread_gives_way_to_the_training_which_it_leaves_alone() -> None:
    before = priority()

    assert in_a_thread() == min(19, max(before, 5))
    assert priority() == before


def test_a_sandbox_that_forbids_to_give_way_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "setpriority", forbidden)

    assert in_a_thread() == priority()


@pytest.mark.parametrize(
    "disabling",
    [
        no_garbage_collection()(lambda: None),
        lambda: resumable.__getattr__("RunState"),
        lambda: listing._ls(argparse.Namespace()),
    ],
    ids=["a load", "an import", "a listing"],
)
def test_an_interrupt_leaves_the_garbage_collector_on(
    monkeypatch: pytest.MonkeyPatch, disabling: Callable[[], object]
) -> None:
    disable = gc.disable
    monkeypatch.setattr(gc, "disable", lambda: (disable(), signal.raise_signal(signal.SIGINT)))
    try:
        with pytest.raises(KeyboardInterrupt):
            disabling()
        assert gc.isenabled()
    finally:
        gc.enable()
