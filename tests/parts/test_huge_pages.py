"""Huge pages for what is read into new memory."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from resumable.parts import huge_pages

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        not huge_pages._size() or mmap.PAGESIZE != 4096,
        reason="a kernel without huge pages, or with other pages",
    ),
]
MIB = 1 << 20


class Libc:
    """The C library; what it was asked for is noted."""

    def __init__(self) -> None:
        self.asked: list[range] = []
        self._real = huge_pages._libc()

    def madvise(self, begin: int, size: int, advice: int) -> int:
        self.asked.append(range(begin, begin + size))
        return int(self._real.madvise(begin, size, advice))


@pytest.mark.parametrize("advice", [huge_pages._ADVICE, 12345])
def test_memory_is_as_good_with_huge_pages_as_without(monkeypatch: pytest.MonkeyPatch, advice: int) -> None:
    libc = Libc()
    monkeypatch.setattr(huge_pages, "_libc", lambda: libc)
    monkeypatch.setattr(huge_pages, "_free", lambda _: 1 << 40)
    monkeypatch.setattr(huge_pages, "_ADVICE", advice)
    tensor = torch.empty(8 * MIB, dtype=torch.uint8)
    huge_pages.ask([tensor])

    (asked,) = libc.asked
    assert tensor.data_ptr() - mmap.PAGESIZE < asked.start <= tensor.data_ptr()
    assert asked.stop == tensor.data_ptr() + tensor.nbytes
    assert tensor.fill_(3).sum() == 3 * 8 * MIB


ZONES = """Node 0, zone    DMA32 7 7 7 7 7 7 7 7 7 7 700
Node 0, zone   Normal 9000 8000 900 90 9 9 9 9 9 4 7
Node 0, zone  Movable 0 0 0 0 0 0 0 0 0 2 0
"""


@pytest.mark.parametrize(
    ("text", "free"),
    [
        *(("", 0), ("Node 0, zone\n", 0), ("Node 0, zone Normal many\n", 0), (None, 0)),
        *((ZONES, 40), (ZONES + "Node 1, zone   Normal 0 0 0 0 0 0 0 0 0 0 3\n", 12)),
    ],
)
def test_the_node_with_the_fewest_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, free: int
) -> None:
    monkeypatch.setattr(huge_pages, "_FREE", tmp_path / "buddyinfo")
    if text is not None:
        (tmp_path / "buddyinfo").write_text(text)

    assert huge_pages._free(2 * MIB) == free * MIB
