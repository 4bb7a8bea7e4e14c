"""The image's memory is of the exact size, its own process's, and gone when nobody looks at it."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import signal
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from resumable.saving import host_memory
from resumable.saving.host_memory import HostMemory

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a fork")
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
ignores_fork = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@pytest.mark.parametrize("size", [1, 4096, 5000, 1 << 20])
def test_memory_is_of_the_exact_size_and_begins_at_a_page(size: int) -> None:
    found = HostMemory(size)

    assert found.bytes.nbytes == found.tensor.nbytes == found.size == size
    assert found.tensor.data_ptr() % mmap.PAGESIZE == 0


def test_the_bytes_and_the_tensor_are_the_same_memory() -> None:
    found = HostMemory(9)
    found.bytes[3] = 7
    found.tensor[4] = 8

    assert bytes(found.bytes) == bytes([0, 0, 0, 7, 8, 0, 0, 0, 0])


def test_no_memory_at_all_can_be_touched_and_given_back() -> None:
    found = HostMemory(0)
    found.touch()
    found.free()


def resident() -> int:
    """Return the bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


@needs_linux
def test_memory_that_was_touched_is_there_and_goes_when_it_is_given_back() -> None:
    size = 48 << 20
    before = resident()
    found = HostMemory(size)
    assert resident() - before < size // 2
    found.touch()
    assert resident() - before > 0.9 * size

    found.free()
    del found
    gc.collect()
    assert resident() - before < size // 2


@pytest.mark.parametrize("piece", [1, 3000, 1 << 30])
def test_touching_sets_every_byte(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(host_memory, "_PIECE", piece)
    found = HostMemory(7001)
    found.tensor.fill_(5)
    found.touch()

    assert not found.tensor.any()


def test_memory_that_was_given_back_stays_for_whoever_looks_at_it() -> None:
    found = HostMemory(4096)
    view, tensor = found.bytes[10:20], found.tensor[10:20]
    kept = weakref.ref(found._map)
    found.free()
    del found
    view[0] = 3
    assert tensor[0] == 3

    del view
    gc.collect()
    assert kept() is not None
    del tensor
    gc.collect()
    assert kept() is None


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
@needs_linux
def test_a_child_has_no_copy_of_the_memory() -> None:
    found = HostMemory(1 << 20)
    found.touch()
    place = f"{found.tensor.data_ptr():x}-"

    def is_gone() -> bool:
        with open("/proc/self/maps") as file:
            return not any(line.startswith(place) for line in file)

    assert not is_gone()
    assert in_child(is_gone) == 0


@needs_fork
@ignores_fork
def test_what_a_child_puts_in_the_place_of_the_memory_stays_when_the_object_goes() -> None:
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


def test_a_gpu_is_reported_of_the_memory_and_of_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    with_driver(monkeypatch, driver)
    found = HostMemory(5000)
    place = found.tensor.data_ptr()
    found.register(torch.device("cuda", 1))
    assert driver.known == [(place, 5000)]

    assert driver.gpus == [1]
    assert driver.flags == [1], "pinned for one context only: copies from other GPUs take a detour"
    found.free()
    assert driver.known == []
    assert driver.gpus == [1, 1], "unregistered with the first device, on which that creates a context"


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


def test_memory_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    with_driver(monkeypatch, driver)
    found = HostMemory(5000)
    for _ in range(2):
        found.register(torch.device("cuda", 1))

    assert len(driver.known) == 1


def test_memory_that_is_dropped_is_unregistered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    with_driver(monkeypatch, driver)
    found = HostMemory(5000)
    found.register(torch.device("cuda", 1))
    del found
    gc.collect()

    assert driver.known == []


def test_memory_that_a_gpu_refuses_is_used_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(code=2)
    with_driver(monkeypatch, driver)
    found = HostMemory(5000)
    found.register(torch.device("cuda", 1))
    assert found.is_refused
    found.free()

    assert len(driver.known) == 1, "what was not registered was unregistered"


def test_memory_is_not_registered_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    with_driver(monkeypatch, driver)
    found = HostMemory(5000)
    found.register(host_memory.gpu_of([torch.zeros(3)]))

    assert driver.known == []
