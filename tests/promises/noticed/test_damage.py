"""Bytes that are not the ones that were written: found on every load, named, before anything is touched."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import random
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny
import torch
from counted import Tally

from resumable import CheckpointDamaged, Run
from resumable.boundary import Boundary
from resumable.files import codec, disk, file_reader, large_files, tensor_file
from resumable.parts.reading import Reading
from resumable.run import checkpoint, manifest
from resumable.run.checkpoint import Checkpoint
from resumable.run.manifest import Manifest

pytestmark = pytest.mark.proves("noticed")

SHARDS = 2
BITS = range(8)


class Case(NamedTuple):
    """Something that happened to a file."""

    what: str
    content: bytes


def trees(seed: int, rank: int = 0) -> dict[str, codec.Encoded]:
    """Return the trees of a small training: of the same sizes for every seed."""
    torch.manual_seed(seed)
    weights = {
        "weight": torch.randn(3, 3),
        "twins_": torch.randn(3, 3),
        "mask": torch.rand(5) > 0.5,
        "half": torch.randn(4).half(),
    }
    return {
        "model": codec.encode({"model": weights}, lambda path: ".".join(path[1:])),
        "extra": codec.encode({"notes": {"seed": seed, "text": "as it was", "pair": (1.5, None)}}),
        "rank": codec.encode({"random": torch.randint(9, (8,)), "rank": rank}),
    }


def saved(folder: Path, number: int, ranks: int = 1) -> Checkpoint:
    """Commit a checkpoint of as many processes."""
    files = dict(codec.to_files(trees(number)))
    for rank in range(1, ranks):
        mine = {"extra": codec.encode({}), "rank": trees(number + rank, rank)["rank"]}
        texts, groups = codec.to_texts(mine, rank), codec.to_groups(mine, rank)
        files |= {path: text for path, text in texts.items() if path != "state.json"}
        files |= {p: tensor_file.to_safetensors(g.tensors, g.aliases) for p, g in groups.items()}
    about = Manifest(
        number=number,
        parent=None,
        run_id="0" * 16,
        saved="2026-07-30T12:00:00+00:00",
        boundary=Boundary.STEP,
        epoch=0,
        batch=0,
        step=number,
        samples=0,
        metrics={"loss": 0.5},
        best=None,
        files={},
        parts={"model": {"kind": "module"}},
        built={},
        environment={"torch": "2"},
        world_size=ranks,
    )
    contents = {path: large_files.Content(memoryview(data)) for path, data in files.items()}
    return checkpoint.commit(folder, about, contents)[0]


def read(path: Path) -> Any:
    """Return all that a checkpoint holds, as values."""
    found = checkpoint.open_checkpoint(path)
    files = found.read()
    mine = {name: data for name, data in files.items() if codec.rank_of(name) in (None, 0)}
    decoded = {stem: codec.decode(tree.json, tree.tensors) for stem, tree in codec.from_files(mine).items()}
    return found.about, decoded


def damages(name: str, whole: bytes, *, is_all: bool) -> Iterator[Case]:
    """Yield what can happen to a file: each byte, each length, more at its end, its pages."""
    is_every_bit = is_all or name == "manifest.json"
    for at, byte in enumerate(whole):
        for bit in BITS if is_every_bit or at % 16 == 0 else (at % 8,):
            yield Case(f"bit {bit} of byte {at}", whole[:at] + bytes([byte ^ 1 << bit]) + whole[at + 1 :])
    for length in range(len(whole)):
        yield Case(f"cut to {length}", whole[:length])
    for more in (b"\0", b"\n", b" ", b"{}", whole, b"\0" * 4096):
        yield Case(f"{len(more)} bytes more", whole + more)
    for size, begin in itertools.product((2, 3, 16, 64, 512, 4096), range(0, len(whole), 7)):
        zeroed = whole[:begin] + bytes(len(whole[begin : begin + size])) + whole[begin + size :]
        if zeroed != whole:
            yield Case(f"{size} zeros at {begin}", zeroed)


def swaps(whole: bytes, seed: int, count: int) -> Iterator[Case]:
    """Yield what random accidents make of a file: pieces exchanged, moved, repeated, overwritten."""
    dice = random.Random(seed)
    for number in range(count):
        data = bytearray(whole)
        length = dice.randrange(1, max(2, len(data) // 4))
        one, other = dice.randrange(len(data)), dice.randrange(len(data))
        kind = number % 4
        piece = bytes(data[one : one + length])
        if kind == 0:
            data[other : other + len(piece)] = piece
        elif kind == 1:
            data[one : one + length] = dice.randbytes(len(piece))
        elif kind == 2:
            del data[one : one + length]
            data[other:other] = piece
        else:
            data[other:other] = piece
        if bytes(data) != whole:
            yield Case(f"accident {number} of {seed}", bytes(data))


def overwrite(fd: int, content: bytes) -> None:
    """Give a file another content in place, which takes a microsecond."""
    os.ftruncate(fd, len(content))
    os.pwrite(fd, content, 0)


def accepted(path: Path, name: str) -> str | None:
    """Return what is wrong with how a damaged file was met; None if it was refused by its name."""
    try:
        read(path)
    except CheckpointDamaged as exc:
        return None if f"is damaged: {name}" in str(exc) else f"not named: {exc}"
    except Exception as exc:
        return f"met with {exc!r}"
    return "accepted"


@pytest.mark.heavy
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("shard", range(SHARDS))
def test_no_corrupted_file_is_ever_accepted(
    tmp_path: Path, tally: Tally, times: int, shard: int, ranks: int
) -> None:
    found = saved(tmp_path / "checkpoints", 1, ranks)
    before, count, bad = str(read(found.path)), 0, []
    for name in sorted([*found.about.files, "manifest.json"]):
        whole = (found.path / name).read_bytes()
        accidents = 3_400 * times // ranks
        cases = itertools.chain(damages(name, whole, is_all=times >= 20), swaps(whole, shard, accidents))
        fd = os.open(found.path / name, os.O_WRONLY)
        for case in itertools.islice(cases, shard, None, SHARDS):
            overwrite(fd, case.content)
            count += 1
            if problem := accepted(found.path, name):
                bad.append(f"{name}, {case.what}: {problem}")
        overwrite(fd, whole)
        os.close(fd)
    assert str(read(found.path)) == before
    tally("corrupted reads", count, bad)


def exchanged(one: Path, other: Path) -> None:
    """Exchange two files."""
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


@pytest.mark.parametrize("ranks", [1, 3])
def test_files_of_two_checkpoints_of_one_training_are_never_mixed(
    tmp_path: Path, tally: Tally, ranks: int
) -> None:
    first, second = (saved(tmp_path / "checkpoints", number, ranks) for number in (1, 2))
    names = sorted([*first.about.files, "manifest.json"])
    differing = {n for n in names if (first.path / n).read_bytes() != (second.path / n).read_bytes()}
    assert {(first.path / n).stat().st_size == (second.path / n).stat().st_size for n in names} == {True}
    counts = range(1, len(names)) if ranks == 1 else (1, 2, len(names) - 1)
    bad, chosen = [], [*itertools.chain(*(itertools.combinations(names, count) for count in counts))]
    for some in chosen:
        for name in some:
            exchanged(first.path / name, second.path / name)
        for found in (first, second):
            # With the manifest and all that differs from it exchanged, it is whole, under another's name
            is_whole = {*some} & differing in (set(), differing)
            with contextlib.suppress(CheckpointDamaged):
                Run(tmp_path).open(found.about.number).read()
                bad += [] if is_whole and not {*some} & differing else [f"{some} of {found}"]
        for name in some:
            exchanged(first.path / name, second.path / name)
    assert [str(Run(tmp_path).open(n).about.number) for n in (1, 2)] == ["1", "2"]
    tally("files exchanged between checkpoints", len(chosen) * 2, bad)


def test_files_of_two_ranks_that_are_exchanged_are_noticed(tmp_path: Path, tally: Tally) -> None:
    found = saved(tmp_path / "checkpoints", 1, 3)
    pairs = [
        (f"ranks/{one:05}{suffix}", f"ranks/{other:05}{suffix}")
        for one, other in itertools.combinations(range(3), 2)
        for suffix in (".json", ".safetensors")
    ]
    bad = []
    for one, other in pairs:
        exchanged(found.path / one, found.path / other)
        bad += [] if accepted(found.path, one) is None else [f"{one} and {other}"]
        exchanged(found.path / one, found.path / other)
    tally("files exchanged between ranks", len(pairs), bad)


@pytest.mark.parametrize("twin", ["a hard link", "a copy", "two names of one file"])
def test_what_lies_there_twice_harms_nothing_and_what_is_missing_is_named(tmp_path: Path, twin: str) -> None:
    found = saved(tmp_path / "checkpoints", 1, 2)
    before = str(read(found.path))
    for name in [*found.about.files, "manifest.json"]:
        path = found.path / name
        if twin == "two names of one file":
            os.link(path, tmp_path / "kept")
            path.unlink()
            with pytest.raises(CheckpointDamaged, match=f"is damaged: {name} is missing"):
                read(found.path)
            os.rename(tmp_path / "kept", path)
        else:
            (os.link if twin == "a hard link" else shutil.copy)(path, path.with_name(f"copy of {path.name}"))
    assert str(read(found.path)) == before


# Live objects.


@pytest.mark.heavy
@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_refused_damaged_checkpoint_changes_nothing_and_is_reported(
    run_dir: Path, tally: Tally, times: int, shard: int
) -> None:
    training, state = tiny.load(run_dir, keep=3)
    with state:
        for loss in (1.0, 2.0):
            tiny.save_next(training, state, loss)
    found, bad, count = Run(run_dir).open(2), [], 0
    each = 20 * times // SHARDS
    for name in sorted([*found.about.files, "manifest.json"]):
        path, whole = found.path / name, (found.path / name).read_bytes()
        path.unlink()
        for case in first_of_bytes(path, whole, shard, each):
            count += 1
            bad += [f"{name}, {case.what}: {text}" for text in met(run_dir, name, count % 2 == 0)]
        path.unlink()
        path.write_bytes(whole)
    tiny.assert_goes_on(run_dir, 2, keep=9)
    tally("corrupted loads into live objects", count, bad)


def first_of_bytes(path: Path, whole: bytes, seed: int, count: int) -> Iterator[Case]:
    """Put some damages into a file, one after the other."""
    for case in random.Random(seed).sample([*damages(path.name, whole, is_all=False)], count):
        path.write_bytes(case.content)
        yield case


def met(run_dir: Path, name: str, is_auto: bool) -> list[str]:
    """Return what is wrong with how a training starts next to a damaged file."""
    training = tiny.fresh()
    before = training.digest()
    parts: dict[str, Any] = {
        "model": training.model,
        "optimizer": training.optimizer,
        "extra": {"seen": training.seen},
    }
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            state = tiny.RunState.load(run_dir, **parts, keep=9, resume="auto" if is_auto else 2)
            state._position.streams.put_back()
        except CheckpointDamaged as exc:
            problems = [] if name in exc.problem else [f"not named: {exc}"]
            return problems + ["something was touched"] * (training.digest() != before)
    state.close()
    told = [str(one.message) for one in warned if "is skipped" in str(one.message)]
    is_older = is_auto and state.step == 1 and training.digest() == tiny.uninterrupted()[1]
    return ["accepted"] * (not is_older) + ["quietly"] * (not any(name in text for text in told))


# What is hashed is what is used: nothing that happens to the file meanwhile or later shows.


def live_of(seed: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return live tensors that a checkpoint's can be read into."""
    model = trees(seed)["model"].tensors
    return {"model": {name: value.clone() for name, value in model.items()}}


