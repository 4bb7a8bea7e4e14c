"""The way in which saves are written: learnt from those before, tried rarely, remembered in the run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from resumable import RunState
from resumable.files import large_files
from resumable.files.large_files import BLOCK, Way, Written
from resumable.run import history
from resumable.saving import ways
from resumable.saving.ways import Ways, Wrote, chosen

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the ways of Linux")
SIZE = 10 * BLOCK


@pytest.fixture(autouse=True)
def _all_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "WAYS", ("direct", "uncached", "paced", "plain"))


def seen(*found: tuple[Way, float | None], count: int = 1) -> list[Wrote]:
    return [Wrote(way, "sda", SIZE, seconds) for way, seconds in found for _ in range(count)]


class Saves:
    """Saves of one size to a disk whose speed is given, with an hour between two."""

    def __init__(self, folder: Path, **seconds: float | None) -> None:
        self.folder, self.seconds = folder, seconds
        self.clock, self.noted = 0.0, list[Any]()
        self.ways = Ways(folder, lambda: self.clock)

    def save(self, why: str = "called", after: float = 3600.0, size: int = SIZE) -> Way:
        self.clock += after
        way = self.ways.choose(size, why)
        taken = self.seconds[way]
        used: Way = "paced" if taken is None else way
        files = [Written(self.folder / "model", size, [b""] * (size // BLOCK), way=used)]
        self.noted.append(self.ways.note(way, files, taken or 1.0))
        return way


EQUAL: dict[str, float | None] = {"direct": 1.0, "uncached": 1.0, "paced": 1.0, "plain": 1.0}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ([], "direct"),
        (seen(("direct", 2.0), ("uncached", 1.0)), "uncached"),
        (seen(("direct", None), ("uncached", None)), "paced"),
        (seen(("direct", 9.0), ("direct", 1.0), ("direct", 1.0), ("uncached", 2.0)), "direct"),
    ],
)
def test_the_next_save_is_written_as_the_fastest_ones_were(before: list[Wrote], expected: Way) -> None:
    assert chosen(before, may_try=False) == expected


@pytest.mark.nightly
def test_each_way_is_tried_once_with_three_saves_between(tmp_path: Path) -> None:
    saves = Saves(tmp_path, **EQUAL)

    found = [saves.save() for _ in range(40)]

    assert [(at, way) for at, way in enumerate(found) if way != "direct"] == [
        (3, "uncached"),
        (7, "paced"),
        (11, "plain"),
    ]


@pytest.mark.nightly
def test_a_refused_way_is_not_used_again_but_for_another_size(tmp_path: Path) -> None:
    saves = Saves(tmp_path, **{**EQUAL, "direct": None})

    assert [saves.save() for _ in range(3)] == ["direct", "uncached", "uncached"]
    assert saves.save(size=100 * SIZE) == "direct"


def test_a_folder_that_is_gone_is_a_disk_of_its_own(tmp_path: Path) -> None:
    assert Saves(tmp_path / "gone", **EQUAL).save() == "direct"


GOOD = {"way": "uncached", "disk": "sda", "size": SIZE, "seconds": 0.5}


@pytest.mark.parametrize(
    "found",
    [
        *(None, [], "uncached", {}, {**GOOD, "more": 1}, {**GOOD, "way": "rm -rf"}, {**GOOD, "way": []}),
        *({**GOOD, "disk": 1}, {**GOOD, "size": 0}, {**GOOD, "size": 1 << 80}, {**GOOD, "size": True}),
        *({**GOOD, "seconds": seconds} for seconds in (-1.0, 5e-324, "nan", 1e300)),
    ],
)
def test_a_strange_line_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    monkeypatch.setattr(ways, "_disk", lambda folder: "sda")
    saves = Saves(tmp_path, **EQUAL)

    saves.ways.recall([found])
    assert saves.save() == "direct"
    saves.ways.recall([GOOD])
    assert saves.save() == "uncached"


def test_a_resumed_run_recalls_what_was_noted(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "_WORTH_LEARNING", 0)
    monkeypatch.setattr(large_files, "BLOCK", 4096)
    for _ in range(3):
        with RunState.load(run_dir, model=torch.nn.Linear(4096, 1)) as state:
            state.save()
            state.wait()
            seen = [*state._saving.files.ways._seen]

    noted = [line["wrote"] for line in history.read(run_dir) if "wrote" in line]
    assert [Wrote(**one) for one in noted] == seen
    assert len(seen) == 3
