"""Pinning: what is expected is loaded and nothing else, and what is hashed is what is used."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gloo
import pytest
import torch
from forgery import flip_last, forge
from places import DOCS
from tiny import assert_goes_on, fresh, load, save_next, uninterrupted

from resumable import (
    CheckpointDamaged,
    CheckpointNotExpected,
    CheckpointNotFound,
    Run,
    RunState,
    UsageError,
    load_weights,
)
from resumable.cli import app
from resumable.files import block_queue, disk, file_reader, large_files, tensor_file
from resumable.run import manifest
from resumable.run.checkpoint import Checkpoint, open_checkpoint

pytestmark = pytest.mark.proves("safe")

GUIDE = DOCS / "guide/trust.md"
OTHER = f"sha256:{'0' * 64}"


@pytest.fixture
def run(run_dir: Path) -> Run:
    """A run with the checkpoints 1 and 2."""
    training, state = load(run_dir, keep=None)
    with state:
        save_next(training, state, 2.0)
        save_next(training, state, 1.0)
    return state.run


def shell() -> str:
    """Return the command that the guide gives."""
    (found,) = re.findall(r"^cd .*\n(find .* \| sha256sum)$", GUIDE.read_text(), re.MULTILINE)
    return str(found)


def test_a_run_continues_from_the_content_that_is_expected(run: Run) -> None:
    training, state = load(run.path, expect=run.open(2).pin())

    with state:
        assert training.digest() == uninterrupted()[2]
        assert state.resumed


def test_a_pin_is_what_the_shell_computes(run: Run) -> None:
    folder = run.open(2).path
    done = subprocess.run(["bash", "-c", shell()], cwd=folder, capture_output=True, text=True, check=True)

    assert run.open(2).pin() == f"sha256:{done.stdout.split()[0]}"


def test_every_byte_of_every_file_counts(run: Run) -> None:
    pins = {run.open(2).pin()}
    for file in (path for path in run.open(2).path.rglob("*") if path.is_file()):
        before = file.read_bytes()
        file.write_bytes(before + b" ")
        with pytest.raises(CheckpointDamaged):
            run.open(2).pin()
        file.write_bytes(before)

    assert run.open(2).pin() in pins
    assert run.open(1).pin() not in pins


def test_a_forgery_that_the_format_itself_cannot_tell_is_refused(run: Run) -> None:
    expect = run.open(2).pin()
    forge(run.open(2), flip_last)
    run.open(2).verify()

    with pytest.raises(CheckpointNotExpected, match=expect):
        load(run.path, expect=expect)


def test_nothing_is_touched_where_the_content_is_another(run: Run) -> None:
    training = fresh()
    before = [tensor.clone() for tensor in training.model.state_dict().values()]
    parts = {"model": training.model, "optimizer": training.optimizer, "extra": {"seen": training.seen}}

    with pytest.raises(CheckpointNotExpected, match=OTHER):
        RunState.load(run.path, **parts, minimize="loss", expect=OTHER)

    assert all(map(torch.equal, before, training.model.state_dict().values()))
    assert training.seen == []


def test_an_older_checkpoint_is_never_looked_for_in_its_place(run: Run) -> None:
    with pytest.raises(CheckpointNotExpected, match="000002"):
        load(run.path, expect=run.open(1).pin())


def test_an_older_one_stands_in_for_a_damaged_one_only_if_expected(run: Run) -> None:
    expect = run.open(1).pin()
    (run.open(2).path / "state.json").write_bytes(b"{}")

    with pytest.warns(UserWarning, match="skipped"), load(run.path, expect=expect)[1] as state:
        assert state.step == 1
    with pytest.warns(UserWarning, match="skipped"), pytest.raises(CheckpointNotExpected):
        load(run.path, expect=OTHER)


@pytest.mark.parametrize("expect", ["", "sha256:", f"SHA256:{'0' * 64}", "0" * 64, 7, f"{OTHER}\n"])
def test_what_is_no_digest_is_refused_at_the_door(run_dir: Path, expect: Any) -> None:
    with pytest.raises(UsageError, match="expect="):
        load(run_dir, expect=expect)

    assert not run_dir.exists()


def test_what_is_expected_has_to_be_there(run_dir: Path) -> None:
    with pytest.raises(CheckpointNotFound):
        load(run_dir, expect=OTHER)
    with pytest.raises(UsageError, match="never"):
        load(run_dir, expect=OTHER, resume="never")


def test_the_environment_overrides_which_one_and_not_what_is_expected(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESUMABLE_RESUME", "1")

    with load(run.path, expect=run.open(1).pin())[1] as state:
        assert state.step == 1
    with pytest.raises(CheckpointNotExpected):
        load(run.path, expect=run.open(2).pin())


def start_mine(mine: Path, theirs: Checkpoint, expect: str) -> bytes:
    """Start the script of somebody who continues from another's checkpoint; take one step, and save."""
    training, state = load(mine)
    with state:
        if not state.resumed:
            state.restore(theirs.path, expect=expect)
        save_next(training, state, 1.0)
        return training.digest()