def loaded(found: Checkpoint) -> list[bytes]:
    """Load a checkpoint into live tensors, and return the bytes of all that it held."""
    live = live_of(9)
    reading = Reading(found, live)
    reading.fill(["model"])
    held = {name: value for tree in reading.trees.values() for name, value in tree.tensors.items()}
    values = [json.dumps(tree.json).encode() for tree in reading.trees.values()]
    return [*values, *(bytes(tensor_file.as_bytes(value)) for _, value in sorted(held.items()))]


@contextlib.contextmanager
def seams(monkeypatch: pytest.MonkeyPatch, do: Callable[[int], None]) -> Iterator[list[int]]:
    """Call `do` with a number before each system call of a load."""
    calls: list[int] = [0]

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            calls[0] += 1
            do(calls[0])
            return real(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        for name in ("open", "fstat", "stat"):
            patch.setattr(os, name, watched(getattr(os, name)))
        patch.setattr(file_reader, "_preadv", watched(file_reader._preadv))
        yield calls


def rewriting(path: Path, other: bytes) -> None:
    fd = _open(path, os.O_WRONLY)
    os.ftruncate(fd, len(other))
    os.pwrite(fd, other, 0)
    os.close(fd)


def replacing(path: Path, other: bytes) -> None:
    fresh = path.with_name("fresh")
    fd = _open(fresh, os.O_WRONLY | os.O_CREAT, 0o666)
    os.write(fd, other)
    os.close(fd)
    os.rename(fresh, path)


def truncating(path: Path, other: bytes) -> None:
    os.truncate(path, len(other) // 2)


def extending(path: Path, other: bytes) -> None:
    os.truncate(path, len(other) * 2)


_open = os.open


@pytest.mark.parametrize("change", [rewriting, replacing, truncating, extending])
@pytest.mark.quick(4)
def test_a_file_that_changes_amid_a_load_is_never_mixed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally, change: Callable[[Path, bytes], None]
) -> None:
    found, other = (saved(tmp_path / "checkpoints", number) for number in (1, 2))
    with seams(monkeypatch, lambda _: None) as calls:
        before = loaded(found)
    bad, count, refused = [], 0, 0
    for name in found.about.files:
        path, whole, theirs = (
            found.path / name,
            (found.path / name).read_bytes(),
            (other.path / name).read_bytes(),
        )
        for moment in range(1, calls[0] + 1):
            with seams(
                monkeypatch, lambda now, m=moment, p=path, t=theirs: change(p, t) if now == m else None
            ):
                try:
                    bad += [f"{name} at call {moment}"] if loaded(found) != before else []
                except CheckpointDamaged:
                    refused += 1
            count += 1
            replacing(path, whole)
    assert 0 < refused < count
    tally("files changed while they are read", count, bad)


@pytest.mark.quick(3)
@pytest.mark.parametrize("calls_until_it_is_back", [1, 2, 3, 8])
def test_a_header_that_is_another_one_for_a_moment_is_never_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally, calls_until_it_is_back: int
) -> None:
    found = saved(tmp_path / "checkpoints", 1)
    path, whole = found.path / "model.safetensors", (found.path / "model.safetensors").read_bytes()
    # Two tensors of one shape, each under the name of the other.
    theirs = whole.replace(b'"weight"', b'"other_"').replace(b'"twins_"', b'"weight"')
    theirs = theirs.replace(b'"other_"', b'"twins_"')
    assert len(theirs) == len(whole)
    assert theirs != whole
    with seams(monkeypatch, lambda _: None) as calls:
        before = loaded(found)
    bad, refused = [], 0

    def change(now: int, begin: int) -> None:
        if now in (begin, begin + calls_until_it_is_back):
            rewriting(path, theirs if now == begin else whole)

    for moment in range(1, calls[0] + 1):
        with seams(monkeypatch, functools.partial(change, begin=moment)):
            try:
                bad += [f"at call {moment}"] if loaded(found) != before else []
            except CheckpointDamaged:
                refused += 1
        rewriting(path, whole)
    assert 0 < refused < calls[0]
    tally("files changed while they are read", calls[0], bad)


