"""The way in which saves are written: learnt from those before, tried rarely, remembered in the run."""

from __future__ import annotations

import itertools
import json
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


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ([], "direct"),
        (seen(("direct", 2.0), ("uncached", 1.0)), "uncached"),
        (seen(("direct", 1.05), ("uncached", 1.0)), "direct"),
        (seen(("plain", 1.0), ("paced", 3.0)), "plain"),
        (seen(("direct", None)), "uncached"),
        (seen(("direct", None), ("uncached", None)), "paced"),
        (seen(("direct", 9.0), ("direct", 1.0), ("direct", 1.0), ("uncached", 2.0)), "direct"),
        (
            seen(("direct", 1.0), count=9) + seen(("uncached", 2.0)) + seen(("direct", 4.0), count=3),
            "uncached",
        ),
    ],
)
def test_the_next_save_is_written_as_the_fastest_ones_were(before: list[Wrote], expected: Way) -> None:
    assert chosen(before, may_try=False) == expected


def test_each_way_is_tried_once_with_three_saves_between(tmp_path: Path) -> None:
    saves = Saves(tmp_path, **EQUAL)

    found = [saves.save() for _ in range(40)]

    assert [(at, way) for at, way in enumerate(found) if way != "direct"] == [
        (3, "uncached"),
        (7, "paced"),
        (11, "plain"),
    ]


def test_a_way_is_tried_again_late_and_never_if_it_was_much_slower(tmp_path: Path) -> None:
    saves = Saves(tmp_path, direct=1.0, uncached=1.5, paced=3.0, plain=3.0)

    found = [saves.save() for _ in range(200)]

    tries = [at for at, way in enumerate(found) if way == "uncached"]
    assert len(tries) > 2
    assert min(after - before for before, after in itertools.pairwise(tries)) > 60
    assert (found.count("paced"), found.count("plain")) == (1, 1)


@pytest.mark.parametrize("why", ["SIGTERM", "max_time", "close()", "end of the loop"])
def test_a_save_at_the_end_tries_nothing(tmp_path: Path, why: str) -> None:
    saves = Saves(tmp_path, **EQUAL)

    assert {saves.save(why) for _ in range(20)} == {"direct"}
    assert saves.save("every 10 steps") == "uncached"


def test_saves_that_follow_each_other_closely_try_nothing(tmp_path: Path) -> None:
    saves = Saves(tmp_path, **EQUAL)

    assert {saves.save(after=3.9) for _ in range(20)} == {"direct"}
    assert saves.save(after=4.1) == "uncached"


def test_a_refused_way_is_not_used_again_but_for_another_size(tmp_path: Path) -> None:
    saves = Saves(tmp_path, **{**EQUAL, "direct": None})

    assert [saves.save() for _ in range(3)] == ["direct", "uncached", "uncached"]
    assert saves.save(size=100 * SIZE) == "direct"


def test_small_files_teach_nothing(tmp_path: Path) -> None:
    saves = Saves(tmp_path, **EQUAL)

    assert saves.save(size=BLOCK) == "paced"
    assert saves.noted == [None]
    link = Written(tmp_path / "model", SIZE, [b""] * 10)
    assert saves.ways.note("direct", [link], 1.0) is None


def test_files_of_one_block_teach_nothing_however_many_they_are(tmp_path: Path) -> None:
    one_block = Written(tmp_path / "model", BLOCK, [b""], way="paced")
    many = Written(tmp_path / "optimizer", SIZE, [b""] * 10, way="direct")

    assert Ways(tmp_path).note("paced", [one_block] * 10, 1.0) is None
    noted = Ways(tmp_path).note("direct", [one_block, many], 1.0)
    assert noted is not None
    assert (noted["size"], noted["seconds"]) == (SIZE, 1.0)


def test_what_has_not_changed_does_not_count_as_written(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, choose = list[int](), Ways.choose
    monkeypatch.setattr(Ways, "choose", lambda w, size, why: (sizes.append(size), choose(w, size, why))[1])
    frozen = torch.nn.Linear(512, 1024, bias=False).requires_grad_(False)
    model = torch.nn.Sequential(frozen, torch.nn.Linear(4, 4))
    with RunState.load(run_dir, model=model) as state:
        for _ in range(4):
            state.save().wait()
        with torch.no_grad():
            frozen.weight.add_(1)
        for _ in range(2):
            state.save().wait()

    assert [size > frozen.weight.nbytes for size in sizes] == [True, True, False, False, False, True]


def test_of_a_shared_file_only_the_own_blocks_count(tmp_path: Path) -> None:
    share = Written(tmp_path / "model", 9 * SIZE, [b""] * 10, way="direct")

    noted = Ways(tmp_path).note("direct", [share], 1.0)

    assert noted is not None
    assert noted["size"] == SIZE


def test_the_next_process_uses_what_this_one_has_learnt(tmp_path: Path) -> None:
    first = Saves(tmp_path, **{**EQUAL, "uncached": 0.5})
    for _ in range(5):
        first.save()
    second = Saves(tmp_path, **EQUAL)

    second.ways.recall(json.loads(json.dumps(first.noted)))

    assert second.save() == "uncached"


def test_another_disk_or_machine_starts_from_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = Saves(tmp_path, **{**EQUAL, "uncached": 0.5})
    for _ in range(5):
        saves.save()
    monkeypatch.setattr("platform.node", lambda: "another")

    assert saves.save() == "direct"


def test_a_folder_that_is_gone_is_a_disk_of_its_own(tmp_path: Path) -> None:
    assert Saves(tmp_path / "gone", **EQUAL).save() == "direct"


GOOD = {"way": "uncached", "disk": "sda", "size": SIZE, "seconds": 0.5}


@pytest.mark.parametrize(
    "found",
    [
        None,
        [],
        "uncached",
        {},
        {**GOOD, "more": 1},
        {**GOOD, "way": "rm -rf"},
        {**GOOD, "way": []},
        {**GOOD, "disk": 1},
        {**GOOD, "size": 0},
        {**GOOD, "size": 1 << 80},
        {**GOOD, "size": True},
        {**GOOD, "seconds": -1.0},
        {**GOOD, "seconds": 5e-324},
        {**GOOD, "seconds": "nan"},
        {**GOOD, "seconds": 1e300},
    ],
)
def test_a_line_that_makes_no_sense_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: Any
) -> None:
    monkeypatch.setattr(ways, "_disk", lambda folder: "sda")
    saves = Saves(tmp_path, **EQUAL)

    saves.ways.recall([found])
    assert saves.save() == "direct"
    saves.ways.recall([GOOD])
    assert saves.save() == "uncached"


def test_a_resumed_run_recalls_what_its_saves_have_noted(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