def test_a_run_continues_from_anothers_checkpoint_and_then_its_own(run: Run, tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine", run.open(2)

    steps = [start_mine(mine, theirs, theirs.pin()) for _ in range(3)]

    assert steps == uninterrupted()[3:6]
    assert Run(mine).open(3).about.parent == 2
    assert_goes_on(mine, 5)
    assert run.numbers() == [1, 2]


def test_a_restore_of_other_content_leaves_everything_as_it_was(run: Run, tmp_path: Path) -> None:
    training, state = load(tmp_path / "mine")

    with state:
        with pytest.raises(CheckpointNotExpected):
            state.restore(run.open(2).path, expect=OTHER)
        assert training.digest() == uninterrupted()[0]
        assert state.step == 0


class Weak:
    """A hash for which anybody finds another content with the same digest: they all have the same."""

    def __init__(self, *_: object) -> None:
        pass

    def update(self, _: object) -> None:
        pass

    def digest(self) -> bytes:
        return bytes(16)


@pytest.fixture
def weak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are vouched for by what can be forged: only what is pinned is certain then."""
    weak = SimpleNamespace(xxh3_128=Weak, xxh3_128_digest=lambda _: bytes(16))
    for module in (file_reader, large_files, block_queue):
        monkeypatch.setattr(module, "xxhash", weak)


def swap_when_opened(
    monkeypatch: pytest.MonkeyPatch,
    path: Path,
    time: int,
    change: Callable[[bytes], bytes] = flip_last,
) -> list[str]:
    """Put another's content in the place of a file, right before it is opened for that time."""
    real, opened = disk.opened, []

    def opening(folder: Path, name: str, size: int | None = None) -> Any:
        if folder / name == path:
            opened.append(name)
            if len(opened) == time:
                path.with_name("other").write_bytes(change(path.read_bytes()))
                os.replace(path.with_name("other"), path)
        return real(folder, name, size)

    monkeypatch.setattr(disk, "opened", opening)
    return opened


@pytest.mark.quick(4)
@pytest.mark.usefixtures("weak")
@pytest.mark.parametrize("time", range(1, 6))
@pytest.mark.parametrize(
    "file", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]
)
def test_a_file_that_is_swapped_during_the_load_is_refused_or_was_not_used(
    run: Run, monkeypatch: pytest.MonkeyPatch, file: str, time: int
) -> None:
    expect = run.open(2).pin()
    opened = swap_when_opened(monkeypatch, run.open(2).path / file, time)
    training = None

    with contextlib.suppress(CheckpointDamaged, CheckpointNotExpected):
        training, state = load(run.path, resume=2, expect=expect)
        state.close()

    assert training is None or training.digest() == uninterrupted()[2]
    # Each is opened at least once, and what is swapped before it is read for good is refused.
    assert opened
    assert training is None or len(opened) < time