@pytest.mark.heavy
@pytest.mark.parametrize("change", [rewriting, replacing])
def test_a_load_that_races_with_a_writer_gets_what_was_saved_or_an_error(
    tmp_path: Path, tally: Tally, times: int, change: Callable[[Path, bytes], None]
) -> None:
    found, other = (saved(tmp_path / "checkpoints", number) for number in (1, 2))
    name = "model.safetensors"
    path, ours, theirs = found.path / name, (found.path / name).read_bytes(), (other.path / name).read_bytes()
    before, bad, is_over, count = loaded(found), [], threading.Event(), 1_000 * times
    refused = 0

    def race() -> None:
        for content in itertools.cycle((theirs, ours)):
            change(path, content)
            if is_over.is_set():
                return

    writer = threading.Thread(target=race)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    writer.start()
    try:
        for number in range(count):
            try:
                bad += [f"load {number}"] if loaded(found) != before else []
            except CheckpointDamaged:
                refused += 1
    finally:
        is_over.set()
        writer.join()
        sys.setswitchinterval(interval)
    assert 0 < refused < count
    tally("loads that race with a writer", count, bad)


@pytest.mark.parametrize("change", [rewriting, truncating, lambda path, _: os.truncate(path, 0)])
def test_what_happens_to_a_file_after_a_load_changes_nothing_loaded(
    tmp_path: Path, change: Callable[[Path, bytes], None]
) -> None:
    found, other = (saved(tmp_path / "checkpoints", number) for number in (1, 2))
    reading = Reading(found, {})
    tensors = {n: t for tree in reading.trees.values() for n, t in tree.tensors.items()}
    before = {name: bytes(tensor_file.as_bytes(tensor)) for name, tensor in tensors.items()}

    for name in found.about.files:
        change(found.path / name, (other.path / name).read_bytes())

    # A mapped file would end the process here: SIGBUS
    assert {name: bytes(tensor_file.as_bytes(tensor)) for name, tensor in tensors.items()} == before


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: /proc/self/maps")
def test_no_file_of_a_checkpoint_is_mapped_into_memory(run_dir: Path) -> None:
    training, state = tiny.load(run_dir)
    with state:
        tiny.save_next(training, state, 1.0)
    _, again = tiny.load(run_dir)
    with again:
        assert str(run_dir) not in Path("/proc/self/maps").read_text()
        assert again.step == 1


def test_a_manifest_is_parsed_from_the_bytes_that_were_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, other = (saved(tmp_path / "checkpoints", number) for number in (1, 2))
    real, reads = disk.read_small, []

    def counted(folder: Path, name: str, *more: Any) -> bytes:
        reads.append(name)
        return real(folder, name, *more)

    monkeypatch.setattr(disk, "read_small", counted)
    assert checkpoint.open_checkpoint(found.path).about == found.about != other.about
    assert reads == [manifest.NAME]
