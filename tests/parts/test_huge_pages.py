"""Huge pages for what is read into new memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from resumable.files.tensor_file import Slot
from resumable.parts import huge_pages
from resumable.parts.places import on_host

MIB = 1 << 20
COUNTS = "Node 0, zone {:>8} " + " ".join(["{}"] * 11) + "\n"

pytestmark = pytest.mark.skipif(not huge_pages._KERNEL.exists(), reason="a kernel without huge pages")


class Libc:
    """The C library; what it was asked for is noted."""

    def __init__(self) -> None:
        self.asked: list[range] = []
        self._real = huge_pages._libc()

    def madvise(self, begin: int, size: int, advice: int) -> int:
        self.asked.append(range(begin, begin + size))
        return int(self._real.madvise(begin, size, advice))


@pytest.fixture
def libc(monkeypatch: pytest.MonkeyPatch) -> Libc:
    """Note what the C library is asked for."""
    noted = Libc()
    monkeypatch.setattr(huge_pages, "_libc", lambda: noted)
    return noted


def has_huge_pages(tensor: torch.Tensor) -> bool:
    """Whether the kernel may use huge pages where the middle of a tensor lies."""
    place, is_there = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            is_there = int(found[1], 16) <= place < int(found[2], 16)
        elif is_there and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError("this memory is not mapped")


def slot(size: int) -> Slot:
    return Slot("weight", torch.uint8, (size,), 0, size)


@pytest.fixture
def free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the kernel tells of free memory: 40 MiB in huge pages of 2 MiB."""
    told, size = tmp_path / "buddyinfo", tmp_path / "size"
    told.write_text(
        COUNTS.format("DMA32", 7, 7, 7, 7, 7, 7, 7, 7, 7, 2, 0)
        + COUNTS.format("Normal", 9000, 8000, 900, 90, 9, 9, 9, 9, 9, 4, 7)
    )
    size.write_text(f"{2 * MIB}\n")
    monkeypatch.setattr(huge_pages, "_FREE", told)
    monkeypatch.setattr(huge_pages, "_KERNEL", size)
    monkeypatch.setattr("mmap.PAGESIZE", 4096)
    return told


@pytest.mark.usefixtures("free")
def test_the_free_huge_pages_of_all_zones_are_counted() -> None:
    assert huge_pages._free() == (2 + 4) * 2 * MIB + 7 * 4 * MIB


@pytest.mark.parametrize("text", ["", "Node 0, zone\n", "Node 0, zone Normal many\n", None])
def test_a_kernel_that_tells_nothing_has_none(free: Path, text: str | None) -> None:
    free.unlink()
    if text is not None:
        free.write_text(text)

    assert huge_pages._free() == 0


@pytest.mark.usefixtures("free")
def test_new_tensors_get_huge_pages_if_twice_as_many_are_free(libc: Libc) -> None:
    (new,) = on_host([slot(20 * MIB)]).tensors().values()

    assert has_huge_pages(new)
    (asked,) = libc.asked
    assert asked.start % 4096 == 0
    assert new.data_ptr() - 4096 < asked.start <= new.data_ptr()
    assert asked.stop == new.data_ptr() + 20 * MIB


@pytest.mark.parametrize("size", [20 * MIB + 1, 3 * MIB], ids=["too large", "too small"])
@pytest.mark.usefixtures("free")
def test_others_are_left_to_the_kernel(libc: Libc, size: int) -> None:
    on_host([slot(size)])

    assert libc.asked == []


def test_a_live_tensor_keeps_the_pages_that_it_has(libc: Libc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_free", lambda: 1 << 40)
    live = torch.zeros(32 * MIB, dtype=torch.uint8)
    on_host([slot(live.nbytes)], [live])

    assert libc.asked == []


def test_a_kernel_that_refuses_leaves_the_tensor_as_it_is(
    libc: Libc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "_free", lambda: 1 << 40)
    monkeypatch.setattr("mmap.MADV_HUGEPAGE", 12345)
    (new,) = on_host([slot(8 * MIB)]).tensors().values()

    assert libc.asked
    assert new.fill_(3).sum() == 3 * 8 * MIB
