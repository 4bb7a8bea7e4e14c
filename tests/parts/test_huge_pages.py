"""Huge pages for what is read into new memory."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from torch import nn

from resumable import RunState
from resumable.parts import huge_pages

MIB = 1 << 20

pytestmark = pytest.mark.skipif(
    not huge_pages._size() or mmap.PAGESIZE != 4096, reason="a kernel without huge pages, or with other pages"
)


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


def new(size: int) -> torch.Tensor:
    """Return memory that nothing was written to."""
    return torch.empty(size, dtype=torch.uint8)


def zone(node: int, name: str, *counts: int) -> str:
    """Return what the kernel tells of a zone: so many free blocks of one page, of two, of four."""
    return f"Node {node}, zone {name:>8} {' '.join(map(str, counts))}\n"


@pytest.fixture
def free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the kernel tells of free memory: 40 MiB in huge pages of 2 MiB."""
    told, size = tmp_path / "buddyinfo", tmp_path / "size"
    told.write_text(
        zone(0, "DMA32", 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 700)
        + zone(0, "Normal", 9000, 8000, 900, 90, 9, 9, 9, 9, 9, 4, 7)
        + zone(0, "Movable", 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0)
    )
    size.write_text(f"{2 * MIB}\n")
    monkeypatch.setattr(huge_pages, "_FREE", told)
    monkeypatch.setattr(huge_pages, "_KERNEL", size)
    return told


def test_a_kernel_that_refuses_leaves_the_tensor_as_it_is(
    libc: Libc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "_free", lambda _: 1 << 40)
    monkeypatch.setattr(huge_pages, "_ADVICE", 12345)
    tensor = new(8 * MIB)
    huge_pages.ask([tensor])

    assert libc.asked
    assert tensor.fill_(3).sum() == 3 * 8 * MIB


def test_a_resume_asks_for_the_moments_and_not_for_the_weights(
    run_dir: Path, libc: Libc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "_free", lambda _: 1 << 40)
    for steps in (1, 2, 3):
        torch.manual_seed(0)
        model = nn.Linear(1024, 2048)
        optimizer = torch.optim.Adam(model.parameters())
        libc.asked.clear()
        with RunState.load(run_dir, model=model, optimizer=optimizer) as state:
            moments = optimizer.state.get(model.weight, {})
            assert not any(model.weight.data_ptr() in asked for asked in libc.asked)
            for name in ("exp_avg", "exp_avg_sq") if steps > 1 else ():
                assert any(moments[name].data_ptr() in asked for asked in libc.asked)
            for _ in state.steps(steps):
                optimizer.zero_grad()
                model(torch.ones(1, 1024)).sum().backward()
                optimizer.step()
            state.save().wait()
    torch.manual_seed(0)
    expected = nn.Linear(1024, 2048)
    optimizer = torch.optim.Adam(expected.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        expected(torch.ones(1, 1024)).sum().backward()
        optimizer.step()
    assert torch.equal(model.weight, expected.weight)