@pytest.mark.usefixtures("weak")
@pytest.mark.parametrize("time", range(1, 5))
@pytest.mark.parametrize(
    "file", ["model.safetensors", "model-frozen.safetensors", "state.json", "manifest.json"]
)
def test_weights_that_are_swapped_while_they_are_loaded_are_refused(
    run: Run, monkeypatch: pytest.MonkeyPatch, file: str, time: int
) -> None:
    expect, model = run.open(2).pin(), fresh().model
    opened = swap_when_opened(monkeypatch, run.open(2).path / file, time)

    with contextlib.suppress(CheckpointDamaged, CheckpointNotExpected):
        load_weights(model, run.open(2).path, expect=expect)
        assert len(opened) < time
        return

    assert all(map(torch.equal, fresh().model.state_dict().values(), model.state_dict().values()))


@pytest.mark.usefixtures("weak")
def test_a_header_that_is_swapped_while_weights_are_loaded_is_noticed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run.open(2).path / "model.safetensors"
    swap_when_opened(monkeypatch, path, 2, lambda content: content.replace(b'"head.bias"', b'"heat.bias"'))

    with pytest.raises(CheckpointDamaged, match="has changed while it was read"):
        load_weights(fresh().model, path.parent)


def start(rank: int, run_dir: Path, expect: str | None) -> tuple[int, bytes]:
    """Start the script in one process of several, and take a step."""
    training, state = load(run_dir, expect=expect, timeout=20)
    with state:
        done = state.step
        save_next(training, state, 1.0)
    return done, training.digest()


@pytest.mark.heavy
def test_all_processes_continue_from_the_expected_content_only(run_dir: Path, tmp_path: Path) -> None:
    def begin(expect: str | None) -> list[gloo.Ended]:
        return gloo.run(2, start, run_dir, expect, folder=tmp_path / "group")

    begin(None)
    expect = Run(run_dir).open(1).pin()

    assert [ended.value for ended in begin(expect)] == [(1, uninterrupted()[2])] * 2
    assert [type(ended.error) for ended in begin(expect)] == [CheckpointNotExpected] * 2
    # What only the other one reads for itself counts too.
    found = Run(run_dir).open(2)
    expect = found.pin()
    forge(found, flip_last, "ranks/00001.safetensors")
    assert [type(ended.error) for ended in begin(expect)] == [CheckpointNotExpected] * 2


def test_the_tensors_of_a_large_file_are_hashed_in_their_order(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_files, "BLOCK", 64)
    monkeypatch.setattr(file_reader, "_PIECE", 16)
    training, state = load(run_dir)
    with state:
        save_next(training, state, 1.0)

    expect = state.run.open(1).pin()

    assert load(run_dir, expect=expect)[0].digest() == uninterrupted()[1]


def test_a_file_that_the_manifest_does_not_name_is_no_part_of_the_pin(run: Run) -> None:
    expect = run.open(2).pin()
    (run.open(2).path / "notes.txt").write_text("mine")

    assert run.open(2).pin() == expect


def test_a_manifest_that_was_swapped_since_it_was_opened_is_noticed(run: Run) -> None:
    found = run.open(2)
    shutil.copy(run.open(1).path / manifest.NAME, found.path / manifest.NAME)

    with pytest.raises(CheckpointDamaged, match="changed since it was opened"):
        found.pin()


def test_the_command_line_prints_pins(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    pins = [run.open(number).pin() for number in (1, 2)]

    assert app.main(["verify", str(run.path), "--all", "--pin"]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == pins
    assert app.main(["verify", str(run.path), "--all", "--pin", "--json"]) == 0
    assert [row["pin"] for row in json.loads(capsys.readouterr().out)] == pins


def test_what_is_damaged_has_no_pin(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    (run.open(2).path / "state.json").write_bytes(b"{}")

    assert app.main(["verify", str(run.path), "--all", "--pin", "--json"]) == 4
    assert json.loads(capsys.readouterr().out)[1]["pin"] is None
    assert open_checkpoint(run.open(1).path).pin()
    assert tensor_file.from_safetensors(run.open(1).read_file("model.safetensors"))
