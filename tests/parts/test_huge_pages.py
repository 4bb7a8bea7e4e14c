"""Huge pages for what is read into new memory."""

from __future__ import annotations

import mmap

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
