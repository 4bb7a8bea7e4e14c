"""The index of long runs: it is checked, never believed, and harmless whatever stands in it."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from resumable import RunState
from resumable.files import jsonl
from resumable.run import checkpoint, history, manifest
from resumable.run.directory import Run
from resumable.views import index, listing
from resumable.views.index import Index

pytestmark = pytest.mark.heavy

COUNT = 20
OLD = 7
"""A checkpoint that is not among the newest, which are always opened."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run of many checkpoints, listed twice: the second list comes from the index."""
    monkeypatch.setenv("RESUMABLE_CACHE", str(tmp_path / "cache"))
    # All would otherwise have changed too recently, and be too few.
    monkeypatch.setattr(index, "_COARSEST_TIME", 0)
    monkeypatch.setattr(index, "_WORTH_IT", 3)
    monkeypatch.setattr(index, "LONG", 5)
    folder = tmp_path / "run"
    with RunState.load(folder, model=torch.nn.Linear(2, 2), maximize="acc", keep=None) as state:
        state.save(acc=0.5, loss=float("nan"))
    found = Run(folder)
    first = found.open(1)
    for number in range(2, COUNT + 1):
        add(found, replace(first.about, number=number, step=number, parent=number - 1, metrics={"acc": 0.1}))
    time.sleep(0.02)
    return found


def add(run: Run, about: manifest.Manifest) -> None:
    """Add a copy of the first checkpoint with another manifest, and its line in the history."""
    first = run.open(1)
    folder = run.folder / checkpoint.name(about.number, about.step)
    shutil.copytree(first.path, folder)
    (folder / manifest.NAME).write_bytes(manifest.to_json(about))
    lines = history.read(run.path)
    [save] = [line for line in lines if history.is_save(line) and line["number"] == 1]
    more = {
        "number": about.number,
        "step": about.step,
        "parent": about.parent,
        "why": f"{about.number} steps",
    }
    jsonl.append(run.path / history.NAME, [{**save, **more}])


def plain(run: Run) -> Any:
    """What a list says, as JSON."""
    found = listing.of_run(run)
    return json.loads(json.dumps([found.rows, found.attempts, found.remote, found.size, str(found.best)]))


def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the checkpoints whose manifests are read from here on."""
    numbers: list[int] = []
    before = checkpoint.open_checkpoint

    def open_it(path: Path) -> checkpoint.Checkpoint:
        numbers.append(int(path.name.split("-")[0]))
        return before(path)

    monkeypatch.setattr(checkpoint, "open_checkpoint", open_it)
    return numbers


def the_index(tmp_path: Path) -> Path:
    [path] = (tmp_path / "cache" / "index").glob("*.json")
    return path


def spoil(run: Run) -> None:
    [path] = run.folder.glob(f"{OLD:06}-*/manifest.json")
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def cut_a_file_short(run: Run) -> None:
    [path] = run.folder.glob(f"{OLD:06}-*/model.safetensors")
    os.truncate(path, 10)


def put_another(run: Run) -> None:
    about = run.open(OLD).about
    [path] = run.folder.glob(f"{OLD:06}-*/manifest.json")
    before = os.stat(path)
    path.write_bytes(manifest.to_json(replace(about, metrics={"acc": 0.7})))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def remove(run: Run) -> None:
    [path] = run.folder.glob(f"{OLD:06}-*")
    shutil.rmtree(path)


def rewrite_the_history(run: Run) -> None:
    path = run.path / history.NAME
    path.write_bytes(path.read_bytes().replace(b'"9 steps"', b'"8 steps"'))


def lengthen_the_history(run: Run) -> None:
    jsonl.append(run.path / history.NAME, [{"event": "end", "attempt": 1, "how": "SIGTERM"}])


CHANGES = [
    spoil,
    cut_a_file_short,
    put_another,
    remove,
    rewrite_the_history,
    lengthen_the_history,
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_since_is_read_again(
    run: Run, change: Callable[[Run], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = plain(run)
    change(run)

    known = plain(Run(run.path))

    monkeypatch.setenv("RESUMABLE_CACHE", str(tmp_path / "none"))
    assert known == plain(Run(run.path))
    assert known != before


def torn(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    return data[:200] + bytes([data[200] ^ 1]) + data[201:]


def forged(**columns: Any) -> Callable[[bytes], bytes]:
    """Return what replaces columns, with a checksum that is right."""

    def change(data: bytes) -> bytes:
        body = manifest.unseal(data)
        for name, value in columns.items():
            body[name if name in body else "checkpoints"] |= value if name in body else {name: value}
        return manifest.seal(body)

    return change


ODD = [
    torn,
    flipped,
    lambda data: b"",
    forged(epoch="AAAA"),
    forged(files=index._packed("q", [-5] * COUNT)),
    forged(layouts=[["/etc/passwd"]]),
    forged(metrics={"acc": 3}),
    forged(history={"why": index._packed("q", [10**9] * COUNT)}),
]


@pytest.mark.parametrize("change", ODD)
def test_whatever_stands_in_the_index_the_list_is_right(
    run: Run, change: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    right = plain(run)
    path = the_index(tmp_path)
    path.write_bytes(change(path.read_bytes()))

    assert plain(Run(run.path)) == right


def test_an_index_that_cannot_be_written_is_no_error(run: Run, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")

    assert len(plain(run)[0]) == COUNT


def test_what_has_just_changed_is_not_remembered(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_COARSEST_TIME", 10**15)
    plain(run)

    memory = Index(run)

    assert memory.known(memory.look([*run.names().values()])) == {}


def test_a_list_writes_nothing_into_the_run_and_a_short_run_has_no_index(run: Run, tmp_path: Path) -> None:
    def times() -> dict[str, int]:
        return {str(path): os.lstat(path).st_mtime_ns for path in run.path.rglob("*")}

    before = times()
    plain(run)
    assert times() == before

    shutil.rmtree(tmp_path / "cache")
    for name in [*run.names().values()][: COUNT - index.LONG]:
        shutil.rmtree(run.folder / name)
    plain(Run(run.path))
    assert not (tmp_path / "cache").exists()
