"""The image's memory is of the exact size, its own process's, and gone when nobody looks at it."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from resumable.saving import host_memory
from resumable.saving.host_memory import HostMemory

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a fork")
ignores_fork = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def in_child(job: Callable[[], bool]) -> int:
    """Return how a forked child ends that does a job: with 0 if it was right."""
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        try:
            os._exit(0 if job() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@needs_fork
@ignores_fork
def test_a_childs_own_memory_stays_when_the_object_goes() -> None:
    held = [HostMemory(1 << 20)]
    held[0].touch()

    def puts_its_own_there() -> bool:
        place = held[0].tensor.data_ptr()
        own = []
        # The kernel gives the gap that the memory has left to one of the next that fit
        for _ in range(200):
            own.append(HostMemory(1 << 20))
            own[-1].touch()
            own[-1].tensor.fill_(9)
            if own[-1].tensor.data_ptr() == place:
                break
        held.clear()
        gc.collect()
        return all(bool((one.tensor == 9).all()) for one in own)

    assert in_child(puts_its_own_there) == 0


@needs_fork
@ignores_fork
def test_a_child_leaves_the_memory_of_its_parent_as_it_is() -> None:
    found = HostMemory(1 << 16)
    found.tensor.fill_(4)

    def lets_go() -> bool:
        nonlocal found
        del found
        gc.collect()
        return True

    assert in_child(lets_go) == 0
    assert bool((found.tensor == 4).all())


class Driver:
    """What a GPU's driver knows of host memory."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.known: list[tuple[int, int]] = []
        self.gpus: list[int] = []
        self.flags: list[int] = []

    def at(self, gpu: torch.device) -> contextlib.AbstractContextManager[None]:
        self.gpus.append(gpu.index)
        return contextlib.nullcontext()

    def cudaHostRegister(self, place: int, size: int, flags: int) -> int:  # noqa: N802
        self.known.append((place, size))
        self.flags.append(flags)
        return self.code

    def cudaHostUnregister(self, place: int) -> int:  # noqa: N802
        self.known = [one for one in self.known if one[0] != place]
        return 0


def with_driver(monkeypatch: pytest.MonkeyPatch, driver: Any) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", driver.at)


def test_memory_is_registered_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    with_driver(monkeypatch, driver)
    monkeypatch.setattr(host_memory, "_REGISTERED", 1 << 16)
    found = HostMemory(200_000)
    begin = found.tensor.data_ptr()
    found.register(torch.device("cuda", 1))
    assert driver.known[0][0] == begin
    assert sum(size for _, size in driver.known) == 200_000
    assert all(place % (1 << 16) == 0 for place, _ in driver.known[1:])

    found.free()
    assert driver.known == []


def test_what_is_registered_before_a_refusal_is_unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    with_driver(monkeypatch, driver)
    monkeypatch.setattr(host_memory, "_REGISTERED", 1 << 16)
    register = driver.cudaHostRegister
    monkeypatch.setattr(
        driver, "cudaHostRegister", lambda *given: 2 if len(driver.known) == 2 else register(*given)
    )
    found = HostMemory(200_000)
    found.register(torch.device("cuda", 1))
    assert found.is_refused
    assert len(driver.known) == 2
    found.free()

    assert driver.known == []


def test_memory_that_a_gpu_refuses_is_used_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(code=2)
    with_driver(monkeypatch, driver)
    found = HostMemory(5000)
    found.register(torch.device("cuda", 1))
    assert found.is_refused
    found.free()

    assert len(driver.known) == 1, "what was not registered was unregistered"
